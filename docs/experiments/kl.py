"""docs/kl.md: the estimators of the KL and its two directions, over small vocabularies in which
every outcome can be enumerated, computed with the scripts' own functions.
"""

from collections.abc import Sequence

from torch import Tensor

from docs.experiments.lib.drawing import COLOURS, GREY, panel
from docs.experiments.lib.enumeration import (
    gradients,
    mean_and_deviation,
    mean_and_variance,
    softmax_policy,
    tensor,
)
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.tables import fixed
from ppo_rlhf import k2_kl, k3_kl

# A vocabulary of four, a policy near the reference and one far from it.
VOCABULARY = "abcd"
REFERENCE = (0.4, 0.3, 0.2, 0.1)
POLICIES = {"near": (0.3, 0.3, 0.25, 0.15), "far": (0.01, 0.09, 0.3, 0.6)}
# A reference over five places.
PLACES = range(1, 6)
TWO_MODES = (0.46, 0.03, 0.02, 0.03, 0.46)
FORWARD, REVERSE = "KL(π ‖ ref)", "KL(ref ‖ π)"
SHOWN = ("k1", "k2", "k3", "rho k2, tokens of π_old", "k1 in the reward", "k3 in the reward")


def estimators(
    probabilities: Sequence[float], old_probabilities: Sequence[float] | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, log-probs and, by name, what each estimator gives for each token of the vocabulary.

    Those with rho in front are weighted with pi / pi_old, rho k2 without its gradient.
    """
    logits, logprobs = softmax_policy(probabilities)
    old_logprobs = logprobs.detach()
    if old_probabilities is not None:
        old_logprobs = tensor(old_probabilities).log()
    ref_logprobs = tensor(REFERENCE).log()
    rho = (logprobs - old_logprobs).exp()
    k1, k3 = logprobs - ref_logprobs, k3_kl(logprobs, ref_logprobs)
    terms = {
        "k1": k1,
        "k2": k2_kl(logprobs, logprobs, ref_logprobs),
        "k3": k3,
        "rho k1": rho * k1,
        "rho k2": k2_kl(logprobs, old_logprobs, ref_logprobs),
        "rho k3": rho * k3,
    }
    return logits, logprobs, terms


def full_kl(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q), summed over the vocabulary."""
    p, q = tensor(p), tensor(q)
    return (p * (p / q).log()).sum().item()


def kl_moments(probabilities: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of one token's k1, k2 and k3."""
    _, logprobs, terms = estimators(probabilities)
    p, moments = logprobs.detach().exp(), {}
    for name in ("k1", "k2", "k3"):
        moments[name] = mean_and_deviation(p, terms[name].detach())
    return moments


def tokens_table() -> dict:
    """What the estimators give for each token of the far policy."""
    _, _, terms = estimators(POLICIES["far"])
    rows = []
    for i, token in enumerate(VOCABULARY):
        estimates = [fixed(terms[name][i].item()) for name in ("k1", "k2", "k3")]
        rows.append([token, f"{REFERENCE[i]:g}", f"{POLICIES['far'][i]:g}", *estimates])
    return {"columns": ["token", "ref", "π", "k1", "k2", "k3"], "rows": rows}


def values_table() -> dict:
    """Bias and deviation of the estimators, also on tokens of an older policy."""
    rows = []
    for policy, probabilities in POLICIES.items():
        exact = full_kl(probabilities, REFERENCE)
        old_probabilities = tensor(REFERENCE if policy == "near" else POLICIES["near"])
        _, _, terms = estimators(probabilities)
        for name, (mean, deviation) in kl_moments(probabilities).items():
            stale_mean = (old_probabilities @ terms[name].detach()).item()
            cells = [fixed(number) for number in (exact, mean, mean - exact, deviation, stale_mean)]
            rows.append([policy, name, *cells])
    columns = ["policy", "estimator", "full KL", "mean", "bias", "standard deviation"]
    return {"columns": [*columns, "mean over tokens of π_old"], "rows": rows}


def gradient_moments() -> dict[str, tuple[list[float], float, str]]:
    """By term: its expected gradient by the four logits; the variance of one token's, summed over
    them; and what it is the gradient of."""
    policy, old_policy, reference = POLICIES["far"], POLICIES["near"], tensor(REFERENCE)
    moments = {}
    logits, logprobs, terms = estimators(policy)
    full_kls = {
        FORWARD: (logprobs.exp() * (logprobs - reference.log())).sum(),
        REVERSE: -(reference @ logprobs),  # plus a constant
    }
    for name, kl in full_kls.items():
        moments[f"full {name}"] = (gradients([kl], logits)[0].tolist(), 0.0, name)

    # As losses, on tokens of the policy itself, and of an older one.
    is_gradient_of = {
        "k1": "nothing",
        "k2": FORWARD,
        "k3": REVERSE,
        "rho k1": FORWARD,
        "rho k3": FORWARD,
    }
    for name, target in is_gradient_of.items():
        moments[name] = (*mean_and_variance(tensor(policy), gradients(terms[name], logits)), target)
    old_logits, _, old_terms = estimators(policy, old_policy)
    for name, target in {"k2": "neither", "rho k2": FORWARD, "rho k3": FORWARD}.items():
        term_gradients = gradients(old_terms[name], old_logits)
        mean, variance = mean_and_variance(tensor(old_policy), term_gradients)
        moments[f"{name}, tokens of π_old"] = (mean, variance, target)

    # As rewards: a constant times the log-prob.
    for name, target in {"k1": FORWARD, "k2": "neither", "k3": "neither"}.items():
        score_gradients = gradients(terms[name].detach() * logprobs, logits)
        mean, variance = mean_and_variance(tensor(policy), score_gradients)
        moments[f"{name} in the reward"] = (mean, variance, target)
    return moments


def gradients_table() -> dict:
    rows, moments = [], gradient_moments()
    for name in SHOWN:
        mean, variance, target = moments[name]
        rows.append([name, *map(fixed, mean), fixed(variance, 2), target])
    return {"columns": ["term", *VOCABULARY, "variance", "is the gradient of"], "rows": rows}


def bump(centre: int) -> tuple[float, ...]:
    """One mode: probabilities in proportion to 2^-(distance squared) over the places."""
    weights = [2.0 ** -((place - centre) ** 2) for place in PLACES]
    return tuple(weight / sum(weights) for weight in weights)


def directions_table() -> dict:
    """Both directions of the KL between a bump and a reference with two modes."""
    rows = []
    for centre in PLACES[:3]:  # the others mirror them
        policy = bump(centre)
        kls = [full_kl(policy, TWO_MODES), full_kl(TWO_MODES, policy)]
        probabilities = ", ".join(fixed(p, 2) for p in policy)
        rows.append([str(centre), probabilities, *(fixed(kl, 2) for kl in kls)])
    return {"columns": ["centre", "π", FORWARD, REVERSE], "rows": rows}


def tables(_: dict) -> dict:
    return {
        "kl tokens": tokens_table(),
        "kl values": values_table(),
        "kl gradients": gradients_table(),
        "kl directions": directions_table(),
    }


# --- the figure --------------------------------------------------------------------------------
def path_through_far() -> list[list[float]]:
    """Policies from the reference through the far one: log-probs in proportion, normalised."""
    path = []
    for step in range(1, 61):
        s = 0.02 * step
        pairs = zip(REFERENCE, POLICIES["far"], strict=True)
        weights = [q ** (1 - s) * p**s for q, p in pairs]
        path.append([weight / sum(weights) for weight in weights])
    return path


def draw(_: dict) -> dict:
    xlabel = "full KL(π ‖ ref), nats"
    mean_axis = panel("k1 and k3 are unbiased, k2 is not", xlabel, "mean, nats")
    deviation_axis = panel("Far from the reference k3 is noisy", xlabel, "standard deviation, nats")
    styles = {
        "k1": dict(color="#97a0aa", ls="-", lw=4.0),
        "k2": dict(color=COLOURS[0], ls="-", lw=1.5),
        "k3": dict(color=COLOURS[1], ls="--", lw=1.5),
    }
    path = path_through_far()
    kls = [round(full_kl(policy, REFERENCE), 4) for policy in path]
    moments = [kl_moments(policy) for policy in path]
    for name, style in styles.items():
        means, deviations = zip(*(moment[name] for moment in moments), strict=True)
        mean_axis.plot(kls, [round(x, 4) for x in means], label=name, **style)
        deviation_axis.plot(kls, [round(x, 4) for x in deviations], label=name, **style)
    mean_axis.legend()
    deviation_axis.legend()

    direction_axis = panel("KL(π ‖ ref) picks a mode", "place", "probability")
    direction_axis.bar(PLACES, TWO_MODES, color=GREY, alpha=0.35, label="ref")
    nearest = {
        FORWARD: min(PLACES, key=lambda centre: full_kl(bump(centre), TWO_MODES)),
        REVERSE: min(PLACES, key=lambda centre: full_kl(TWO_MODES, bump(centre))),
    }
    for name, line, colour in ((FORWARD, "o-", COLOURS[0]), (REVERSE, "s--", COLOURS[1])):
        probabilities = [round(p, 4) for p in bump(nearest[name])]
        direction_axis.plot(PLACES, probabilities, line, color=colour, label=f"lowest {name}")
    direction_axis.set(ylim=(0, 1), xticks=PLACES)
    direction_axis.legend(loc="upper right")
    return {"kl_mean": mean_axis, "kl_deviation": deviation_axis, "kl_direction": direction_axis}


EXPERIMENTS = (Experiment("kl", tables, draw=draw),)
