"""What docs/kl_details.md says, by enumeration of four tokens, with the scripts' estimators."""

import pytest
import torch
import grpo
from ppo_rlhf import k2_kl


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
    deviations = {}
    for p, name in ((NEAR, "near"), (FAR, "far")):
        for estimator, terms in estimators(p.log()).items():
            mean = p @ terms
            deviations[name, estimator] = (p @ (terms - mean).square()).sqrt()
            if estimator != "k2":
                torch.testing.assert_close(mean, kl(p, REF))
    # What the page says in words.
    words = {("near", "k1"): 0.247, ("near", "k3"): 0.025, ("far", "k1"): 1.07, ("far", "k3"): 3.47}
    for case, number in words.items():
        assert deviations[case].item() == pytest.approx(number, rel=0.02)
    of_old = NEAR @ estimators(FAR.log())["k3"]
    assert [of_old.item(), kl(FAR, REF).item()] == pytest.approx([11.1, 1.05], rel=0.005)


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
