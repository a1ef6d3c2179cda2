"""Runs for tests/algorithms: a script on a few rows of its own data, in a second or two."""

from pathlib import Path
from typing import Any

import torch
from scripts import SPECS, short_flags

# Eight rows, or four prompts, and one optimiser step on them at the full rate.
ONE_STEP = dict(train_split="train[:32]", eval_split="test[:4]", eval_every=99, warmup_ratio=0.0)
ONE_STEP |= dict(epochs=0.25, batch_size=8, micro_batch_size=8, total_rollouts=1)
ONE_STEP |= dict(prompts_per_rollout=4, group_size=4, num_minibatches=1, update_epochs=1)


def run(name: str, folder: Path, **flags: Any) -> Path:
    """A run of one optimiser step, unless flags say more; returns its folder."""
    script = SPECS[name].module
    flags = short_flags(name, **ONE_STEP) | flags
    return script.main(script.Args(output_dir=str(folder), **flags))


def assert_same_gradient(gradient: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    """To rounding, and not 0."""
    assert max(g.abs().max() for g in gradient) > 1e-3
    for a, b in zip(gradient, other, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-3)


def set_weights(model: torch.nn.Module, weights: list[torch.Tensor]) -> None:
    """Those of what is trained at an earlier moment, without a gradient."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    for parameter, weight in zip(trained, weights, strict=True):
        parameter.data.copy_(weight)
    model.zero_grad()
