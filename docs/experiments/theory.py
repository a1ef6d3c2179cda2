"""The numbers of docs/policy_gradient.md and docs/kl.md: small cases in which every outcome can be
enumerated, computed with the scripts' own functions, and the two figures.

    python docs/experiments/figures.py theory
"""

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


def draw_clip() -> None:
    from drawing import COLOURS, GREY, panels, save

    figure, axes = panels(2, sharex=True)
    ratios = [0.4 + 0.01 * i for i in range(121)]
    cases = (  # the advantage, where the ratio is held, and the height of the words
        (1, (1.2, 1.6), 0.55),
        (-1, (0.4, 0.8), -1.45),
    )
    for axis, (advantage, (held_from, held_to), height) in zip(axes, cases, strict=True):
        axis.axvspan(held_from, held_to, color=COLOURS[1], alpha=0.15, lw=0)
        unclipped = [ratio * advantage for ratio in ratios]
        axis.plot(ratios, unclipped, color=GREY, lw=1, ls=":", label="rho A")
        objectives = [clipped(ratio, advantage)[0] for ratio in ratios]
        axis.plot(ratios, objectives, color=COLOURS[0], label="objective of the token")
        for ratio in (0.7, 1.3):
            objective, _, _ = clipped(ratio, advantage)
            colour = COLOURS[1] if held_from < ratio < held_to else COLOURS[0]
            axis.plot([ratio], [objective], "o", color=colour, ms=5)
        axis.axvline(1, color=GREY, lw=0.8)
        axis.set(title=f"advantage A = {advantage:+d}", xlabel="ratio rho = π / π_old")
        middle = (held_from + held_to) / 2
        axis.text(middle, height, "gradient 0", color=COLOURS[1], ha="center")
    axes[0].set(ylabel="objective")
    axes[0].legend(loc="upper left")
    save(figure, "clip.svg")


def draw_kl() -> None:
    from drawing import COLOURS, GREY, panels, save

    figure, (mean_axis, deviation_axis, direction_axis) = panels(3, width=9)
    # From the reference through the far policy: log-probs in proportion, normalised.
    kls, moments = [], []
    for step in range(1, 61):
        s = 0.02 * step
        pairs = zip(REFERENCE, POLICIES["far"], strict=True)
        weights = [q ** (1 - s) * p**s for q, p in pairs]
        policy = [weight / sum(weights) for weight in weights]
        kls.append(full_kl(policy, REFERENCE))
        moments.append(kl_moments(policy))
    styles = {
        "k1": dict(color=COLOURS[0], ls="-", lw=3.0),
        "k2": dict(color=COLOURS[1], ls="-", lw=1.5),
        "k3": dict(color=COLOURS[2], ls="--", lw=1.5),
    }
    for name, style in styles.items():
        means = [moment[name][0] for moment in moments]
        deviations = [moment[name][1] for moment in moments]
        mean_axis.plot(kls, means, label=name, **style)
        deviation_axis.plot(kls, deviations, label=name, **style)
    xlabel = "full KL(π ‖ ref), nats"
    mean_axis.set(title="mean over the vocabulary", xlabel=xlabel, ylabel="nats")
    mean_axis.legend()
    deviation_axis.set(title="standard deviation of one token", xlabel=xlabel, ylim=(0, 4))

    direction_axis.bar(PLACES, TWO_MODES, color=GREY, alpha=0.4, label="ref")
    lowest_forward = min(PLACES, key=lambda centre: full_kl(bump(centre), TWO_MODES))
    lowest_reverse = min(PLACES, key=lambda centre: full_kl(TWO_MODES, bump(centre)))
    for centre, colour, kl_name in (
        (lowest_forward, COLOURS[0], FORWARD),
        (lowest_reverse, COLOURS[1], REVERSE),
    ):
        label = f"lowest {kl_name}"
        direction_axis.plot(PLACES, bump(centre), "o-", color=colour, ms=3, label=label)
    direction_axis.set(title="one mode against two", xlabel="place", ylabel="probability")
    direction_axis.set(ylim=(0, 1))
    direction_axis.legend(loc="upper right")
    save(figure, "kl.svg")


def results() -> dict[str, Any]:
    """What docs/results/theory.json holds; draws docs/figures/clip.svg and kl.svg."""
    draw_clip()
    draw_kl()
    return compute()
