"""Seconds an optimiser step takes, in these scripts and in TRL, on the same work.

    pip install -e ".[bench]"
    python docs/experiments/speed.py grpo dpo dpo_online rm sft
    pip install "trl==1.12.0"                    # the last release that has a PPO trainer
    python docs/experiments/speed.py ppo
    python docs/experiments/speed.py --floor grpo ppo dpo dpo_online rm sft      # without TRL
    python docs/experiments/speed.py --profile grpo ppo dpo rm sft               # without TRL

Both sides train the same checkpoint on the same data with the same batch, micro-batch, lengths,
optimiser and number of optimiser steps, in processes that take turns. The clock is the same too: a
hook after each step of any torch optimiser. Start-up, the first steps and evaluations lie outside.
`--floor` counts the operations of a step's matrix products and attention, and says how long they
alone take at the rate that torch reaches here for a product of these models' size. `--profile` says
how a run's time divides into stages, and its processor time into operators.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Optimiser steps left out at the start, and measured. PPO takes four a rollout.
SKIP, STEPS = {"grpo": 3, "ppo": 8}, {"grpo": 15, "ppo": 32}
WORKS = {
    "grpo": "GRPO, 16 prompts x 16 samples, at most 24 new tokens",
    "ppo": "PPO, 256 prompts, at most 24 new tokens, four steps a rollout",
    "dpo": "DPO, 32 pairs, log-probs of the reference computed before",
    "dpo_online": "DPO, 32 pairs, log-probs of the reference computed in each step",
    "rm": "reward model, 32 pairs",
    "sft": "SFT, 64 rows",
}


def ours(work: str, steps: int, folder: str) -> None:
    """Train with a script of this repository for some optimiser steps."""
    run = dict(output_dir=folder, save_every=10**9, eval_every=10**9, eval_rows=8)
    rows = {"dpo": 32, "dpo_online": 32, "rm": 32, "sft": 64}
    if work in rows:
        size = rows[work]
        split = "tiny/arithmetic/sft" if work == "sft" else "tiny/reviews/preferences"
        total = len((ROOT / split / "train.jsonl").read_text().splitlines())
        run |= dict(batch_size=size, micro_batch_size=size, epochs=(steps - 0.5) * size / total)
    if work == "grpo":
        import grpo as script

        run |= dict(total_rollouts=steps, prompts_per_rollout=16, group_size=16, num_minibatches=1)
    elif work == "ppo":
        import ppo_rlhf as script

        run |= dict(total_rollouts=steps // 4, prompts_per_rollout=256, max_new_tokens=24)
    elif work in ("dpo", "dpo_online"):
        import dpo as script

        run |= dict(online_reference=work == "dpo_online")
    elif work == "rm":
        import rm_bradley_terry as script
    else:
        import sft as script
    script.main(script.Args(**run))


def trl(work: str, steps: int, folder: str) -> None:
    """The same with TRL: float32, no gradient checkpointing, as ours on a CPU."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    run = dict(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=1,
    )
    kind = "arithmetic" if work in ("grpo", "sft") else "reviews"
    source = f"tiny/{kind}/{'base' if work == 'sft' else 'policy'}"
    tokenizer = AutoTokenizer.from_pretrained(source)

    def model(source=source, auto_class=AutoModelForCausalLM, **options):
        return auto_class.from_pretrained(source, dtype="float32", **options)

    def data(name):
        return load_dataset(f"tiny/{kind}/{name}", split="train")

    if work == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        from grpo import last_number

        run |= dict(max_steps=steps, learning_rate=5e-4, beta=0.04, temperature=1.0, epsilon=0.2)
        run |= dict(num_generations=16, max_completion_length=24, loss_type="grpo")
        run |= dict(per_device_train_batch_size=64, gradient_accumulation_steps=4)
        trainer = GRPOTrainer(
            model=model(),
            reward_funcs=lambda prompts, completions, answer, **_: last_number(
                prompts, completions, answer
            ),
            args=GRPOConfig(**run),
            train_dataset=data("prompts"),
            processing_class=tokenizer,
        )
    elif work == "ppo":
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        run |= dict(total_episodes=steps // 4 * 256, learning_rate=5e-4, temperature=1.0)
        run |= dict(response_length=24, stop_token="eos", num_sample_generations=0)
        # Its micro-batch is a minibatch: with smaller ones it takes fewer optimiser steps.
        run |= dict(per_device_train_batch_size=256)
        run |= dict(num_mini_batches=2, num_ppo_epochs=2, kl_coef=0.2, vf_coef=0.5)
        run |= dict(local_rollout_forward_batch_size=64)
        classifier = AutoModelForSequenceClassification
        tokenizer.padding_side = "left"
        # Repeated, because it wants more than a batch of them.
        prompts = data("prompts").repeat(8).map(lambda row: tokenizer(row["prompt"]))
        trainer = PPOTrainer(
            args=PPOConfig(**run),
            processing_class=tokenizer,
            model=model(),
            ref_model=model(),
            reward_model=model("tiny/reviews/reward_model", classifier),
            value_model=model("tiny/reviews/reward_model", classifier),
            train_dataset=prompts.select_columns(["input_ids"]),
            eval_dataset=prompts.select_columns(["input_ids"]).select(range(8)),
        )
    elif work in ("dpo", "dpo_online"):
        from trl import DPOConfig, DPOTrainer

        run |= dict(max_steps=steps, learning_rate=5e-4, beta=0.3, max_length=128)
        run |= dict(per_device_train_batch_size=32, precompute_ref_log_probs=work == "dpo")
        trainer = DPOTrainer(
            model=model(),
            ref_model=model(),
            args=DPOConfig(**run),
            train_dataset=data("preferences"),
            processing_class=tokenizer,
        )
    elif work == "rm":
        from trl import RewardConfig, RewardTrainer

        run |= dict(max_steps=steps, learning_rate=1e-3, max_length=128)
        run |= dict(per_device_train_batch_size=32)
        trainer = RewardTrainer(
            model=model(auto_class=AutoModelForSequenceClassification, num_labels=1),
            args=RewardConfig(**run),
            train_dataset=data("preferences"),
            processing_class=tokenizer,
        )
    else:
        from trl import SFTConfig, SFTTrainer

        run |= dict(max_steps=steps, learning_rate=1e-3, max_length=128)
        run |= dict(per_device_train_batch_size=64)
        trainer = SFTTrainer(
            model=model(),
            args=SFTConfig(**run),
            train_dataset=data("sft"),
            processing_class=tokenizer,
        )
    trainer.train()


def measure(side: str, work: str) -> None:
    """In a process of its own: train, and print the seconds a step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    skip, steps = SKIP.get(work, 5), STEPS.get(work, 50)
    times, first = [], []

    def note_time(optimizer, *_):
        if type(optimizer).__name__ != "AdamW":  # accelerate wraps it in an optimiser of its own
            return
        first[:] = first or [optimizer]  # PPO's critic has one too
        if optimizer is first[0]:
            times.append(time.perf_counter())

    register_optimizer_step_post_hook(note_time)
    with tempfile.TemporaryDirectory() as folder:
        {"ours": ours, "trl": trl}[side](work, skip + steps, folder)
    assert len(times) == skip + steps, f"{len(times)} optimiser steps instead of {skip + steps}"
    print(json.dumps((times[-1] - times[skip - 1]) / steps))


def in_a_process(work: str, side: str) -> Any:
    """What this file prints last for one side of a work."""
    command = [sys.executable, __file__, work, "--side", side]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def floor(work: str) -> None:
    """Print the operations in matrix products and attention of one optimiser step of ours."""
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.flop_counter import FlopCounterMode

    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    counts, per_rollout = [], 4 if work == "ppo" else 1
    with tempfile.TemporaryDirectory() as folder, FlopCounterMode(display=False) as counter:
        register_optimizer_step_post_hook(lambda *_: counts.append(counter.get_total_flops()))
        ours(work, 5 * per_rollout, folder)
    print(json.dumps((counts[-1] - counts[per_rollout - 1]) / (4 * per_rollout)))


def profiled(work: str) -> None:
    """Print the stages of a rollout in ms, and the shares of the operators that take most."""
    from torch.profiler import ProfilerActivity, profile

    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        ours(work, 16, folder)
        log = next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()
    rows = [json.loads(line) for line in log[2:]]
    lines = [
        f"{name[5:-8]} {1e3 * statistics.median(row[name] for row in rows):.0f} ms"
        for name in rows[0]
        if name.startswith("time/") and name.endswith("_seconds")
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU]) as found,
    ):
        ours(work, 16, folder)
    operators = sorted(found.key_averages(), key=lambda x: -x.self_cpu_time_total)
    total = sum(operator.self_cpu_time_total for operator in operators)
    lines += [f"{x.key} {x.self_cpu_time_total / total:.0%}" for x in operators[:5]]
    print(json.dumps(", ".join(lines)))


def matrix_rate() -> float:
    """Operations a second of (1536, 128) x (128, 384): a micro-batch in a layer of these models."""
    import torch

    a, b, found = torch.randn(1536, 128), torch.randn(384, 128), []
    for _ in range(200):
        started = time.perf_counter()
        torch.nn.functional.linear(a, b)
        found.append(time.perf_counter() - started)
    return 2 * 1536 * 128 * 384 / statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="+", choices=WORKS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--profile", action="store_true")
    sides = ["ours", "trl", "floor", "profile"]
    parser.add_argument("--side", choices=sides, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side == "floor":
        return floor(*args.works)
    if args.side == "profile":
        return profiled(*args.works)
    if args.side:
        return measure(args.side, *args.works)
    if args.floor:
        rate = matrix_rate()
        print(f"matrix products of this size: {rate / 1e9:.0f} GFLOP/s")
        for work in args.works:
            flops = in_a_process(work, "floor")
            print(f"{WORKS[work]}: {flops / 1e9:.1f} GFLOP a step, {1e3 * flops / rate:.0f} ms")
        return
    if args.profile:
        for work in args.works:
            print(f"{WORKS[work]}: {in_a_process(work, 'profile')}", flush=True)
        return
    print("milliseconds an optimiser step: median (least to most)")
    for work in args.works:
        seconds = {"ours": [], "trl": []}
        for _ in range(args.repeats):
            for side, found in seconds.items():
                found.append(in_a_process(work, side))
        ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
        columns = (
            f"{side} {1e3 * statistics.median(found):.0f} "
            f"({1e3 * min(found):.0f} to {1e3 * max(found):.0f})"
            for side, found in seconds.items()
        )
        print(
            f"{WORKS[work]}: {', '.join(columns)}, ratio {statistics.median(ratios):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
