"""The numbers of docs/policy_gradient.md and docs/kl.md: small cases in which every outcome can be
enumerated, computed with the scripts' own functions, and the two figures."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of the root
from grpo import grpo_loss
from ppo_rlhf import gae, k2_kl, k3_kl
from reinforce import policy_gradient_loss

DOCS = Path(__file__).resolve().parents[1]
# One prompt, three completions.
CHANCES, REWARDS = (0.5, 0.3, 0.2), (1.0, 0.0, 2.0)
# Two tokens: the chance of a first token, and after it that of a second which is right, reward 1.
TREE = {"a": (0.6, 0.5), "b": (0.4, 0.25)}
EPS = 0.2  # of the clip
# The rewards and values of the worked example in docs/ppo_rlhf.md.
TOKEN_REWARDS, VALUES, LAMBDAS = (-0.02, 0.01, 1.0), (0.5, 0.6, 0.8), (0.0, 0.5, 0.95, 1.0)
# A vocabulary of four, a policy near the reference and one far from it.
REFERENCE = (0.4, 0.3, 0.2, 0.1)
POLICIES = {"near": (0.3, 0.3, 0.25, 0.15), "far": (0.01, 0.09, 0.3, 0.6)}
STALE = ("k2", "rho k2", "rho k3")  # terms that are tried on tokens of an older policy
TWO_MODES = (0.46, 0.03, 0.02, 0.03, 0.46)


def tensor(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def show(number: float, digits: int = 3) -> str:
    text = f"{number:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def softmax_policy(chances: tuple) -> tuple[Tensor, Tensor]:
    """Logits and log-probs of a policy that has these probabilities."""
    logits = tensor(chances).log().requires_grad_()
    return logits, logits.log_softmax(dim=0)


def baselines() -> tuple[list, dict]:
    """Mean and variance of the estimate (r - b) grad log pi, for several b."""
    logits, logprobs = softmax_policy(CHANCES)
    p, r = tensor(CHANCES), tensor(REWARDS)
    scores = torch.stack([torch.autograd.grad(x, logits, retain_graph=True)[0] for x in logprobs])
    squares = scores.square().sum(dim=1)
    best = ((p * r * squares).sum() / (p * squares).sum()).item()
    mean_reward = (p * r).sum().item()
    rows, numbers = [], {}
    cases = {"-1": -1.0, "0": 0.0, f"{show(mean_reward, 1)}, the mean reward": mean_reward}
    cases |= {f"{show(best)}, the best": best, "3": 3.0}
    for name, b in cases.items():
        estimates = []
        for i in range(len(CHANCES)):
            loss = policy_gradient_loss(logprobs[i].view(1, 1), r[i : i + 1] - b, 1)
            estimates.append(-torch.autograd.grad(loss, logits, retain_graph=True)[0])
        estimates = torch.stack(estimates)
        mean = p @ estimates
        variance = (p @ (estimates - mean).square().sum(dim=1)).item()
        rows.append([name, ", ".join(show(x, 2) for x in mean.tolist()), show(variance)])
        numbers[name] = {"b": b, "mean": mean.tolist(), "variance": variance}
    return rows, numbers


def two_views() -> tuple[list, dict]:
    """The advantage of a completion, and those of its two tokens, of a critic without error."""
    start = sum(chance * right for chance, right in TREE.values())
    rows, numbers = [], {"start": start}
    for first, (chance, right) in TREE.items():
        for second, p, reward in (("right", right, 1.0), ("wrong", 1 - right, 0.0)):
            known = tensor([[[0.0, reward]], [[start, right]]])
            deltas, _ = gae(*known, 1.0, 0.0)
            numbers[f"{first}, {second}"] = found = [reward - start, *deltas[0].tolist()]
            cells = [f"{first}, {second}", show(chance * p, 2), show(reward, 0)]
            rows.append(cells + [show(x, 2) for x in found])
    return rows, numbers


def wrong_critic() -> tuple[list, dict]:
    """The advantage of token b, by a critic that expects a half after either first token."""
    start, right = two_views()[1]["start"], TREE["b"][1]
    true = right - start
    p = tensor([right, 1 - right])
    values = tensor([[start, 0.5]]).expand(2, 2)
    rewards = tensor([[0.0, 1.0], [0.0, 0.0]])
    rows, numbers = [], {"true": true}
    for lam in LAMBDAS:
        found = gae(rewards, values, 1.0, lam)[0][:, 0]
        mean = (p @ found).item()
        deviation = (p @ (found - mean).square()).sqrt().item()
        rows.append([f"{lam:g}", *(show(x, 3) for x in (mean, mean - true, deviation))])
        numbers[f"{lam:g}"] = {"mean": mean, "deviation": deviation}
    return rows, numbers


def lambdas() -> tuple[list, dict]:
    """The advantages of three tokens, from lambda = 0 to 1."""
    known = [tensor([x]) for x in (TOKEN_REWARDS, VALUES)]
    numbers = {f"{lam:g}": gae(*known, 1.0, lam)[0][0].tolist() for lam in LAMBDAS}
    return [[lam, *(show(x) for x in found)] for lam, found in numbers.items()], numbers


def clipped(ratio: float, advantage: float) -> tuple[float, float, dict]:
    """A token's objective, its derivative by the token's log-prob, and the sums for the metrics."""
    logprobs = tensor([[ratio]]).log().requires_grad_()
    a, one = tensor([advantage]), torch.ones(1, 1).double()
    loss, sums = grpo_loss(logprobs, torch.zeros_like(one), None, a, one, EPS, EPS, 0.0)
    (grad,) = torch.autograd.grad(-loss, logprobs)
    return -loss.item(), grad.item(), {name: value.item() for name, value in sums.items()}


def clip_cases() -> tuple[list, dict]:
    told = {
        (1, 0.7): "has fallen, and should rise: raised",
        (1, 1.3): "**held**, in `policy/clip_fraction_high`",
        (-1, 0.7): "**held**, in `policy/clip_fraction_low`",
        (-1, 1.3): "has risen, and should fall: lowered",
    }
    rows, numbers = [], {}
    for (advantage, ratio), words in told.items():
        objective, grad, sums = clipped(ratio, advantage)
        inside = min(max(ratio, 1 - EPS), 1 + EPS)
        terms = (ratio * advantage, inside * advantage, objective, grad)
        rows.append([f"{advantage:+d}", f"{ratio:g}", *(show(x, 1) for x in terms), words])
        numbers[f"{advantage:+d}, {ratio:g}"] = {"objective": objective, "gradient": grad, **sums}
    return rows, numbers


def estimators(chances: tuple, old: tuple | None = None) -> tuple[Tensor, Tensor, dict]:
    """Logits, log-probs and, by name, what each estimator gives for each token of the vocabulary.

    Those with rho in front are weighted with pi / pi_old, rho k2 without its gradient.
    """
    logits, logprobs = softmax_policy(chances)
    ref = tensor(REFERENCE).log()
    k1, k3 = logprobs - ref, k3_kl(logprobs, ref)
    old_logprobs = logprobs.detach() if old is None else tensor(old).log()
    rho = (logprobs - old_logprobs).exp()
    terms = {"k1": k1, "k2": k2_kl(logprobs, logprobs, ref), "k3": k3}
    terms |= {"rho k1": rho * k1, "rho k2": k2_kl(logprobs, old_logprobs, ref), "rho k3": rho * k3}
    return logits, logprobs, terms


def full_kl(p: tuple, q: tuple) -> float:
    p, q = tensor(p), tensor(q)
    return (p * (p / q).log()).sum().item()


def kl_moments(chances: tuple) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of one token's k1, k2 and k3."""
    _, logprobs, terms = estimators(chances)
    p, found = logprobs.detach().exp(), {}
    for name in ("k1", "k2", "k3"):
        mean = p @ terms[name].detach()
        found[name] = (mean.item(), (p @ (terms[name].detach() - mean).square()).sqrt().item())
    return found


def kl_values() -> tuple[list, dict]:
    rows, numbers = [], {}
    for policy, chances in POLICIES.items():
        exact = full_kl(chances, REFERENCE)
        old = tensor(REFERENCE if policy == "near" else POLICIES["near"])
        numbers[policy] = {"exact": exact, "reversed": full_kl(REFERENCE, chances)}
        for name, (mean, deviation) in kl_moments(chances).items():
            stale = (old @ estimators(chances)[2][name].detach()).item()
            cells = (exact, mean, mean - exact, deviation, stale)
            rows.append([policy, name, *(show(x) for x in cells)])
            numbers[policy][name] = {"mean": mean, "deviation": deviation, "stale": stale}
    return rows, numbers


def kl_tokens() -> list:
    terms = estimators(POLICIES["far"])[2]
    named = [terms[name].tolist() for name in ("k1", "k2", "k3")]
    columns = zip("abcd", REFERENCE, POLICIES["far"], *named, strict=True)
    return [[token, f"{q:g}", f"{p:g}", *map(show, ks)] for token, q, p, *ks in columns]


def kl_gradients() -> tuple[list, dict]:
    """Expected gradients by the four logits, and the variance of one token's, summed over them."""
    chances, old = POLICIES["far"], POLICIES["near"]
    p, drawn, ref = (tensor(some) for some in (chances, old, REFERENCE))
    fresh, stale = estimators(chances), estimators(chances, old)
    wanted, reverse = "KL(π ‖ ref)", "KL(ref ‖ π)"
    # Whose tokens, logits and log-probs, each token's term, and the KL that has this gradient.
    cases = {name: (p, fresh, fresh[2][name]) for name in ("k1", "k2", "k3", "rho k1", "rho k3")}
    cases |= {f"{name}, tokens of π_old": (drawn, stale, stale[2][name]) for name in STALE}
    for name in ("k1", "k2", "k3"):
        cases[f"{name} in the reward"] = (p, fresh, fresh[2][name].detach() * fresh[1])
    told = {"k1": "nothing", "k3": reverse, "k2, tokens of π_old": "neither"}
    told |= {"k2 in the reward": "neither", "k3 in the reward": "neither"}
    numbers, (logits, logprobs, _) = {}, fresh
    full = {wanted: (logprobs.exp() * (logprobs - ref.log())).sum(), reverse: -(ref @ logprobs)}
    for name, total in full.items():
        (mean,) = torch.autograd.grad(total, logits, retain_graph=True)
        numbers[f"full {name}"] = {"mean": mean.tolist(), "variance": 0.0}
        told[f"full {name}"] = name
    for name, (weights, (by, _, _), terms) in cases.items():
        grads = torch.stack([torch.autograd.grad(x, by, retain_graph=True)[0] for x in terms])
        mean = weights @ grads
        variance = (weights @ (grads - mean).square().sum(dim=1)).item()
        numbers[name] = {"mean": mean.tolist(), "variance": variance}
    rows = []
    for name, found in numbers.items():
        cells = [*map(show, found["mean"]), show(found["variance"], 2)]
        rows.append([name, *cells, told.get(name, wanted)])
    return rows, numbers


def bump(centre: int) -> tuple:
    """One mode: probabilities in proportion to 2^-(distance squared) over five places."""
    weights = [2.0 ** -((place - centre) ** 2) for place in range(1, 6)]
    return tuple(weight / sum(weights) for weight in weights)


def directions() -> tuple[list, dict]:
    rows, numbers = [], {}
    for centre in range(1, 6):
        p = bump(centre)
        both = [full_kl(p, TWO_MODES), full_kl(TWO_MODES, p)]
        rows.append([str(centre), ", ".join(show(x, 2) for x in p), *(show(x, 2) for x in both)])
        numbers[str(centre)] = both
    return rows, numbers


def compute() -> dict[str, Any]:
    """All tables and the numbers behind them."""
    tokens = ["token 1", "token 2", "token 3"]
    estimator = ["policy", "estimator", "full KL", "mean", "bias", "standard deviation"]
    advantages = ["$A_t$ of token 1", "of token 2"]
    parts = {
        "baselines": (["$b$", "mean of the estimate", "variance"], baselines()),
        "views": (
            ["completion", "probability", "reward", "$r - V(s_1)$", *advantages],
            two_views(),
        ),
        "critic": (["$\\lambda$", "mean", "bias", "standard deviation"], wrong_critic()),
        "lambdas": (["$\\lambda$", *tokens], lambdas()),
        "clip": (
            [
                "$A$",
                "$\\rho$",
                "$\\rho A$",
                "$\\text{clip}(\\rho) A$",
                "minimum",
                "gradient",
                "log-prob",
            ],
            clip_cases(),
        ),
        "kl_tokens": (["token", "ref", "π", "k1", "k2", "k3"], (kl_tokens(), None)),
        "kl_values": ([*estimator, "mean over tokens of π_old"], kl_values()),
        "kl_gradients": (["term", *"abcd", "variance", "is the gradient of"], kl_gradients()),
        "directions": (["centre", "π", "KL(π ‖ ref)", "KL(ref ‖ π)"], directions()),
    }
    tables = {
        f"theory_{name}": {"columns": columns, "rows": rows}
        for name, (columns, (rows, _)) in parts.items()
    }
    return {"tables": tables, "numbers": {k: found for k, (_, (_, found)) in parts.items()}}


def draw_clip(out: Path) -> None:
    from drawing import COLOURS, GREY, panels, save

    figure, axes = panels(2, sharex=True)
    ratios = [0.4 + 0.01 * i for i in range(121)]
    for axis, advantage, held in ((axes[0], 1, (1.2, 1.6)), (axes[1], -1, (0.4, 0.8))):
        axis.axvspan(*held, color=COLOURS[1], alpha=0.15, lw=0)
        axis.plot(ratios, [x * advantage for x in ratios], color=GREY, lw=1, ls=":", label="rho A")
        values = [clipped(x, advantage)[0] for x in ratios]
        axis.plot(ratios, values, color=COLOURS[0], label="objective of the token")
        for x in (0.7, 1.3):
            colour = COLOURS[1] if held[0] < x < held[1] else COLOURS[0]
            axis.plot([x], [clipped(x, advantage)[0]], "o", color=colour, ms=5)
        axis.axvline(1, color=GREY, lw=0.8)
        axis.set(title=f"advantage A = {advantage:+d}", xlabel="ratio rho = π / π_old")
        middle, height = sum(held) / 2, 0.55 if advantage > 0 else -1.45
        axis.text(middle, height, "gradient 0", color=COLOURS[1], ha="center")
    axes[0].set(ylabel="objective")
    axes[0].legend(fontsize=8, framealpha=0, loc="upper left")
    save(figure, out)


def draw_kl(out: Path) -> None:
    from drawing import COLOURS, GREY, panels, save

    figure, (left, middle, right) = panels(3, width=9)
    # From the reference through the far policy: log-probs in proportion, normalised.
    steps = [0.02 * i for i in range(1, 61)]
    weights = [
        [q ** (1 - s) * p**s for q, p in zip(REFERENCE, POLICIES["far"], strict=True)]
        for s in steps
    ]
    path = [tuple(w / sum(some) for w in some) for some in weights]
    exact, moments = [full_kl(p, REFERENCE) for p in path], [kl_moments(p) for p in path]
    styles = {
        "k1": (COLOURS[0], "-", 3.0),
        "k2": (COLOURS[1], "-", 1.5),
        "k3": ("#3fa66b", "--", 1.5),
    }
    for name, (colour, line, width) in styles.items():
        for axis, part in ((left, 0), (middle, 1)):
            values = [moment[name][part] for moment in moments]
            axis.plot(exact, values, color=colour, ls=line, lw=width, label=name)
    left.set(title="mean over the vocabulary", xlabel="full KL(π ‖ ref), nats", ylabel="nats")
    middle.set(
        title="standard deviation of one token", xlabel="full KL(π ‖ ref), nats", ylim=(0, 4)
    )
    left.legend(fontsize=8, framealpha=0)
    places = range(1, 6)
    right.bar(places, TWO_MODES, color=GREY, alpha=0.4, label="ref")
    found = directions()[1]
    for part, colour, name in ((0, COLOURS[0], "KL(π ‖ ref)"), (1, COLOURS[1], "KL(ref ‖ π)")):
        best = min(places, key=lambda centre: found[str(centre)][part])
        right.plot(places, bump(best), "o-", color=colour, ms=3, label=f"lowest {name}")
    right.set(title="one mode against two", xlabel="place", ylabel="probability", ylim=(0, 1))
    right.legend(fontsize=8, framealpha=0, loc="upper right")
    save(figure, out)


def results() -> dict[str, Any]:
    """What docs/results/theory.json holds; draws docs/clip.svg and docs/kl.svg."""
    draw_clip(DOCS / "clip.svg")
    draw_kl(DOCS / "kl.svg")
    return compute()
