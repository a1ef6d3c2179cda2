"""What a run says of itself: its first line, its folder, wandb, warnings, and its last lines."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from datetime import datetime
from statistics import mean
from types import SimpleNamespace


import pytest
import wandb
from models import save_model, some_wide
from runs import read_log, words, write_splits
from safetensors.torch import load_file
from scripts import SPECS, WITH_ROLLOUTS, short_flags
from spies import spy_on
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import grpo
import runtime.processes


@pytest.fixture
def tracked(monkeypatch):
    """What is called of wandb: a list of names and their first arguments."""
    calls = []
    monkeypatch.setattr(wandb, "init", lambda **options: calls.append(("init",)))
    monkeypatch.setattr(wandb, "log", lambda metrics, **options: calls.append(("log", metrics)))
    return calls


AWKWARD = 'it\'s "quoted" for $5 \\ `now`!\nand a second line, \u00e9'  # for JSON


@pytest.mark.parametrize("name", some_wide(SPECS, fast=["dpo", "ppo_rlhf", "grpo_tools"]))
def test_what_a_run_leaves_and_prints(name, tracked, tmp_path, capsys, monkeypatch):
    script = SPECS[name].module
    # It would drop the row with characters that are not in the vocabulary.
    monkeypatch.setattr("common.tokens.check_ids", lambda *_: None)
    rows = read_log(f"{script.Args.dataset}/train.jsonl")[:20]
    rows[0]["prompt"] = AWKWARD
    flags = SPECS[name].short_flags | {"dataset": write_splits(tmp_path, rows), "track": True}
    flags |= {"total_rollouts": 4} if "total_rollouts" in flags else {"epochs": 0.8}
    flags |= {"eval_split": "test[:7]", "eval_rows": 5}
    args = script.Args(**flags | {"output_dir": str(tmp_path / "runs")})
    run_dir = script.main(args)

    # The folder: args.json, metrics.jsonl, samples.jsonl, and the model.
    saved = json.loads((run_dir / "args.json").read_text())
    assert script.Args(**saved) == args
    rows = read_log(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    evaluated = [row["step"] for row in rows if any(key.startswith("eval/") for key in row)]
    assert evaluated == [0, 3, 4]  # --eval-every 3, and the last
    if name != "rm_bradley_terry":
        samples = read_log(run_dir / "samples.jsonl")
        assert [sample["step"] for sample in samples] == [0] * 5 + [3] * 5 + [4] * 5
        assert not any("<" in sample["completion"] for sample in samples)  # nor <eos>
        assert name == "sft" or samples[0]["prompt"] == AWKWARD  # there it is decoded
    SPECS[name].saved.from_pretrained(run_dir)
    modes = {(run_dir / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1  # others may read it
    config = json.loads((run_dir / "config.json").read_text())  # for older programs too
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]

    # The console: what is trained on what, evaluations, how to resume, and the model's folder.
    printed = capsys.readouterr().out
    first, *_ = printed.splitlines()
    for text in (args.model, args.dataset, "cpu"):
        assert text in first
    weights = load_file(run_dir / "model.safetensors")
    num_parameters = sum(weight.numel() for weight in weights.values())
    assert f"{args.model}: {num_parameters:,} parameters" in printed
    default = f"learning rate {args.learning_rate}, the default for {num_parameters:,} parameters"
    assert f"{args.model}: {default}" in printed
    assert "step 0: held-out " in printed and f"--resume {run_dir} continues it" in printed
    assert printed.endswith(f"\nmodel: {run_dir} (docs/viewer.html shows the run)\n")

    # wandb: the same metrics. Without --track a call of wandb would fail, in all other tests.
    assert [call[0] for call in tracked] == ["init", *["log"] * len(rows)]
    for (_, metrics), row in zip(tracked[1:], rows, strict=True):
        assert row.items() <= {**metrics, "step": row["step"]}.items()


@pytest.mark.parametrize("name", [name for name in SPECS if "policy" in SPECS[name].models])
def test_a_saved_policy_ends_at_its_stop_ids_and_brings_no_sampling_of_its_own(name, tmp_path):
    """Whatever the generation config of the checkpoint that the run began with."""
    source, script = tmp_path / "model", SPECS[name].module
    model = AutoModelForCausalLM.from_pretrained(script.Args.model)
    tokenizer = AutoTokenizer.from_pretrained(script.Args.model)
    save_model(source, model, tokenizer)
    # transformers refuses to save this one, at the very end of a run.
    config = dict(eos_token_id=[5], temperature=0.6, do_sample=False, top_k=3)
    (source / "generation_config.json").write_text(json.dumps(config))
    flags = SPECS[name].short_flags | short_flags(name, epochs=0.1, total_rollouts=1)
    flags |= dict(model=str(source), output_dir=f"{tmp_path}/runs")
    saved = GenerationConfig.from_pretrained(script.main(script.Args(**flags)))
    assert saved.eos_token_id == [tokenizer.eos_token_id, 5]
    assert saved.pad_token_id == tokenizer.pad_token_id
    assert saved.top_k is saved.temperature is None


@pytest.mark.parametrize("name", WITH_ROLLOUTS)
def test_rollouts_are_what_the_metrics_are_of(name, tmp_path, monkeypatch):
    """Of one group of four, or of four completions where there are no groups: these are all."""
    script = SPECS[name].module
    sampled = spy_on(script, monkeypatch, "generate")
    ranked = spy_on(script, monkeypatch, SPECS[name].advantages)
    flags = SPECS[name].short_flags | dict(total_rollouts=4, log_rollouts_every=2, save_every=9)
    flags |= dict(prompts_per_rollout=4, max_new_tokens=9, eval_every=9, learning_rate=5e-3)
    if hasattr(script.Args, "group_size"):
        one_turn = short_flags(name, num_minibatches=1, max_turns=1, call_end=";")
        flags |= dict(prompts_per_rollout=1, group_size=4) | one_turn
    run_dir = script.main(script.Args(**flags, output_dir=str(tmp_path)))
    tokenizer = AutoTokenizer.from_pretrained(run_dir)
    rows = {row["step"]: row for row in read_log(run_dir / "metrics.jsonl")}
    rollouts = read_log(run_dir / "rollouts.jsonl")
    assert [rollout["step"] for rollout in rollouts] == [2, 4]
    for rollout in rollouts:
        metrics, shown = rows[rollout["step"]], rollout["completions"]
        _, (sequences, _) = sampled[rollout["step"]]
        prompts, completions = zip(*sequences, strict=True)
        _, advantages = ranked[rollout["step"] - 1]
        assert ["".join(row["tokens"]) for row in shown] == tokenizer.batch_decode(completions)
        assert [row["prompt"] for row in shown] == tokenizer.batch_decode(prompts)
        assert [len(row["tokens"]) for row in shown] == [*map(len, completions)]
        for row, expected in zip(shown, advantages, strict=True):
            expected = expected.tolist()
            if isinstance(expected, list):  # one for each token
                expected = expected[: len(row["tokens"])]
            assert row["advantage"] == pytest.approx(expected, abs=5.1e-4)
        if name != "reinforce":  # it has no reference
            kls = [sum(row["log_ratio"]) for row in shown]
            assert metrics["objective/kl"] == pytest.approx(mean(kls), abs=9 * 5.1e-4)
            assert any(abs(kl) > 0.01 for kl in kls)
        if name == "distill":  # they are one
            metrics["reward/mean"] = -metrics["objective/kl"]
        means = {"reward/mean": "reward", "completions/truncated_fraction": "truncated"}
        for metric, key in means.items():
            assert metrics[metric] == pytest.approx(mean(row[key] for row in shown), abs=1e-3)
        by_name = {key for key in metrics if key.startswith("rewards/")}
        assert all(by_name <= row.keys() for row in shown)
        assert bool(by_name) == hasattr(script.Args, "reward_model")


def test_a_folder_is_never_written_over(tmp_path, monkeypatch):
    args = grpo.Args(output_dir=str(tmp_path))
    assert grpo.open_run(args) != grpo.open_run(args)  # in the same second
    monkeypatch.setattr(grpo, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 1)))
    grpo.open_run(args)
    with pytest.raises(FileExistsError):
        grpo.open_run(args)


def test_a_model_that_its_user_may_only_read(tmp_path):
    """As on a shared disk. Root drops its right to ignore the modes of files."""
    folder = shutil.copytree("tiny/arithmetic/policy", tmp_path / "model")
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555)
    rights = "-dac_override,-dac_read_search"
    as_user = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
    flags = SPECS["grpo"].short_flags | dict(model=folder, output_dir=tmp_path, total_rollouts=1)
    command = [sys.executable, "grpo.py", *words(flags)]
    subprocess.run(command if os.getuid() else as_user + command, check=True)


def test_other_ranks_print_in_every_locale(monkeypatch):
    monkeypatch.setattr(runtime.processes, "RANK", 1)
    monkeypatch.setattr("sys.stdout", sys.stdout)
    with warnings.catch_warnings():
        runtime.processes.join_processes()
    assert sys.stdout.errors == "backslashreplace"  # of a character that latin-1 lacks
