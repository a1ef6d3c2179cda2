"""Several processes train what one does, and end together.

The numbers agree to float32 rounding: the processes add up in another order. Metrics are compared
to a relative 1e-4, or an absolute 1e-5 where they are sums that nearly cancel (a loss of the order
1e-3). Weights are compared to 1e-6 in the quadratic mean, and to 2e-4 each: Adam's step is the
learning rate (1e-3 at most) by m / sqrt(v), and where a gradient is nearly 0, its rounding error is
a part of that ratio. Sampled text is the same, unless a random number lies within rounding of a
token's limit; here none does.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import contents, torchrun, words
from safetensors.torch import load
from scripts import SPECS


ROOT = Path(__file__).parents[2]
REVIEWS = dict(
    model="tiny/reviews/policy",
    dataset="tiny/reviews/prompts",
    reward_model="tiny/reviews/reward_model",
    reward_fn=["tiny/reviews/gold.py:sentiment"],
)
# What stands behind a hyphen is another run of a script.
MORE = {
    "grpo": dict(REVIEWS, kl_placement="reward", missing_eos_penalty=0.5),
    "grpo-dynamic": dict(max_sampling_rounds=4, loss="cispo", kl_placement="unbiased"),
    "grpo-gdpo": dict(
        REVIEWS,
        multi_objective_aggregation="normalize_then_sum",
        importance_sampling_level="sequence",
    ),
    "ppo_rlhf-shared": dict(critic_init="policy", activation_checkpointing=True),
    "rm_bradley_terry-layers": dict(train_layers=1, activation_checkpointing=True),
    "dpo-orpo": dict(loss="orpo"),  # without a reference
    "dpo-lora": dict(lora_rank=4, activation_checkpointing=True),
    "ppo_rlhf-lora": dict(lora_rank=4),  # critic and reward model are one
    "rm_bradley_terry-lora": dict(lora_rank=4),
}
RUNS = {}
for run in [*SPECS, *(run for run in MORE if run not in SPECS)]:
    spec = SPECS[run.split("-")[0]]
    four_steps = {"total_rollouts": 4} if spec.kind == "rollouts" else {"epochs": 0.9}
    RUNS[run] = spec.short_flags | four_steps | MORE.get(run, {})
CASES = [(run, "2") for run in RUNS]
# Of a script with rollouts and two models, and of one that reads rows.
CASES += [("ppo_rlhf", "4"), ("ppo_rlhf", "1 to 2"), ("dpo", "2 to 1")]


def run_on(ranks, run, folder, **flags):
    """A run on so many processes, of which rank 0 alone prints."""
    command = [f"{run.split('-')[0]}.py", *words(flags)]
    assert torchrun(ranks, command, folder / "output", "shards:watch") == [0] * ranks, [
        (folder / f"output.{rank}").read_text()[-5000:] for rank in range(ranks)
    ]
    others = [(folder / f"output.{rank}").read_text() for rank in range(1, ranks)]
    assert not any("model: " in printed for printed in others), "rank 0 alone prints"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Makes a run in this process, or copies it if it was made before."""
    made = {}

    def make(run):
        if run not in made:
            script = SPECS[run.split("-")[0]].module
            folder = tmp_path_factory.mktemp("one")
            made[run] = script.main(script.Args(**RUNS[run] | {"output_dir": str(folder)}))
        return made[run]

    return make


def without_last_checkpoint(run_dir, copy):
    shutil.copytree(run_dir, copy)
    max(copy.glob("checkpoint_*.pt")).unlink()
    return copy


def compare(found, expected, where):
    """The same to rounding: numbers, weights, and what holds them."""
    if isinstance(found, tuple | list):  # Adam's betas come back as a list
        found, expected = [*found], [*expected]
    assert type(found) is type(expected), where
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for key in found:
            compare(found[key], expected[key], f"{where} {key}")
    elif isinstance(found, list):
        assert len(found) == len(expected), where
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            compare(a, b, f"{where} {index}")
    elif torch.is_tensor(found):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4, msg=lambda m: where + m)
        assert (found - expected).double().square().mean().sqrt() < 1e-6, where
    elif isinstance(found, float):  # those of rollouts.jsonl have three digits
        absolute = 1.1e-3 if "rollouts.jsonl" in where else 1e-5
        assert found == pytest.approx(expected, rel=1e-4, abs=absolute), where
    else:
        assert found == expected, where


def compare_runs(run_dir, other_dir):
    """All that two runs leave: logs, checkpoints, the model."""
    files, others = contents(run_dir), contents(other_dir)
    for run_files in (files, others):
        for name in run_files:
            if name.endswith(".safetensors"):
                run_files[name] = load(run_files[name])
            elif name.endswith(".json"):
                run_files[name] = json.loads(run_files[name])
    compare(files, others, "")


@pytest.mark.parametrize(("run", "kind"), CASES)
def test_the_number_of_processes_does_not_change_the_training(run, kind, one_process, tmp_path):
    """Nor what a checkpoint holds. On several, few completions are sampled at a time."""
    first, _, last = kind.partition(" to ")
    flags = RUNS[run] | {"output_dir": tmp_path / "runs"}
    if "generation_batch_size" in SPECS[run.split("-")[0]].module.Args.__dataclass_fields__:
        flags["generation_batch_size"] = 2
    if first == "1":
        run_dir = one_process(run)
    else:
        run_on(int(first), run, tmp_path, **flags)
        (run_dir,) = (tmp_path / "runs").iterdir()
    if last:
        run_dir = without_last_checkpoint(run_dir, tmp_path / "copy")
    if last == "1":
        script = SPECS[run].module
        script.main(script.parse_args(["--resume", str(run_dir)]))
    elif last:
        run_on(int(last), run, tmp_path, resume=run_dir)
    compare_runs(run_dir, one_process(run))


@pytest.mark.slow
def test_a_script_under_torchrun_itself(one_process, tmp_path):
    """The processes meet, part, and leave one folder."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = RUNS["sft"] | {"output_dir": tmp_path / "runs"}
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, "sft.py", *words(flags)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nmodel: ") == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    compare_runs(run_dir, one_process("sft"))


def test_an_error_in_one_process_ends_all_and_is_shown_once(tmp_path):
    """A reward function is called by one process; the others wait for what it returns."""
    (tmp_path / "rule.py").write_text("def rule(prompts, completions, **columns): return [0.5]\n")
    flags = SPECS["grpo"].short_flags | {"output_dir": tmp_path / "runs"}
    flags["reward_fn"] = f"{tmp_path}/rule.py:rule"
    statuses = torchrun(2, ["grpo.py", *words(flags)], tmp_path / "output")
    assert all(statuses)
    printed = "".join((tmp_path / f"output.{rank}").read_text() for rank in range(2))
    assert printed.count("ValueError: reward rule of rule.py: 5 finite numbers expected") == 1
    assert [*(tmp_path / "runs").iterdir()] == []
