"""README.md: the accuracy of `python grpo.py`, and how one prompt is completed along the way."""

from typing import Any

from docs.experiments.declared import GRPO
from docs.experiments.lib.drawing import (
    ALGORITHM_STYLES,
    GREEN,
    GREY,
    RED,
    WIDE,
    draw_curves,
    panel,
)
from docs.experiments.lib.experiment import Experiment, saved_results
from docs.experiments.lib.metrics import Metric
from docs.experiments.lib.runs import Run

PROMPT = "3+7+1+2+7="
ROLLOUTS = (0, 5, 20, 60)  # whose completions are shown


def completions(run: Run) -> list[dict[str, Any]]:
    """Of the prompt, at each of ROLLOUTS, sampled in the evaluation there."""
    found = []
    for step in ROLLOUTS:
        (sample,) = [sample for sample in run.samples(step) if sample["prompt"] == PROMPT]
        found.append({name: sample[name] for name in ("step", "completion", "reward")})
    return found


def draw(results: dict) -> dict:
    """The curve over all seeds, and below it the completions of the first."""
    title = "python grpo.py: accuracy on held-out prompts"
    axis = panel(title, "rollout", width=WIDE, height=5, ylim=(0, 1.04), xlim=(-2, 62))
    axis.figure.set_layout_engine("none")
    axis.set_position((0.08, 0.5, 0.89, 0.42))
    style = ALGORITHM_STYLES["GRPO"]._replace(marker="")  # a single curve
    curves = saved_results("grpo")["curves"]["(default)"]["eval/accuracy"]
    draw_curves(axis, curves, "accuracy", style)
    axis.set_xticks(range(0, 61, 10))

    def write(x: float, y: float, text: str, **look: Any) -> None:
        axis.figure.text(x, y, text, fontsize=11, **look)

    write(0.02, 0.31, f"the last digit of {PROMPT[:-1]} ?", weight="bold")
    shown = results["numbers"]["GRPO"]["completions"][0]
    for row, sample in enumerate(shown):
        y = 0.235 - 0.07 * row
        is_right = sample["reward"] == 1
        write(0.02, y, f"rollout {sample['step']}", color=GREY)
        write(0.24, y, PROMPT, family="monospace", color=GREY)
        write(0.48, y, sample["completion"], family="monospace")
        look = dict(color=GREEN if is_right else RED, weight="bold", ha="right")
        write(0.98, y, "✓ right" if is_right else "✗ wrong", **look)
        axis.axvline(sample["step"], color=GREY, ls=":", lw=1)
    return {"readme": axis}


EXPERIMENTS = (
    Experiment(
        "readme",
        {"GRPO": GRPO},
        metrics={"GRPO": [Metric("completions", completions)]},
        draw=draw,
    ),
)
