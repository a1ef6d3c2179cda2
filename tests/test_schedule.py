"""The learning rate: it rises from the first step on, is whole after the warm-up, and decays."""

import pytest
import torch
from reviews import metrics_of, plain_model, watch_steps
from torch.optim import SGD
from transformers import get_scheduler

import dpo
from dpo import Args, lr_factor

SCHEDULES = pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup"])
RATIOS = pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5])


@SCHEDULES
@RATIOS
@pytest.mark.parametrize("total_steps", [1, 2, 7, 20, 300])
def test_factors_are_those_of_transformers_without_the_step_of_rate_0(name, ratio, total_steps):
    """One step later in a schedule that is one step longer."""
    args = Args(lr_schedule=name, warmup_ratio=ratio)
    warmup_steps = int(ratio * total_steps)
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(name, optimizer, warmup_steps + 1, total_steps + 1).lr_lambdas[0]
    factors = [lr_factor(args, step, total_steps) for step in range(total_steps)]
    assert factors == pytest.approx([theirs(step + 1) for step in range(total_steps)])
    assert factors[0] > 0
    assert factors[warmup_steps] == 1
    assert all(0 < factor < 1 for factor in factors[:warmup_steps])


def test_the_first_step_moves_the_weights(tmp_path, monkeypatch):
    """Also where half of the steps are warm-up: rates 1/3 and 2/3, then 1 and 1/2."""
    steps = watch_steps(monkeypatch)
    flags = dict(train_split="train[:16]", eval_split="test[:2]", epochs=1, batch_size=4)
    flags |= dict(warmup_ratio=0.5, learning_rate=1e-3, max_new_tokens=2)
    run_dir = dpo.main(Args(output_dir=str(tmp_path), **flags))
    (first, *_), (second, *_), *_ = steps
    moved = [(a - b).abs().max().item() for a, b in zip(first, second, strict=True)]
    # Adam's first step moves a weight by the learning rate, whatever its gradient.
    assert max(moved) == pytest.approx(1e-3 / 3, rel=0.01)
    start = plain_model().parameters()
    assert all(map(torch.equal, first, start)), "and it starts from --model"
    rates = [row["policy/learning_rate"] for row in metrics_of(run_dir)[1:]]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 5e-4])
