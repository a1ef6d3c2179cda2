"""The numbers of docs/policy_gradient.md and docs/kl.md: small cases in which every outcome can be
enumerated, computed with the scripts' own functions, and the two figures.

    python docs/experiments/figures.py theory
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo import grpo_loss
from ppo_rlhf import gae, k2_kl, k3_kl
from reinforce import policy_gradient_loss

# One prompt, three completions.
PROBABILITIES, REWARDS = (0.5, 0.3, 0.2), (1.0, 0.0, 2.0)
# Two tokens: the probability of a first token, and after it that of a second one which is right
# and has the reward 1.
TREE = {"a": (0.6, 0.5), "b": (0.4, 0.25)}
CLIP = 0.2  # eps of PPO
PENALTIES = (1.0, 3.0)  # coefficient of PPO's penalty, KL(pi_old || pi), instead of the clip
# The three completions again: under a later policy, and their advantages, the reward minus a
# baseline.
LATER_PROBABILITIES, BASELINE = (0.4, 0.3, 0.3), 0.9
WEIGHT_CAP = 1.25  # of truncated importance sampling
ENTROPY_COEFS = (0.05, 0.08, 0.1, 0.2)
# The tokens of tiny/arithmetic, those of tiny/reviews, and those of Qwen2.5-0.5B.
VOCABULARY_SIZES = (18, 135, 151_936)
# The rewards and values of the worked example in docs/ppo_rlhf.md.
TOKEN_REWARDS, VALUES = (-0.02, 0.01, 1.0), (0.5, 0.6, 0.8)
LAMBDAS = (0.0, 0.5, 0.95, 1.0)  # of GAE
# A vocabulary of four, a policy near the reference and one far from it.
VOCABULARY = "abcd"
REFERENCE = (0.4, 0.3, 0.2, 0.1)
POLICIES = {"near": (0.3, 0.3, 0.25, 0.15), "far": (0.01, 0.09, 0.3, 0.6)}
# A reference over five places.
PLACES = range(1, 6)
TWO_MODES = (0.46, 0.03, 0.02, 0.03, 0.46)
FORWARD, REVERSE = "KL(π ‖ ref)", "KL(ref ‖ π)"


def tensor(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def show(number: float, digits: int = 3) -> str:
    """The number, without a sign where it is rounded to 0."""
    text = f"{number:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def softmax_policy(probabilities: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Logits and log-probs of a policy that has these probabilities."""
    logits = tensor(probabilities).log().requires_grad_()
    return logits, logits.log_softmax(dim=0)


def gradients(terms: Sequence[Tensor], logits: Tensor) -> Tensor:
    """The gradient of each term by the logits (n, V)."""
    return torch.stack([torch.autograd.grad(term, logits, retain_graph=True)[0] for term in terms])


def mean_and_deviation(probabilities: Tensor, values: Tensor) -> tuple[float, float]:
    """Of a random number that is value i with probability i."""
    mean = probabilities @ values
    deviation = (probabilities @ (values - mean).square()).sqrt()
    return mean.item(), deviation.item()


def mean_and_variance(probabilities: Tensor, vectors: Tensor) -> tuple[list[float], float]:
    """Of a random vector that is row i with probability i; the variance is summed over columns."""
    mean = probabilities @ vectors
    variance = probabilities @ (vectors - mean).square().sum(dim=1)
    return mean.tolist(), variance.item()


# --- policy_gradient.md: each function gives rows of a table, and the numbers behind them -------
def baselines() -> tuple[list, dict]:
    """Mean and variance of the estimate (r - b) grad log pi, for several b."""
    logits, logprobs = softmax_policy(PROBABILITIES)
    p, rewards = tensor(PROBABILITIES), tensor(REWARDS)
    squared_scores = gradients(logprobs, logits).square().sum(dim=1)
    best = ((p * rewards * squared_scores).sum() / (p * squared_scores).sum()).item()
    mean_reward = (p * rewards).sum().item()
    cases = {
        "-1": -1.0,
        "0": 0.0,
        f"{show(mean_reward, 1)}, the mean reward": mean_reward,
        f"{show(best)}, the best": best,
        "3": 3.0,
    }
    rows, numbers = [], {}
    for name, baseline in cases.items():
        objectives = []
        for logprob, reward in zip(logprobs, rewards, strict=True):
            advantage = (reward - baseline).view(1)
            objectives.append(-policy_gradient_loss(logprob.view(1, 1), advantage, 1))
        mean, variance = mean_and_variance(p, gradients(objectives, logits))
        rows.append([name, ", ".join(show(x, 2) for x in mean), show(variance)])
        numbers[name] = {"b": baseline, "mean": mean, "variance": variance}
    return rows, numbers


def start_value() -> float:
    """V(s_1) of the tree: the probability of a right second token."""
    return sum(probability * right for probability, right in TREE.values())


def two_views() -> tuple[list, dict]:
    """The advantage of a completion, and those of its two tokens, of a critic without error."""
    rows, numbers = [], {"start": start_value()}
    for first, (probability, right) in TREE.items():
        for second, second_probability, reward in (
            ("right", right, 1.0),
            ("wrong", 1 - right, 0.0),
        ):
            token_rewards, values = tensor([[0.0, reward]]), tensor([[start_value(), right]])
            token_advantages, _ = gae(token_rewards, values, gamma=1.0, lam=0.0)
            advantages = [reward - start_value(), *token_advantages[0].tolist()]
            name = f"{first}, {second}"
            row = [name, show(probability * second_probability, 2), show(reward, 0)]
            rows.append(row + [show(advantage, 2) for advantage in advantages])
            numbers[name] = advantages
    return rows, numbers


def wrong_critic() -> tuple[list, dict]:
    """The advantage of token b, by a critic that expects a half after either first token."""
    _, right = TREE["b"]
    true_advantage = right - start_value()
    p = tensor([right, 1 - right])
    rewards = tensor([[0.0, 1.0], [0.0, 0.0]])  # the second token right, and wrong
    values = tensor([[start_value(), 0.5]]).expand(2, 2)
    rows, numbers = [], {"true": true_advantage}
    for lam in LAMBDAS:
        advantages, _ = gae(rewards, values, gamma=1.0, lam=lam)
        mean, deviation = mean_and_deviation(p, advantages[:, 0])
        cells = [show(number) for number in (mean, mean - true_advantage, deviation)]
        rows.append([f"{lam:g}", *cells])
        numbers[f"{lam:g}"] = {"mean": mean, "deviation": deviation}
    return rows, numbers


def lambdas() -> tuple[list, dict]:
    """The advantages of three tokens, from lambda = 0 to 1."""
    rows, numbers = [], {}
    for lam in LAMBDAS:
        advantages, _ = gae(tensor([TOKEN_REWARDS]), tensor([VALUES]), gamma=1.0, lam=lam)
        numbers[f"{lam:g}"] = advantages[0].tolist()
        rows.append([f"{lam:g}", *map(show, advantages[0].tolist())])
    return rows, numbers


def clipped(ratio: float, advantage: float) -> tuple[float, float, dict]:
    """A token's objective, its derivative by the token's log-prob, and the sums for the metrics."""
    logprobs = tensor([[ratio]]).log().requires_grad_()
    loss, sums = grpo_loss(
        logprobs,
        old_logprobs=torch.zeros_like(logprobs),
        ref_logprobs=None,
        advantages=tensor([advantage]),
        weights=torch.ones_like(logprobs),
        clip_low=CLIP,
        clip_high=CLIP,
        beta=0.0,
    )
    (derivative,) = torch.autograd.grad(-loss, logprobs)
    return -loss.item(), derivative.item(), {name: value.item() for name, value in sums.items()}


def clip_cases() -> tuple[list, dict]:
    """The four cases of advantage and ratio."""
    effects = {
        (1, 0.7): "has fallen, and should rise: raised",
        (1, 1.3): "**held**, in `policy/clip_fraction_high`",
        (-1, 0.7): "**held**, in `policy/clip_fraction_low`",
        (-1, 1.3): "has risen, and should fall: lowered",
    }
    rows, numbers = [], {}
    for (advantage, ratio), effect in effects.items():
        objective, derivative, sums = clipped(ratio, advantage)
        clipped_ratio = min(max(ratio, 1 - CLIP), 1 + CLIP)
        terms = (ratio * advantage, clipped_ratio * advantage, objective, derivative)
        rows.append([f"{advantage:+d}", f"{ratio:g}", *(show(term, 1) for term in terms), effect])
        numbers[f"{advantage:+d}, {ratio:g}"] = {
            "objective": objective,
            "gradient": derivative,
            **sums,
        }
    return rows, numbers


def penalty_cases() -> tuple[list, dict]:
    """The gradient by a token's log-prob: with the clip, and with PPO's KL penalty instead.

    The KL of the old policy from the new one is estimated by k3 on the old policy's tokens, as
    `policy/approx_kl` is.
    """
    rows, numbers = [], {}
    for advantage in (1, -1):
        for ratio in (0.7, 1.0, 1.3):
            _, with_clip, _ = clipped(ratio, advantage)
            derivatives = [with_clip]
            for beta in PENALTIES:
                logprob = tensor(ratio).log().requires_grad_()
                old_logprob = torch.zeros_like(logprob)
                surrogate = (logprob - old_logprob).exp() * advantage
                objective = surrogate - beta * k3_kl(old_logprob, logprob)
                (derivative,) = torch.autograd.grad(objective, logprob)
                derivatives.append(derivative.item())
            rows.append([f"{advantage:+d}", f"{ratio:g}", *(show(x, 1) for x in derivatives)])
            numbers[f"{advantage:+d}, {ratio:g}"] = derivatives
    return rows, numbers


def stale_rollouts() -> tuple[list, dict]:
    """The first step on completions of an earlier policy: each token's coefficient, the expected
    gradient by the logits, and its variance.

    The behaviour policy has PROBABILITIES; the proximal policy and the one in training have
    LATER_PROBABILITIES.
    """
    behaviour, advantages = tensor(PROBABILITIES), tensor(REWARDS) - BASELINE
    logits, logprobs = softmax_policy(LATER_PROBABILITIES)
    proximal = logprobs.detach()
    weights = proximal.exp() / behaviour  # importance weights, proximal policy / behaviour policy
    ones = torch.ones_like(weights)
    # By name: the policy whose tokens they are, that in the ratio's denominator, the weights.
    cases = {
        "not corrected": (behaviour, proximal, ones),
        "clipped ratio to the behaviour policy": (behaviour, behaviour.log(), ones),
        "decoupled": (behaviour, proximal, weights),
        f"decoupled, weights up to {WEIGHT_CAP:g}": (
            behaviour,
            proximal,
            weights.clamp(max=WEIGHT_CAP),
        ),
        "no staleness: own completions": (proximal.exp(), proximal, ones),
    }
    rows, numbers = [], {}
    for name, (sampled_from, old_logprobs, case_weights) in cases.items():
        objectives = []
        for i in range(len(logprobs)):
            loss, _ = grpo_loss(
                logprobs[i].view(1, 1),
                old_logprobs=old_logprobs[i].view(1, 1),
                ref_logprobs=None,
                advantages=advantages[i].view(1),
                weights=case_weights[i].view(1, 1),
                clip_low=CLIP,
                clip_high=CLIP,
                beta=0.0,
            )
            objectives.append(-loss)
        by_logprob = [
            torch.autograd.grad(objective, logprobs, retain_graph=True)[0][i].item()
            for i, objective in enumerate(objectives)
        ]
        mean, variance = mean_and_variance(sampled_from, gradients(objectives, logits))
        cells = [", ".join(show(x, 2) for x in by_logprob), ", ".join(show(x) for x in mean)]
        rows.append([name, *cells, show(variance, 2)])
        numbers[name] = {"coefficients": by_logprob, "mean": mean, "variance": variance}
    return rows, numbers


def entropy_optima() -> tuple[list, dict]:
    """What the best policy leaves to the tokens of advantage 0, where one token has advantage 1.

    With an entropy bonus c it is proportional to e^(A / c), for each size of the vocabulary; with
    a KL of the same weight to a reference that gives the one token a half, to pi_ref e^(A / c).
    """
    rows, numbers = [], {}
    for coefficient in ENTROPY_COEFS:
        log_odds = -1 / coefficient  # of one other token against the best one
        left = []
        for size in VOCABULARY_SIZES:
            left.append(tensor(log_odds + math.log(size - 1)).sigmoid().item())
        left.append(tensor(log_odds).sigmoid().item())
        cells = [f"{x:.3f}" if x >= 0.001 else f"{x:.1e}" for x in left]
        rows.append([f"{coefficient:g}", *cells])
        numbers[f"{coefficient:g}"] = left
    return rows, numbers


# --- kl.md -------------------------------------------------------------------------------------
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


def kl_values() -> tuple[list, dict]:
    """Bias and deviation of the estimators, also on tokens of an older policy."""
    rows, numbers = [], {}
    for policy, probabilities in POLICIES.items():
        exact = full_kl(probabilities, REFERENCE)
        numbers[policy] = {"exact": exact, "reversed": full_kl(REFERENCE, probabilities)}
        old_probabilities = tensor(REFERENCE if policy == "near" else POLICIES["near"])
        _, _, terms = estimators(probabilities)
        for name, (mean, deviation) in kl_moments(probabilities).items():
            stale_mean = (old_probabilities @ terms[name].detach()).item()
            cells = [show(number) for number in (exact, mean, mean - exact, deviation, stale_mean)]
            rows.append([policy, name, *cells])
            numbers[policy][name] = {"mean": mean, "deviation": deviation, "stale": stale_mean}
    return rows, numbers


def kl_tokens() -> tuple[list, None]:
    """What the estimators give for each token of the far policy."""
    _, _, terms = estimators(POLICIES["far"])
    rows = []
    for i, token in enumerate(VOCABULARY):
        estimates = [show(terms[name][i].item()) for name in ("k1", "k2", "k3")]
        rows.append([token, f"{REFERENCE[i]:g}", f"{POLICIES['far'][i]:g}", *estimates])
    return rows, None


def kl_gradients() -> tuple[list, dict]:
    """Expected gradients by the four logits, and the variance of one token's, summed over them."""
    policy, old_policy, reference = POLICIES["far"], POLICIES["near"], tensor(REFERENCE)
    rows, numbers = [], {}

    def add(name: str, mean: list[float], variance: float, is_gradient_of: str) -> None:
        rows.append([name, *map(show, mean), show(variance, 2), is_gradient_of])
        numbers[name] = {"mean": mean, "variance": variance}

    logits, logprobs, terms = estimators(policy)
    full_kls = {
        FORWARD: (logprobs.exp() * (logprobs - reference.log())).sum(),
        REVERSE: -(reference @ logprobs),  # plus a constant
    }
    for name, kl in full_kls.items():
        add(f"full {name}", gradients([kl], logits)[0].tolist(), 0.0, is_gradient_of=name)

    # As losses, on tokens of the policy itself, and of an older one.
    is_gradient_of = {
        "k1": "nothing",
        "k2": FORWARD,
        "k3": REVERSE,
        "rho k1": FORWARD,
        "rho k3": FORWARD,
    }
    for name, target in is_gradient_of.items():
        mean, variance = mean_and_variance(tensor(policy), gradients(terms[name], logits))
        add(name, mean, variance, target)
    old_logits, _, old_terms = estimators(policy, old_policy)
    for name, target in {"k2": "neither", "rho k2": FORWARD, "rho k3": FORWARD}.items():
        term_gradients = gradients(old_terms[name], old_logits)
        mean, variance = mean_and_variance(tensor(old_policy), term_gradients)
        add(f"{name}, tokens of π_old", mean, variance, target)

    # As rewards: a constant times the log-prob.
    for name, target in {"k1": FORWARD, "k2": "neither", "k3": "neither"}.items():
        score_gradients = gradients(terms[name].detach() * logprobs, logits)
        mean, variance = mean_and_variance(tensor(policy), score_gradients)
        add(f"{name} in the reward", mean, variance, target)
    return rows, numbers


def bump(centre: int) -> tuple[float, ...]:
    """One mode: probabilities in proportion to 2^-(distance squared) over the places."""
    weights = [2.0 ** -((place - centre) ** 2) for place in PLACES]
    return tuple(weight / sum(weights) for weight in weights)


def directions() -> tuple[list, dict]:
    """Both directions of the KL between a bump and a reference with two modes."""
    rows, numbers = [], {}
    for centre in PLACES:
        policy = bump(centre)
        kls = [full_kl(policy, TWO_MODES), full_kl(TWO_MODES, policy)]
        cells = [show(kl, 2) for kl in kls]
        rows.append([str(centre), ", ".join(show(p, 2) for p in policy), *cells])
        numbers[str(centre)] = kls
    return rows, numbers


# --- all together ------------------------------------------------------------------------------
TABLES: dict[str, tuple[Callable[[], tuple], list[str]]] = {
    "baselines": (baselines, ["$b$", "mean of the estimate", "variance"]),
    "views": (
        two_views,
        [
            "completion",
            "probability",
            "reward",
            "$r - V(s_1)$",
            "$A_t$ of token 1",
            "of token 2",
        ],
    ),
    "critic": (wrong_critic, ["$\\lambda$", "mean", "bias", "standard deviation"]),
    "lambdas": (lambdas, ["$\\lambda$", "token 1", "token 2", "token 3"]),
    "clip": (
        clip_cases,
        [
            "$A$",
            "$\\rho$",
            "$\\rho A$",
            "$\\text{clip}(\\rho) A$",
            "minimum",
            "gradient",
            "log-prob",
        ],
    ),
    "penalty": (
        penalty_cases,
        ["$A$", "$\\rho$", "clip", *(f"penalty, weight {beta:g}" for beta in PENALTIES)],
    ),
    "stale": (
        stale_rollouts,
        ["", "coefficients $c$ of the three completions", "expected gradient", "variance"],
    ),
    "entropy": (
        entropy_optima,
        [
            "$c_e$",
            *(f"entropy, {size:,} tokens" for size in VOCABULARY_SIZES),
            "KL to a reference",
        ],
    ),
    "kl_tokens": (kl_tokens, ["token", "ref", "π", "k1", "k2", "k3"]),
    "kl_values": (
        kl_values,
        [
            "policy",
            "estimator",
            "full KL",
            "mean",
            "bias",
            "standard deviation",
            "mean over tokens of π_old",
        ],
    ),
    "kl_gradients": (kl_gradients, ["term", *VOCABULARY, "variance", "is the gradient of"]),
    "directions": (directions, ["centre", "π", FORWARD, REVERSE]),
}


def compute() -> dict[str, Any]:
    """All tables and the numbers behind them."""
    tables, all_numbers = {}, {}
    for name, (function, columns) in TABLES.items():
        rows, numbers = function()
        tables[f"theory_{name}"] = {"columns": columns, "rows": rows}
        all_numbers[name] = numbers
    return {"tables": tables, "numbers": all_numbers}


# --- the figures -------------------------------------------------------------------------------
def figure_curves() -> dict[str, Any]:
    """What `draw` draws: points (x, y) of each line, and the probabilities of the five places."""
    ratios = [0.4 + 0.01 * i for i in range(121)]
    curves = {}
    for advantage in (1, -1):
        curves[f"clip, A = {advantage:+d}"] = {
            "rho A": points(ratios, [ratio * advantage for ratio in ratios]),
            "objective": points(ratios, [clipped(ratio, advantage)[0] for ratio in ratios]),
        }
    # From the reference through the far policy: log-probs in proportion, normalised.
    kls, moments = [], []
    for step in range(1, 61):
        s = 0.02 * step
        pairs = zip(REFERENCE, POLICIES["far"], strict=True)
        weights = [q ** (1 - s) * p**s for q, p in pairs]
        policy = [weight / sum(weights) for weight in weights]
        kls.append(full_kl(policy, REFERENCE))
        moments.append(kl_moments(policy))
    for i, kind in enumerate(("mean", "deviation")):
        curves[kind] = {}
        for name in ("k1", "k2", "k3"):
            curves[kind][name] = points(kls, [moment[name][i] for moment in moments])

    lowest_forward = min(PLACES, key=lambda centre: full_kl(bump(centre), TWO_MODES))
    lowest_reverse = min(PLACES, key=lambda centre: full_kl(TWO_MODES, bump(centre)))
    curves["directions"] = {
        "ref": points(PLACES, TWO_MODES),
        FORWARD: points(PLACES, bump(lowest_forward)),
        REVERSE: points(PLACES, bump(lowest_reverse)),
    }
    return curves


def points(xs: Sequence[float], ys: Sequence[float]) -> list[list[float]]:
    return [[round(x, 4), round(y, 4)] for x, y in zip(xs, ys, strict=True)]


def draw_clip(curves: dict[str, Any], cases: dict[str, dict]) -> None:
    from drawing import ALGORITHM_STYLES, GREY, GROUND, TEXT, panels, save

    colour = ALGORITHM_STYLES["PPO"].colour
    figure, axes = panels(2, height=3.2, sharex=True)
    held = {1: (1 + CLIP, 1.6), -1: (0.4, 1 - CLIP)}  # where the ratio gets no gradient
    for axis, (advantage, (held_from, held_to)) in zip(axes, held.items(), strict=True):
        lines = curves[f"clip, A = {advantage:+d}"]
        axis.axvspan(held_from, held_to, color=GREY, alpha=0.15, lw=0)
        axis.plot(*zip(*lines["objective"], strict=True), color=colour, lw=2, label="objective")
        axis.plot(*zip(*lines["rho A"], strict=True), color=TEXT, lw=1, ls=":", label="rho A")
        for ratio in (0.7, 1.3):
            objective = cases[f"{advantage:+d}, {ratio:g}"]["objective"]
            fill = GROUND if held_from < ratio < held_to else colour
            axis.plot([ratio], [objective], "o", color=colour, mfc=fill, ms=7)
        axis.axvline(1, color=GREY, lw=0.8)
        axis.set(title=f"advantage A = {advantage:+d}", xlabel="ratio rho = π / π_old")
        middle = (held_from + held_to) / 2
        axis.text(middle, axis.get_ylim()[0] + 0.1, "gradient 0", ha="center")
    axes[0].set(ylabel="objective")
    axes[0].legend(loc="upper left")
    description = (
        "Two panels over the ratio, from 0.4 to 1.6. For A = +1 the objective rises with the ratio "
        f"up to {1 + CLIP:g} and is flat above. For A = -1 it is flat below {1 - CLIP:g} and falls "
        "above. Where it is flat the gradient is 0. Dots mark the ratios 0.7 and 1.3, open ones "
        "those without a gradient."
    )
    save(figure, "clip.svg", "The clipped objective of a token against its ratio", description)


def draw_kl(curves: dict[str, Any]) -> None:
    from drawing import COLOURS, GREY, panels, save

    figure, (mean_axis, deviation_axis, direction_axis) = panels(3, height=3.2)
    styles = {
        "k1": dict(color="#97a0aa", ls="-", lw=4.0),
        "k2": dict(color=COLOURS[0], ls="-", lw=1.5),
        "k3": dict(color=COLOURS[1], ls="--", lw=1.5),
    }
    for axis, kind in ((mean_axis, "mean"), (deviation_axis, "deviation")):
        for name, style in styles.items():
            axis.plot(*zip(*curves[kind][name], strict=True), label=name, **style)
    xlabel = "full KL(π ‖ ref), nats"
    mean_axis.set(title="mean over the vocabulary", xlabel=xlabel, ylabel="nats")
    mean_axis.legend()

    # The axis ends below the highest k3.
    top = 4
    last_kl, last_deviation = curves["deviation"]["k3"][-1]
    cut_at = max(kl for kl, deviation in curves["deviation"]["k3"] if deviation < top)
    deviation_axis.set(title="standard deviation, one token", xlabel=xlabel, ylim=(0, top))
    deviation_axis.annotate(
        f"k3, cut here:\n{last_deviation:.1f} at {last_kl:.2f}",
        (cut_at, top),
        xytext=(0.05, 3.1),
        color=COLOURS[1],
        arrowprops=dict(arrowstyle="->", color=COLOURS[1]),
    )

    places, reference = zip(*curves["directions"]["ref"], strict=True)
    direction_axis.bar(places, reference, color=GREY, alpha=0.35, label="ref")
    for name, colour, marker, line in (
        (FORWARD, COLOURS[0], "o", "-"),
        (REVERSE, COLOURS[1], "s", "--"),
    ):
        xs, ys = zip(*curves["directions"][name], strict=True)
        label = f"lowest {name}"
        direction_axis.plot(xs, ys, color=colour, marker=marker, ls=line, ms=5, label=label)
    direction_axis.set(title="one mode against two", xlabel="place", ylabel="probability")
    direction_axis.set(ylim=(0, 1), xticks=places)
    direction_axis.legend(loc="upper right")
    ends = {}
    for kind in ("mean", "deviation"):
        ends[kind] = {name: curves[kind][name][-1][1] for name in styles}
    description = (
        f"Left: the means of k1, k2 and k3 over the full KL. At {last_kl:.2f} nats they are "
        f"{ends['mean']['k1']:.2f}, {ends['mean']['k2']:.2f} and {ends['mean']['k3']:.2f}; k1 and "
        "k3 are the KL itself. Middle: their standard deviations on one token, at the end "
        f"{ends['deviation']['k1']:.2f}, {ends['deviation']['k2']:.2f} and, beyond the axis, "
        f"{last_deviation:.1f}. Right: a reference with modes at places 1 and 5, and two policies "
        f"with one mode. That with the lowest {FORWARD} stands on place 1, that with the lowest "
        f"{REVERSE} in the middle."
    )
    save(figure, "kl.svg", "KL estimators, and the two directions of the KL", description)


def draw(results: dict[str, Any]) -> None:
    """docs/figures/clip.svg and kl.svg."""
    draw_clip(results["curves"], results["numbers"]["clip"])
    draw_kl(results["curves"])


def results() -> dict[str, Any]:
    """What docs/results/theory.json holds."""
    return compute() | {"curves": figure_curves()}
