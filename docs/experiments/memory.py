"""Peak memory: of log-probabilities over a large vocabulary, and of whole training runs.

    python docs/experiments/memory.py logprobs
    python docs/experiments/memory.py scripts

Each figure comes from a process of its own. On a CPU it is the most resident memory that Linux has
seen since the measurement began, less what was resident then; on a GPU what torch has allocated.

`scripts` trains random models of 27M parameters for two steps, few and short rows at a time, so
that what the printed line counts is most of the memory. The tiny models are trained before the
measurement begins, to have made what is made once.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
VOCAB, HIDDEN, TOKENS = 151_936, 896, 2_048  # Qwen2.5-0.5B's head
MB = 1e6


def resident(name: str) -> int:
    """Bytes: VmRSS is resident now, VmHWM the most since the last `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise SystemExit("error: the memory of a process is read from /proc, which only Linux has")


def reset_peak() -> int:
    """Bytes in use now; peaks are counted from here."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak() -> int:
    """The most bytes in use since `reset_peak`."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return resident("VmHWM")


def logprobs(way: str) -> dict:
    """Extra bytes and seconds of log-probs, forward and backward, through the head of a model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from common.logprobs import completion_logprobs

    # Hardly a layer, and embeddings that are not trained: what is left to measure is the head.
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        intermediate_size=1,
        num_attention_heads=14,
        max_position_embeddings=TOKENS + 1,
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device).eval()
    model.get_input_embeddings().requires_grad_(False)
    ids = torch.randint(VOCAB, (1, TOKENS + 1), device=device)

    def run(length: int = TOKENS + 1) -> None:
        if way == "plain":
            # The usual lines: logits of all positions, log_softmax, gather.
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(input_ids=ids[:, : length - 1], use_cache=False).logits.float()
            targets = ids[:, 1:length, None]
            values = torch.log_softmax(logits, dim=-1).gather(2, targets)
        else:
            row = ids[0, :length].tolist()
            pairs, entropy = [(row[:1], row[1:])], way == "ours with entropy"
            values = completion_logprobs(model, pairs, [0], entropy=entropy)
        (values[0] if isinstance(values, tuple) else values).sum().backward()
        model.zero_grad()

    run(64)  # what is made once, such as the threads' own memory
    before = reset_peak()
    run()
    extra = peak() - before
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"extra": extra, "seconds": statistics.median(seconds)}


# Two optimiser steps of two micro-batches: the second meets the gradients of the first.
PAIRS = dict(train_split="train[:16]", epochs=1.0, batch_size=8)
ROLLOUTS = dict(total_rollouts=1, num_minibatches=2)
RUNS = {
    "sft": PAIRS,
    "rm_bradley_terry": PAIRS,
    "ppo_rlhf": ROLLOUTS | dict(prompts_per_rollout=16, update_epochs=1),
    "grpo": ROLLOUTS | dict(prompts_per_rollout=8, group_size=2),
    "dpo": PAIRS,
    "kto": PAIRS,
    "reinforce": dict(total_rollouts=2, prompts_per_rollout=8, group_size=2, max_new_tokens=8),
}


def enlarge(source: str, folder: Path) -> str:
    """A random model of 27M parameters in the place of a tiny one, with its tokenizer."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    size = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8)
    heads = dict(num_attention_heads=16, num_key_value_heads=16)
    config = AutoConfig.from_pretrained(source, dtype="float32", **size, **heads)
    classifier = "Classification" in config.architectures[0]
    if classifier:
        config.num_labels = 1
    auto_class = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    auto_class.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return str(folder)


def scripts(name: str) -> dict:
    """The printed line's bytes and the peak of each stage of a run."""
    sys.path.insert(0, str(ROOT))
    script, stages, before = importlib.import_module(name), {}, 0

    def ends(stage: str, function: Callable) -> Callable:
        """The function, which is called as a stage ends."""

        def wrapped(*args, **kwargs):
            stages[stage] = peak() - before
            reset_peak()
            return function(*args, **kwargs)

        return wrapped

    with tempfile.TemporaryDirectory() as folder:
        few = dict(eval_split="test[:4]") if name == "reinforce" else dict(eval_rows=4)
        flags = dict(micro_batch_size=4, output_dir=folder, **few, **RUNS[name])
        large = {
            flag: enlarge(source, Path(folder) / flag)
            for flag in ("model", "reward_model")
            if (source := getattr(script.Args, flag, None))
        }
        script.main(script.Args(**flags))
        for stage, last in (
            ("loading", "get_scheduler"),
            ("training", "save_checkpoint"),
            ("checkpoint", "finish"),
        ):
            if hasattr(script, last):  # reinforce.py has no schedule
                setattr(script, last, ends(stage, getattr(script, last)))
        before = reset_peak()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            script.main(script.Args(**flags | large))
            stages["model"] = peak() - before
    counted = re.search(r"([\d.]+) GB", out.getvalue())[1]
    return {"table": float(counted) * 1e9, "stages": stages}


def in_a_process(*arguments: str, **environment: str) -> dict:
    """What this file prints last when it is called with these arguments."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["logprobs", "scripts"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps({"logprobs": logprobs, "scripts": scripts}[args.what](args.one)))
    elif args.what == "logprobs":
        from common.logprobs import MAX_LOGITS

        gradients = 4 * HIDDEN * (VOCAB + TOKENS)  # of the head's weights and the hidden states
        chunk = 4 * (MAX_LOGITS // VOCAB) * VOCAB
        print(f"{TOKENS} tokens, vocabulary {VOCAB}, hidden {HIDDEN}, forward and backward")
        print(f"gradients {gradients / MB:,.0f} MB, chunk {chunk / MB:,.0f} MB")
        for way in ("plain", "ours", "ours with entropy"):
            found = in_a_process(args.what, "--one", way)
            chunks = (found["extra"] - gradients) / chunk
            print(
                f"{way}: {found['extra'] / MB:,.0f} MB extra (gradients and {chunks:.2f} chunks), "
                f"{found['seconds']:.2f} s"
            )
    else:
        for name in RUNS:
            # Freed memory goes back to the system at once; it would be counted as resident else.
            found = in_a_process(args.what, "--one", name, MALLOC_MMAP_THRESHOLD_="65536")
            most = max(found["stages"].values())
            stages = [f"{stage} {size / MB:,.0f}" for stage, size in found["stages"].items()]
            print(
                f"{name}: counted {found['table'] / MB:,.0f} MB, peak {most / MB:,.0f} MB, "
                f"{most / found['table']:.2f} of it ({', '.join(stages)})",
                flush=True,
            )


if __name__ == "__main__":
    main()
