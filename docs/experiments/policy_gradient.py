"""docs/policy_gradient.md: small cases in which every outcome can be enumerated, computed with the
scripts' own functions.
"""

from statistics import mean

import torch

from docs.experiments.lib.drawing import ALGORITHM_STYLES, GREY, GROUND, TEXT, panel
from docs.experiments.lib.enumeration import (
    gradients,
    mean_and_variance,
    softmax_policy,
    tensor,
)
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.tables import fixed
from grpo import grpo_loss
from ppo_rlhf import gae
from reinforce import policy_gradient_loss

# One prompt, three completions.
PROBABILITIES, REWARDS = (0.5, 0.3, 0.2), (1.0, 0.0, 2.0)
# Two tokens: the probability of a first token, and after it that of a correct second one,
# whose reward is 1.
TREE = {"a": (0.6, 0.5), "b": (0.4, 0.25)}
START_VALUE = 0.4  # V(s_1) of the tree: the probability of a correct second token
CLIP = 0.2  # eps of PPO
# The rewards and values of the worked example in docs/ppo_rlhf.md.
TOKEN_REWARDS, VALUES = (-0.02, 0.01, 1.0), (0.5, 0.6, 0.8)
LAMBDAS = (0.0, 0.5, 0.95, 1.0)  # of GAE


def baselines_table() -> dict:
    """Mean and variance of the estimate (r - b) grad log pi, for several b."""
    logits, logprobs = softmax_policy(PROBABILITIES)
    p, rewards = tensor(PROBABILITIES), tensor(REWARDS)
    squared_scores = gradients(logprobs, logits).square().sum(dim=1)
    best = ((p * rewards * squared_scores).sum() / (p * squared_scores).sum()).item()
    mean_reward = (p * rewards).sum().item()
    cases = {
        "-1": -1.0,
        "0": 0.0,
        f"{fixed(mean_reward, 1)}, the mean reward": mean_reward,
        f"{fixed(best)}, the best": best,
        "3": 3.0,
    }
    rows = []
    for name, baseline in cases.items():
        objectives = []
        for logprob, reward in zip(logprobs, rewards, strict=True):
            advantage = (reward - baseline).view(1)
            objectives.append(-policy_gradient_loss(logprob.view(1, 1), advantage, 1))
        mean, variance = mean_and_variance(p, gradients(objectives, logits))
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
    """The advantages of three tokens, from lambda = 0 to 1."""
    rows = []
    for lam in LAMBDAS:
        advantages, _ = gae(tensor([TOKEN_REWARDS]), tensor([VALUES]), gamma=1.0, lam=lam)
        rows.append([f"{lam:g}", *map(fixed, advantages[0].tolist())])
    return {"columns": ["$\\lambda$", "token 1", "token 2", "token 3"], "rows": rows}


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
    colour = ALGORITHM_STYLES["PPO"].colour
    rising = panel(f"A = +1: no gradient above {1 + CLIP:g}", "ratio rho = π / π_old", "objective")
    falling = panel(f"A = -1: no gradient below {1 - CLIP:g}", "ratio rho = π / π_old", "objective")
    ratios = [round(0.4 + 0.01 * i, 4) for i in range(121)]
    for axis, advantage, held in ((rising, 1, (1 + CLIP, 1.6)), (falling, -1, (0.4, 1 - CLIP))):
        objectives = [round(clipped(ratio, advantage)[0], 4) for ratio in ratios]
        unclipped = [round(ratio * advantage, 4) for ratio in ratios]
        axis.axvspan(*held, color=GREY, alpha=0.15, lw=0)
        axis.plot(ratios, objectives, color=colour, lw=2, label="objective")
        axis.plot(ratios, unclipped, color=TEXT, lw=1, ls=":", label="rho A")
        for ratio in (0.7, 1.3):
            objective, _ = clipped(ratio, advantage)
            fill = GROUND if held[0] < ratio < held[1] else colour
            axis.plot([ratio], [objective], "o", color=colour, mfc=fill, ms=7)
        axis.axvline(1, color=GREY, lw=0.8)
        axis.text(mean(held), axis.get_ylim()[0] + 0.1, "gradient 0", ha="center")
    rising.legend(loc="upper left")
    return {"policy_gradient_rising": rising, "policy_gradient_falling": falling}


EXPERIMENTS = (Experiment("policy_gradient", tables, draw=draw),)
