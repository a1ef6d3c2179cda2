"""docs/kl.md: the estimators of the KL and its two directions, over small vocabularies in which
every outcome can be enumerated, computed with the scripts' own functions.
"""

from collections.abc import Sequence

from torch import Tensor

from docs.experiments.lib.drawing import GREY, RED, TEXT, panel
from docs.experiments.lib.enumeration import (
    gradients,
    mean_and_deviation,
    mean_and_variance,
    softmax_policy,
    tensor,
)
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.tables import fixed
from grpo import k3_kl
from ppo_rlhf import k2_kl

# A vocabulary of four, a policy near the reference and one far from it.
VOCABULARY = "abcd"
REFERENCE = (0.4, 0.3, 0.2, 0.1)
NEAR, FAR = (0.3, 0.3, 0.25, 0.15), (0.01, 0.09, 0.3, 0.6)
# A reference over five places.
PLACES = range(1, 6)
TWO_MODES = (0.46, 0.03, 0.02, 0.03, 0.46)
FORWARD, REVERSE = "KL(π ‖ ref)", "KL(ref ‖ π)"


def estimators(logprobs: Tensor) -> dict[str, Tensor]:
    """What each estimator gives for each token of the vocabulary."""
    ref_logprobs = tensor(REFERENCE).log()
    return {
        "k1": logprobs - ref_logprobs,
        "k2": k2_kl(logprobs, logprobs, ref_logprobs),
        "k3": k3_kl(logprobs, ref_logprobs),
    }


def full_kl(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q), summed over the vocabulary."""
    p, q = tensor(p), tensor(q)
    return (p * (p / q).log()).sum().item()


def values_table() -> dict:
    """Mean and deviation of the estimators, and their mean on tokens of an older policy."""
    rows = []
    for name, policy, old_policy in (("near", NEAR, REFERENCE), ("far", FAR, NEAR)):
        exact = fixed(full_kl(policy, REFERENCE))
        for estimator, terms in estimators(tensor(policy).log()).items():
            mean, deviation = mean_and_deviation(tensor(policy), terms)
            stale_mean = (tensor(old_policy) @ terms).item()
            rows.append([name, estimator, exact, *map(fixed, (mean, deviation, stale_mean))])
    columns = ["policy", "estimator", "full KL", "mean", "standard deviation"]
    return {"columns": [*columns, "mean over tokens of π_old"], "rows": rows}


def gradients_table() -> dict:
    """By term: its expected gradient by the four logits of the far policy, the variance of one
    token's, and what it is the gradient of."""
    logits, logprobs = softmax_policy(FAR)
    terms = estimators(logprobs)
    rho_k2 = k2_kl(logprobs, tensor(NEAR).log(), tensor(REFERENCE).log())
    rho = (logprobs - tensor(NEAR).log()).exp()
    cases = {  # the term, the policy that sampled its tokens, and what it is the gradient of
        "k1": (terms["k1"], FAR, "nothing"),
        "k2": (terms["k2"], FAR, FORWARD),
        "k3": (terms["k3"], FAR, REVERSE),
        "rho k2, tokens of π_old": (rho_k2, NEAR, FORWARD),
        "rho k3, tokens of π_old": (rho * terms["k3"], NEAR, FORWARD),
        # As a reward: a constant times the log-prob.
        "k1 in the reward": (terms["k1"].detach() * logprobs, FAR, FORWARD),
        "k3 in the reward": (terms["k3"].detach() * logprobs, FAR, "neither"),
    }
    rows = []
    for name, (term, sampler, target) in cases.items():
        mean, variance = mean_and_variance(tensor(sampler), gradients(term, logits))
        rows.append([name, *map(fixed, mean), fixed(variance, 2), target])
    return {"columns": ["term", *VOCABULARY, "variance", "is the gradient of"], "rows": rows}


def tables(_: dict) -> dict:
    return {
        "kl values": values_table(),
        "kl gradients": gradients_table(),
    }


# --- the figure --------------------------------------------------------------------------------
def one_mode(centre: int) -> list[float]:
    """Probabilities in proportion to 2^-(distance squared) over the places."""
    weights = [2.0 ** -((place - centre) ** 2) for place in PLACES]
    return [weight / sum(weights) for weight in weights]


def draw(_: dict) -> dict:
    axis = panel("KL(π ‖ ref) picks a mode", "place", "probability")
    axis.bar(PLACES, TWO_MODES, color=GREY, alpha=0.35, label="ref")
    policies = [one_mode(centre) for centre in PLACES]
    seeking = min(policies, key=lambda policy: full_kl(policy, TWO_MODES))
    covering = min(policies, key=lambda policy: full_kl(TWO_MODES, policy))
    axis.plot(PLACES, seeking, "o-", color=TEXT, label=f"lowest {FORWARD}")
    axis.plot(PLACES, covering, "s--", color=RED, label=f"lowest {REVERSE}")
    axis.set(ylim=(0, 1), xticks=PLACES)
    axis.legend(loc="upper right")
    return {"kl": axis}


EXPERIMENTS = (Experiment("kl", more_tables=tables, draw=draw),)
