"""Memory: the size that a run prints is right, and a resumed run keeps no second copy.

How high the memory of a run rises is measured by docs/experiments/memory.py.
"""

import json
import math
import re
import struct
import weakref
from pathlib import Path

import pytest
import torch
from scripts import SCRIPTS

POLICY, REWARD_MODEL = "tiny/reviews/policy", "tiny/reviews/reward_model"
PAIRS = dict(train_split="train[:2]", epochs=1.0, batch_size=2, eval_rows=2)
REVIEWS = dict(model=POLICY, dataset="tiny/reviews/prompts", reward_model=REWARD_MODEL)
ROLLOUT = dict(total_rollouts=1, prompts_per_rollout=2, num_minibatches=1, eval_rows=2)
ROLLOUT |= dict(max_new_tokens=4)
CASES = {
    "sft": ("sft", PAIRS),
    "reward model": ("rm_bradley_terry", PAIRS),
    "ppo": ("ppo_rlhf", ROLLOUT),
    "grpo": ("grpo", ROLLOUT),
    "grpo, all models": ("grpo", ROLLOUT | REVIEWS),
    "grpo, no reference": ("grpo", ROLLOUT | dict(beta=0.0)),
    "dpo": ("dpo", PAIRS),
    "kto": ("kto", PAIRS),
    "dpo, online reference": ("dpo", PAIRS | dict(online_reference=True)),
    "simpo": ("dpo", PAIRS | dict(loss="simpo")),
}


def run(name, output_dir, **flags):
    script = SCRIPTS[name]
    return script.main(script.Args(**{"output_dir": str(output_dir), "eval_every": 9} | flags))


def numbers_in(folder):
    """How many numbers a checkpoint holds, by the header of its file."""
    data = (Path(folder) / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return sum(math.prod(entry["shape"]) for key, entry in header.items() if key[:2] != "__")


@pytest.mark.parametrize("case", CASES)
def test_the_printed_size_is_what_the_checkpoints_hold(case, tmp_path, capsys):
    """float32: a model's weights, and for what is trained a gradient and two moments of Adam."""
    name, flags = CASES[case]
    run_dir = run(name, tmp_path, **flags)
    out = capsys.readouterr().out
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    args = SCRIPTS[name].Args(**flags)
    sizes = {"policy": numbers_in(args.model)}
    if name == "rm_bradley_terry":
        sizes = {"model": sizes["policy"] + 128}  # and a head for the hidden size
    if name == "ppo_rlhf":
        sizes["critic"] = numbers_in(args.reward_model)
    trained = sum(sizes.values())
    if name in ("grpo", "dpo", "ppo_rlhf"):
        used = args.online_reference if name == "dpo" else args.beta > 0
        sizes["reference"] = sizes["policy"] * used
    if name in ("grpo", "ppo_rlhf") and args.reward_model:
        sizes["reward model"] = numbers_in(args.reward_model)

    # What Adam keeps of each number that is trained is in the checkpoint: two more.
    names = {"policy", "critic", "model"} & state.keys()
    parts = [state[name]["optim_state_dict"]["state"] for name in names]
    moments = [s[key] for part in parts for s in part.values() for key in s if "exp" in key]
    updated = sum(tensor.numel() for tensor in moments) // 2
    assert updated == trained
    (found,) = re.findall(r"([\d.]+) GB on cpu", out)
    assert float(found) == pytest.approx(4e-9 * (sum(sizes.values()) + 3 * updated), abs=0.00051)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_resumed_run_frees_the_checkpoint_that_it_loaded(name, tmp_path, monkeypatch):
    flags = PAIRS if "total_rollouts" not in vars(SCRIPTS[name].Args) else ROLLOUT
    if name == "reinforce":
        flags = dict(prompts_per_rollout=2, eval_split="test[:2]", max_new_tokens=4)
    two_steps = {"epochs": 2.0} if "epochs" in flags else {"total_rollouts": 2}
    flags = flags | two_steps | {"save_every": 1}
    script, loaded, kept = SCRIPTS[name], [], []

    class Killed(Exception):
        pass

    def save_and_die(*arguments):
        save(*arguments)
        raise Killed

    def spy_on_read(*arguments, **options):
        state = read(*arguments, **options)
        model = state["policy" if "policy" in state else "model"]["model_state_dict"]
        loaded.extend(weakref.ref(tensor) for tensor in model.values())
        return state

    def spy_on_log(*arguments):  # first called when a step has been made
        kept.append(sum(tensor() is not None for tensor in loaded))
        return log(*arguments)

    save, read, log = script.save_checkpoint, torch.load, script.log
    monkeypatch.setattr(script, "save_checkpoint", save_and_die)
    with pytest.raises(Killed):
        run(name, tmp_path, **flags)
    monkeypatch.setattr(script, "save_checkpoint", save)
    monkeypatch.setattr(torch, "load", spy_on_read)
    monkeypatch.setattr(script, "log", spy_on_log)
    (run_dir,) = tmp_path.iterdir()
    script.main(script.parse_args(["--resume", str(run_dir)]))
    assert len(loaded) > 10 and kept == [0]
