"""docs/kl.md: the two directions of the KL, where the reference has two modes."""

from collections.abc import Sequence

import torch

from docs.experiments.lib.drawing import GREY, RED, TEXT, panel
from docs.experiments.lib.experiment import Experiment

PLACES = range(1, 6)
TWO_MODES = (0.46, 0.03, 0.02, 0.03, 0.46)  # the reference


def full_kl(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q), summed over the places."""
    p, q = torch.tensor(p), torch.tensor(q)
    return (p * (p / q).log()).sum().item()


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
    axis.plot(PLACES, seeking, "o-", color=TEXT, label="lowest KL(π ‖ ref)")
    axis.plot(PLACES, covering, "s--", color=RED, label="lowest KL(ref ‖ π)")
    axis.set(ylim=(0, 1), xticks=PLACES)
    axis.legend(loc="upper right")
    return {"kl": axis}


EXPERIMENTS = (Experiment("kl", draw=draw),)
