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
    forward, backward = "KL(π ‖ ref)", "KL(ref ‖ π)"
    cases = {  # the term, the policy that sampled its tokens, and whose gradient it has
        "k1": (terms["k1"], FAR, "nothing"),
        "k2": (terms["k2"], FAR, forward),
        "k3": (terms["k3"], FAR, backward),
        "rho k1": (rho * terms["k1"], NEAR, forward),
        "rho k2": (k2_kl(logprobs, NEAR.log(), REF.log()), NEAR, forward),
        "rho k3": (rho * terms["k3"], NEAR, forward),
        "k1 in the reward": (terms["k1"].detach() * logprobs, FAR, forward),  # a constant factor
    }

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    full = {"nothing": torch.zeros(4, dtype=torch.float64)}
    full |= {forward: gradient(kl(p, REF)), backward: gradient(kl(REF, p))}
    means, variances = {}, {}
    for name, (term, sampler, told) in cases.items():
        each = torch.stack([gradient(of_token) for of_token in term])
        means[name] = sampler @ each
        variances[name] = sampler @ (each - means[name]).square().sum(dim=1)
        torch.testing.assert_close(means[name], full[told])
    # What the page says in words.
    assert round((variances["k3"] / variances["k2"]).item()) == 36
    assert round((means["k3"] / means["k2"])[0].item()) == 8
    torch.testing.assert_close(variances["k1 in the reward"], variances["k2"])
    wrong = FAR @ torch.stack([gradient(each) for each in terms["k3"].detach() * logprobs])
    assert (wrong[:2] > 0).all()  # k3 in the reward: a step lowers the logits of a and b
