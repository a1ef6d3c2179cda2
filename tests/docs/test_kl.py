"""The tables of docs/kl_details.md by enumeration of four tokens, with the scripts' estimators."""

import torch
from by_hand import close, rows_of

import grpo
from ppo_rlhf import k2_kl

PAGE = "docs/kl_details.md"


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


REF = tensor(0.4, 0.3, 0.2, 0.1)
NEAR, FAR = tensor(0.3, 0.3, 0.25, 0.15), tensor(0.01, 0.09, 0.3, 0.6)


def kl(p, q):
    return (p * (p / q).log()).sum()


def estimators(logprobs):
    """What each gives for each token of the vocabulary."""
    log_ref = REF.log()
    k1 = logprobs - log_ref
    return {"k1": k1, "k2": k2_kl(logprobs, logprobs, log_ref), "k3": grpo.k3_kl(logprobs, log_ref)}


def test_mean_and_deviation_of_k1_k2_k3():
    for p, old, name in ((NEAR, REF, "near"), (FAR, NEAR, "far")):
        for estimator, terms in estimators(p.log()).items():
            mean = p @ terms
            deviation = (p @ (terms - mean).square()).sqrt()
            cells = rows_of(PAGE, "| policy | estimator |")[name, estimator]
            close(cells[2:], torch.stack([kl(p, REF), mean, deviation, old @ terms]), 3)
            if estimator != "k2":
                torch.testing.assert_close(mean, kl(p, REF))


def test_the_gradients_of_the_terms():
    logits = FAR.log().requires_grad_()
    p = logits.softmax(dim=0)
    logprobs = p.log()
    terms = estimators(logprobs)
    rho = p / NEAR
    cases = {  # the term, and the policy that sampled its tokens
        "k1": (terms["k1"], FAR),
        "-log π, an entropy bonus": (-logprobs, FAR),
        "k2": (terms["k2"], FAR),
        "k3": (terms["k3"], FAR),
        "rho k2, tokens of π_old": (k2_kl(logprobs, NEAR.log(), REF.log()), NEAR),
        "rho k3, tokens of π_old": (rho * terms["k3"], NEAR),
        "k1 in the reward": (terms["k1"].detach() * logprobs, FAR),  # a constant times the log-prob
        "k3 in the reward": (terms["k3"].detach() * logprobs, FAR),
    }

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    full = {
        "nothing": torch.zeros(4),
        "KL(π ‖ ref)": gradient(kl(p, REF)),
        "KL(ref ‖ π)": gradient(kl(REF, p)),
    }
    table = rows_of(PAGE, "| term | a | b | c | d |")
    assert [*table] == [*cases]
    for name, (term, sampler) in cases.items():
        each = torch.stack([gradient(of_token) for of_token in term])
        mean = sampler @ each
        variance = sampler @ (each - mean).square().sum(dim=1)
        cells = table[name]
        close(cells[1:5], mean, 3)
        close(cells[5:6], variance[None], 2)
        same = [told for told, other in full.items() if (mean - other).abs().max() < 1e-8]
        assert same == ([] if cells[6] == "neither" else cells[6:])
    # Of the page's other table: rho with its gradient.
    torch.testing.assert_close(gradient(NEAR @ (rho * terms["k1"])), full["KL(π ‖ ref)"])
