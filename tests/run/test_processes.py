"""Several processes train what one does, and end together.

The numbers agree to float32 rounding: the processes add up in another order. Metrics are compared
to a relative 1e-4, or an absolute 1e-5 where they are sums that nearly cancel (a loss of the order
1e-3). Weights are compared to 1e-6 in the quadratic mean, and to 2e-4 each: Adam's step is the
learning rate (1e-3 at most) by m / sqrt(v), and where a gradient is nearly 0, its rounding error is
a part of that ratio. Sampled text is the same, unless a random number lies within rounding of a
token's limit; here none does.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import family_model, save_model, some_wide
from runs import contents, keep_earlier_checkpoints, killed_earlier, leaves, torchrun, words
from runs import write_splits
from safetensors.torch import load
from scripts import REVIEWS, SPECS
from transformers import AutoTokenizer

TWO_REWARDS = REVIEWS | dict(reward_fn=["tiny/reviews/gold.py:sentiment"])
# What stands behind a hyphen is another run of a script.
MORE = {
    "grpo": TWO_REWARDS,
    "grpo_variants": dict(max_sampling_rounds=4, loss="cispo", kl_placement="unbiased"),
    "grpo_variants-reward": dict(TWO_REWARDS, kl_placement="reward", missing_eos_penalty=0.5),
    "grpo_variants-gdpo": dict(
        TWO_REWARDS,
        multi_objective_aggregation="normalize_then_sum",
        importance_sampling_level="sequence",
    ),
    "ppo_rlhf-shared": dict(critic_init="policy", activation_checkpointing=True),
    "sft-chats": {},  # and what `write_chats` returns
    "rm_bradley_terry-layers": dict(train_layers=1, activation_checkpointing=True),
    "dpo-orpo": dict(loss="orpo"),  # without a reference
    "dpo-lora": dict(lora_rank=4, activation_checkpointing=True),
    "ppo_rlhf-lora": dict(lora_rank=4),  # critic and reward model are one
    "rm_bradley_terry-lora": dict(lora_rank=4),
    # The teacher is the student without adapters; some rank has no row of an evaluation.
    "distill-lora": dict(lora_rank=4, eval_split="test[:1]"),
    "distill-jsd": dict(divergence="jsd", discount=0.0, teacher_prompt_column=None),
    "distill-forward": dict(
        divergence="forward", discount=0.0, lora_rank=4, activation_checkpointing=True
    ),
}
# With these `python -m pytest` compares; the others are wide.
ALWAYS = ["ppo_rlhf", "grpo", "dpo"]
RUNS = {}
for run in [*SPECS, *(run for run in MORE if run not in SPECS)]:
    spec = SPECS[run.split("-")[0]]
    two_steps = {"total_rollouts": 2} if spec.kind == "rollouts" else {"epochs": 0.4}
    RUNS[run] = spec.short_flags | two_steps | {"save_every": 1} | MORE.get(run, {})


def command_of(run, **flags):
    script = SPECS[run.split("-")[0]].module
    if "resume" not in flags and hasattr(script.Args, "generation_batch_size"):
        flags["generation_batch_size"] = 2  # few completions are sampled at a time
    return [f"{script.__name__}.py", *words(flags)]


def run_on(ranks, commands, output):
    """Commands one after the other on so many processes, of which rank 0 alone prints."""
    statuses = torchrun(ranks, ["tests/support/shards.py", *map(json.dumps, commands)], output)
    printed = [Path(f"{output}.{rank}").read_text() for rank in range(ranks)]
    assert statuses == [0] * ranks, "".join(text[-5000:] for text in printed)
    assert [text.count("\nmodel: ") for text in printed] == [len(commands)] + [0] * (ranks - 1)


def write_chats(folder):
    """Conversations of one to three turns, and a model with a chat template: their flags."""
    shutil.copytree("tiny/arithmetic/base", folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}#{% endfor %}"
    tokenizer.save_pretrained(folder)
    rows = []
    for i in range(13):
        texts = [f"{i}+{turn}=" if turn % 2 == 0 else str(i) for turn in range(2 + 2 * (i % 3))]
        roles = ("user", "assistant")
        turns = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts)]
        rows.append({"messages": turns})
    return {"model": str(folder), "dataset": write_splits(folder, rows)}


@pytest.fixture(scope="module")
def chosen(request):
    """The runs that are compared: with `-m wide` the others too."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    params = {item.callspec.params.get("run") for item in items}
    return [run for run in RUNS if run in ALWAYS or run in params]


@pytest.fixture(scope="module")
def one_process(chosen, tmp_path_factory):
    """The folder of each run in this process."""
    folder = tmp_path_factory.mktemp("one")
    RUNS["sft-chats"] |= write_chats(tmp_path_factory.mktemp("chats"))
    scripts = {run: SPECS[run.split("-")[0]].module for run in chosen}
    with keep_earlier_checkpoints():
        return {
            run: script.main(script.Args(**RUNS[run] | {"output_dir": str(folder)}))
            for run, script in scripts.items()
        }


@pytest.fixture(scope="module")
def two_processes(chosen, one_process, tmp_path_factory):
    """The same on two; there PPO is also resumed from one. To start processes takes the longest."""
    folder = tmp_path_factory.mktemp("two")
    commands = [command_of(run, **RUNS[run] | {"output_dir": folder / run}) for run in chosen]
    resumed = killed_earlier(one_process["ppo_rlhf"], folder / "resumed")
    commands.append(command_of("ppo_rlhf", resume=resumed))
    run_on(2, commands, folder / "output")
    return {run: next((folder / run).iterdir()) for run in chosen} | {"resumed": resumed}


def compare_runs(run_dir, other_dir):
    """All that two runs leave is the same to rounding: logs, checkpoints, the model."""
    files, others = contents(run_dir), contents(other_dir)
    for run_files in (files, others):
        for name in run_files:
            if name.endswith(".safetensors"):
                run_files[name] = load(run_files[name])
            elif name.endswith(".json"):
                run_files[name] = json.loads(run_files[name])
    found, expected = leaves(files), leaves(others)
    assert found.keys() == expected.keys()
    for where, a in found.items():
        b = expected[where]
        assert type(a) is type(b), where
        if torch.is_tensor(a):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-4, msg=lambda m, at=where: at + m)
            assert (a - b).double().square().mean().sqrt() < 1e-6, where
        elif isinstance(a, float):  # those of rollouts.jsonl have three digits
            absolute = 1.1e-3 if "rollouts.jsonl" in where else 1e-5
            assert a == pytest.approx(b, rel=1e-4, abs=absolute), where
        else:
            assert a == b, where


@pytest.mark.parametrize("run", some_wide(RUNS, fast=ALWAYS))
def test_two_processes_train_what_one_does(run, one_process, two_processes):
    """And leave the same checkpoints."""
    compare_runs(two_processes[run], one_process[run])


@pytest.mark.wide
def test_of_four_processes_some_get_no_rows(one_process, tmp_path):
    command = command_of("ppo_rlhf", **RUNS["ppo_rlhf"] | {"output_dir": tmp_path / "runs"})
    run_on(4, [command], tmp_path / "output")
    (run_dir,) = (tmp_path / "runs").iterdir()
    compare_runs(run_dir, one_process["ppo_rlhf"])


def test_a_run_goes_on_with_another_number_of_processes(one_process, two_processes, tmp_path):
    compare_runs(two_processes["resumed"], one_process["ppo_rlhf"])
    run_dir = killed_earlier(two_processes["dpo"], tmp_path / "copy")
    dpo = SPECS["dpo"].module
    dpo.main(dpo.parse_args(["--resume", str(run_dir)]))
    compare_runs(run_dir, one_process["dpo"])


def test_an_error_in_one_process_ends_all_and_is_shown_once(tmp_path):
    """A reward function is called by one process; the others wait for what it returns."""
    (tmp_path / "rule.py").write_text("def rule(prompts, completions, **columns): return [0.5]\n")
    flags = SPECS["grpo"].short_flags | {"output_dir": tmp_path / "runs"}
    flags["reward_fn"] = f"{tmp_path}/rule.py:rule"
    statuses = torchrun(2, ["grpo.py", *words(flags)], tmp_path / "output")
    assert all(statuses)
    printed = "".join((tmp_path / f"output.{rank}").read_text() for rank in range(2))
    assert printed.count("rule: 5 finite numbers expected") == 1
    assert [*tmp_path.glob("runs/*")] == []


@pytest.mark.wide
def test_adapters_of_a_layer_with_fewer_outputs_than_processes(tmp_path):
    """The gate of a shared expert has one."""
    model = save_model(tmp_path / "model", family_model("Qwen2Moe"), "tiny/arithmetic/base")
    flags = SPECS["sft"].short_flags | dict(model=model, lora_rank=4, max_length=64)
    for ranks in (1, 2):
        command = ["sft.py", *words(flags | {"output_dir": tmp_path / f"runs{ranks}"})]
        assert torchrun(ranks, command, tmp_path / "output") == [0] * ranks
    compare_runs(*(next((tmp_path / f"runs{ranks}").iterdir()) for ranks in (2, 1)))


@pytest.mark.wide
def test_wandb_gets_the_whole_run(tmp_path):
    """The processes end without Python's shutdown, and with it that of wandb."""
    flags = SPECS["grpo"].short_flags | {"output_dir": tmp_path / "runs", "total_rollouts": 2}
    command = ["grpo.py", *words(flags | {"track": True})]
    wandb = dict(WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    assert torchrun(2, command, tmp_path / "output", **wandb) == [0, 0]
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # History and summary: of each rollout, and of three evaluations.
    assert file.read_bytes().count(b"policy/grad_norm") >= 2


@pytest.mark.slow
def test_a_script_under_torchrun_itself(one_process, tmp_path):
    """The processes meet, part, and leave one folder."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = RUNS["dpo"] | {"output_dir": tmp_path / "runs"}
    command = [*launcher, "dpo.py", *words(flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nmodel: ") == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    compare_runs(run_dir, one_process["dpo"])
