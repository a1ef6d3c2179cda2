"""docs/policy_gradient.md: small cases in which every outcome can be enumerated, computed with the
scripts' own functions.
"""

import torch

from docs.experiments.lib.drawing import RED, TEXT, WIDE, panel
from docs.experiments.lib.enumeration import (
    gradients,
    mean_and_deviation,
    mean_and_variance,
    softmax_policy,
    tensor,
)
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.tables import fixed
from grpo import grpo_loss
from ppo_rlhf import gae

# One prompt, three completions.
PROBABILITIES, REWARDS = (0.5, 0.3, 0.2), (1.0, 0.0, 2.0)
# Two tokens: the probability of a first token, and after it that of a correct second one,
# whose reward is 1.
TREE = {"a": (0.6, 0.5), "b": (0.4, 0.25)}
START_VALUE = 0.4  # V(s_1) of the tree: the probability of a correct second token
CLIP = 0.2  # epsilon
WRONG_VALUE = 0.5  # a critic's V after either first token
LAMBDAS = (0.0, 0.5, 0.95, 1.0)  # of GAE


def baselines_table() -> dict:
    """Mean and variance of the estimate (r - b) grad log pi, for several b."""
    logits, logprobs = softmax_policy(PROBABILITIES)
    p, rewards = tensor(PROBABILITIES), tensor(REWARDS)
    scores = gradients(logprobs, logits)
    squared_scores = scores.square().sum(dim=1)
    best = ((p * rewards * squared_scores).sum() / (p * squared_scores).sum()).item()
    mean_reward = (p * rewards).sum().item()
    cases = {
        "-1": -1.0,
        "0": 0.0,
        f"{fixed(mean_reward, 1)}, the mean reward": mean_reward,
        f"{fixed(best)}, the best": best,
    }
    rows = []
    for name, baseline in cases.items():
        mean, variance = mean_and_variance(p, (rewards - baseline)[:, None] * scores)
        rows.append([name, ", ".join(fixed(x, 2) for x in mean), fixed(variance)])
    return {"columns": ["$b$", "mean of the estimate", "variance"], "rows": rows}


def views_table() -> dict:
    """The advantage of a completion, and those of its two tokens, of a critic without error."""
    rows = []
    for first, (probability, correct) in TREE.items():
        for second, second_probability, reward in (
            ("correct", correct, 1.0),
            ("wrong", 1 - correct, 0.0),
        ):
            token_rewards, values = tensor([[0.0, reward]]), tensor([[START_VALUE, correct]])
            token_advantages, _ = gae(token_rewards, values, gamma=1.0, lam=0.0)
            advantages = [reward - START_VALUE, *token_advantages[0].tolist()]
            row = [f"{first}, {second}", fixed(probability * second_probability, 2)]
            row += [fixed(reward, 0), *(fixed(advantage, 2) for advantage in advantages)]
            rows.append(row)
    columns = ["completion", "probability", "reward", "$r - V(s_1)$", "$A_t$ of token 1"]
    return {"columns": [*columns, "of token 2"], "rows": rows}


def lambdas_table() -> dict:
    """Bias and deviation of the advantage of token b, with a wrong critic."""
    correct = TREE["b"][1]
    token_rewards = tensor([[0.0, 1.0], [0.0, 0.0]])  # the second token is correct, or wrong
    values = tensor([[START_VALUE, WRONG_VALUE]]).expand(2, 2)
    rows = []
    for lam in LAMBDAS:
        advantages, _ = gae(token_rewards, values, gamma=1.0, lam=lam)
        mean, deviation = mean_and_deviation(tensor([correct, 1 - correct]), advantages[:, 0])
        bias = mean - (correct - START_VALUE)
        rows.append([f"{lam:g}", *map(fixed, (mean, bias, deviation))])
    return {"columns": ["$\\lambda$", "mean", "bias", "standard deviation"], "rows": rows}


def clipped(ratio: float, advantage: float) -> tuple[float, float]:
    """A token's objective, and its derivative by the token's log-prob."""
    logprobs = tensor([[ratio]]).log().requires_grad_()
    loss, _ = grpo_loss(
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
    return -loss.item(), derivative.item()


def clip_table() -> dict:
    """The four cases of advantage and ratio."""
    effects = {
        (1, 0.7): "has fallen, and should rise: raised",
        (1, 1.3): "**held**, in `policy/clip_fraction_high`",
        (-1, 0.7): "**held**, in `policy/clip_fraction_low`",
        (-1, 1.3): "has risen, and should fall: lowered",
    }
    rows = []
    for (advantage, ratio), effect in effects.items():
        objective, derivative = clipped(ratio, advantage)
        clipped_ratio = min(max(ratio, 1 - CLIP), 1 + CLIP)
        terms = (ratio * advantage, clipped_ratio * advantage, objective, derivative)
        rows.append([f"{advantage:+d}", f"{ratio:g}", *(fixed(term, 1) for term in terms), effect])
    columns = ["$A$", "$\\rho$", "$\\rho A$", "$\\text{clip}(\\rho) A$", "minimum", "gradient"]
    return {"columns": [*columns, "log-prob"], "rows": rows}


def tables(_: dict) -> dict:
    return {
        "policy_gradient baselines": baselines_table(),
        "policy_gradient views": views_table(),
        "policy_gradient lambdas": lambdas_table(),
        "policy_gradient clip": clip_table(),
    }


def draw(_: dict) -> dict:
    """The clipped objective."""
    title = f"No gradient above {1 + CLIP:g} for A = +1,\nbelow {1 - CLIP:g} for A = -1"
    axis = panel(title, "ratio rho = π / π_old", "objective", WIDE)
    ratios = [0.4 + 0.01 * i for i in range(121)]
    for advantage, line, colour in ((1, "-", TEXT), (-1, "--", RED)):
        objectives = [clipped(ratio, advantage)[0] for ratio in ratios]
        axis.plot(ratios, objectives, line, color=colour, label=f"A = {advantage:+d}")
    axis.legend()
    return {"policy_gradient": axis}


EXPERIMENTS = (Experiment("policy_gradient", more_tables=tables, draw=draw),)
