"""Seconds an optimiser step takes, and the memory, in these scripts and in TRL, on the same work.

    pip install -e ".[bench]"
    python docs/experiments/speed.py grpo dpo dpo_online rm sft
    pip install "trl==1.12.0"                    # the last release that has a PPO trainer
    python docs/experiments/speed.py ppo
    python docs/experiments/speed.py --floor grpo ppo dpo dpo_online rm sft      # without TRL
    python docs/experiments/speed.py --profile grpo ppo dpo rm sft               # without TRL

Works named so far are tiny. Those of a real shape, and sampling against transformers:

    python docs/experiments/speed.py --tokenizer openai-community/gpt2 --data FOLDER \
        real_grpo real_dpo real_dpo_online real_rm real_sft generate

real_ppo needs TRL 1.12 too. Their model is a Llama of 20M parameters with random weights. FOLDER
holds gsm8k/train.jsonl (`question`, `answer`) and gsm8k_solutions/train.jsonl (`prompt`, a right
solution as `chosen`, a wrong one as `rejected`), both from github.com/openai/grade-school-math.
Where a file is absent random words of the same lengths stand in, and without --tokenizer one of
50,257 words; the output says so.

Both sides train the same checkpoint on the same rows with the same batch, micro-batch, lengths,
optimiser and number of optimiser steps, in processes that take turns. The clock is the same too: a
hook after each step of any torch optimiser. Start-up, the first steps and evaluations lie outside.
Memory is the highest of the whole process, libraries and evaluations included. Output: rows of a
table in Markdown. `--floor` records the matrix products and attentions of our steps, and says how
long a step's take when each is repeated by itself: no step that computes them can be faster.
`--profile` says how a run's time divides into stages, and processor time into operators.
"""

import argparse
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MADE = os.environ.get("SPEED_FOLDER", "")  # where main() has made the model and data of real works
BATCHES = (1, 16, 64, 256)  # of `generate`


@dataclass
class Work:
    """What both sides do. TRL's settings are read off the script's flags."""

    told: str
    script: str
    flags: dict  # of the script, where they are not the default ones
    skip: int = 5  # optimiser steps left out at the start
    steps: int = 50  # optimiser steps measured


def real(told: str, script: str, data: str, skip: int = 2, steps: int = 6, **flags: Any) -> Work:
    """A work on the model and the data that `make_real` has made."""
    flags |= dict(model=f"{MADE}/policy", dataset=f"{MADE}/{data}")
    flags |= dict([("max_prompt_length", 256) if data == "prompts" else ("max_length", 512)])
    return Work(told, script, flags, skip, steps)


TINY = {
    "grpo": Work(
        "GRPO, 16 prompts x 16 samples, at most 24 new tokens",
        "grpo",
        dict(prompts_per_rollout=16, group_size=16, num_minibatches=1),
        skip=3,
        steps=15,
    ),
    "ppo": Work(
        "PPO, 256 prompts, at most 24 new tokens, four steps a rollout",
        "ppo_rlhf",
        dict(prompts_per_rollout=256, max_new_tokens=24),
        skip=8,
        steps=32,
    ),
    "dpo": Work("DPO, 32 pairs, log-probs of the reference computed before", "dpo", {}),
    "dpo_online": Work(
        "DPO, 32 pairs, log-probs of the reference computed in each step",
        "dpo",
        dict(online_reference=True),
    ),
    "rm": Work("reward model, 32 pairs", "rm_bradley_terry", {}),
    "sft": Work("SFT, 64 rows", "sft", dict(batch_size=64, micro_batch_size=64)),
}
FOURS = dict(batch_size=16, micro_batch_size=4)
REAL = {
    "real_grpo": real(
        "GRPO, 4 prompts x 8 samples, 64 new tokens, micro-batches of 8",
        "grpo",
        "prompts",
        prompts_per_rollout=4,
        group_size=8,
        num_minibatches=1,
        max_new_tokens=64,
        micro_batch_size=8,
        reward_fn=["docs/experiments/speed.py:count_letters"],
    ),
    "real_ppo": real(
        "PPO, 32 prompts, 64 new tokens, four steps a rollout, micro-batches of 8",
        "ppo_rlhf",
        "prompts",
        skip=4,
        steps=8,
        prompts_per_rollout=32,
        num_minibatches=1,
        update_epochs=4,
        max_new_tokens=64,
        micro_batch_size=8,
        reward_model=f"{MADE}/reward",
    ),
    "real_dpo": real(
        "DPO, 16 pairs in micro-batches of 4, reference before", "dpo", "preferences", **FOURS
    ),
    "real_dpo_online": real(
        "DPO, 16 pairs in micro-batches of 4, reference in each step",
        "dpo",
        "preferences",
        online_reference=True,
        **FOURS,
    ),
    "real_rm": real(
        "reward model, 16 pairs in micro-batches of 4", "rm_bradley_terry", "preferences", **FOURS
    ),
    "real_sft": real("SFT, 16 rows in micro-batches of 4", "sft", "sft", **FOURS),
    "generate": Work("sampling", "", {}),
}
WORKS = TINY | REAL


def count_letters(prompts: list, completions: list, answer: list) -> list[float]:
    """A reward that differs between the samples of a model with random weights."""
    return [float(sum(map(str.isalpha, text))) for text in completions]


def flags_of(work: Work, steps: int) -> tuple[Any, Any, int, int]:
    """The script, its flags, optimiser steps a rollout, and how many training rows there are."""
    script = import_module(work.script)
    args = script.Args(**work.flags)
    per_rollout = getattr(args, "update_epochs", 1) * getattr(args, "num_minibatches", 1)
    rows = getattr(args, "prompts_per_rollout", 0) or args.batch_size
    found = len(Path(args.dataset, "train.jsonl").read_text().splitlines())
    return script, args, per_rollout, min(found, steps // per_rollout * rows)


def ours(work: Work, steps: int, folder: str) -> None:
    """Train with a script of this repository for some optimiser steps."""
    script, args, per_rollout, rows = flags_of(work, steps)
    vars(args).update(output_dir=folder, save_every=10**9, eval_every=10**9, eval_rows=8)
    args.train_split = f"train[:{rows}]"
    if hasattr(args, "epochs"):
        args.epochs = (steps - 0.5) * args.batch_size / rows
    else:
        args.total_rollouts = steps // per_rollout
    script.main(args)


def trl(work: Work, steps: int, folder: str) -> None:
    """The same with TRL: float32, no gradient checkpointing, as ours on a CPU."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    script, args, per_rollout, rows = flags_of(work, steps)
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
        max_steps=steps,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.micro_batch_size,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = load_dataset(args.dataset, split="train").select(range(rows))

    def model(source=args.model, auto_class=AutoModelForCausalLM, **options):
        return auto_class.from_pretrained(source, dtype="float32", **options)

    def accumulate(rows_a_step):
        return dict(gradient_accumulation_steps=rows_a_step // args.micro_batch_size)

    if work.script == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        rule = count_letters if args.reward_fn else script.last_number
        run |= dict(beta=args.beta, temperature=1.0, epsilon=args.clip_coef, loss_type="grpo")
        run |= dict(num_generations=args.group_size, max_completion_length=args.max_new_tokens)
        run |= accumulate(args.prompts_per_rollout * args.group_size)
        trainer = GRPOTrainer(
            model=model(),
            reward_funcs=lambda prompts, completions, answer, **_: rule(
                prompts, completions, answer
            ),
            args=GRPOConfig(**run),
            train_dataset=data,
            processing_class=tokenizer,
        )
    elif work.script == "ppo_rlhf":
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        del run["max_steps"]
        run |= dict(total_episodes=steps // per_rollout * args.prompts_per_rollout)
        run |= dict(response_length=args.max_new_tokens, temperature=1.0)
        run |= dict(stop_token="eos", num_sample_generations=0, local_rollout_forward_batch_size=64)
        run |= dict(num_mini_batches=args.num_minibatches, num_ppo_epochs=args.update_epochs)
        run |= dict(kl_coef=args.beta, vf_coef=args.vf_coef)
        if args.num_minibatches > 1:  # with micro-batches it would take fewer optimiser steps
            run |= dict(per_device_train_batch_size=args.prompts_per_rollout)
        else:
            run |= accumulate(args.prompts_per_rollout)
        classifier = AutoModelForSequenceClassification
        tokenizer.padding_side = "left"
        # Repeated, because it wants more than a batch of them.
        prompts = data.repeat(8).map(lambda row: tokenizer(row["prompt"]))
        trainer = PPOTrainer(
            args=PPOConfig(**run),
            processing_class=tokenizer,
            model=model(),
            ref_model=model(),
            reward_model=model(args.reward_model, classifier),
            value_model=model(args.reward_model, classifier),
            train_dataset=prompts.select_columns(["input_ids"]),
            eval_dataset=prompts.select_columns(["input_ids"]).select(range(8)),
        )
    elif work.script == "dpo":
        from trl import DPOConfig, DPOTrainer

        run |= dict(beta=args.beta, max_length=args.max_length) | accumulate(args.batch_size)
        run |= dict(precompute_ref_log_probs=not args.online_reference)
        trainer = DPOTrainer(
            model=model(),
            ref_model=model(),
            args=DPOConfig(**run),
            train_dataset=data,
            processing_class=tokenizer,
        )
    elif work.script == "rm_bradley_terry":
        from trl import RewardConfig, RewardTrainer

        run |= dict(max_length=args.max_length) | accumulate(args.batch_size)
        trainer = RewardTrainer(
            model=model(auto_class=AutoModelForSequenceClassification, num_labels=1),
            args=RewardConfig(**run),
            train_dataset=data,
            processing_class=tokenizer,
        )
    else:
        from trl import SFTConfig, SFTTrainer

        run |= dict(max_length=args.max_length) | accumulate(args.batch_size)
        trainer = SFTTrainer(
            model=model(),
            args=SFTConfig(**run),
            train_dataset=data,
            processing_class=tokenizer,
        )
    trainer.train()


def make_real(folder: str, source: str | None, data: str | None) -> str:
    """Write model and data of the real works to the folder; returns what they are."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
    from transformers import logging, set_seed

    if source:
        tokenizer = AutoTokenizer.from_pretrained(source)
    else:
        words = {f"word{i}": i for i in range(50_256)} | {"<|endoftext|>": 50_256}
        plain = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
        plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|endoftext|>")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        num_labels=1,
        **{name: getattr(tokenizer, name) for name in names},
    )
    set_seed(1)
    logging.disable_progress_bar()
    for name, kind in dict(policy=LlamaForCausalLM, reward=LlamaForSequenceClassification).items():
        kind(config).save_pretrained(f"{folder}/{name}")
        tokenizer.save_pretrained(f"{folder}/{name}")

    some = (tokenizer.decode([i]).strip() for i in random.sample(range(len(tokenizer)), 5000))
    one = len(tokenizer("a").input_ids) + 1
    words = [x for x in some if x.isalnum() and len(tokenizer(f"a {x}").input_ids) == one]

    told = [f"tokenizer {source or 'made here, of 50,257 words'}"]

    def rows(file, *columns):
        """The columns' texts in a file of --data, or random words, one token each."""
        known = data and Path(data, file).exists()
        told.append(f"{file} {'from ' + data if known else 'of random words, lengths as in GSM8K'}")
        if known:
            lines = Path(data, file).read_text().splitlines()[:512]
            return [[json.loads(line)[column] for column in columns] for line in lines]
        # As GSM8K in GPT-2's tokens: the logarithm of a length is normal, medians are 52 and 90.
        laws = ((3.95, 0.35), (4.5, 0.4), (4.5, 0.4))[: len(columns)]
        sizes = ([int(random.lognormvariate(*law)) for law in laws] for _ in range(512))
        return [[" ".join(random.choices(words, k=size)) for size in row] for row in sizes]

    tasks = rows("gsm8k/train.jsonl", "question", "answer")
    pairs = rows("gsm8k_solutions/train.jsonl", "prompt", "chosen", "rejected")
    for name, made in {
        "prompts": [dict(prompt=x, answer=y) for x, y in tasks],
        "sft": [dict(prompt=x, completion=f" {y}") for x, y in tasks],
        "preferences": [dict(prompt=x, chosen=f" {y}", rejected=f" {z}") for x, y, z in pairs],
    }.items():
        Path(folder, name).mkdir()
        for split, part in dict(train=made[:-8], test=made[-8:]).items():
            lines = (json.dumps(row) + "\n" for row in part)
            Path(folder, name, f"{split}.jsonl").write_text("".join(lines))
    return "; ".join(told)


def sample(side: str) -> list[tuple]:
    """Name, tokens a second and peak memory of each batch and kind of length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from common.generation import generate, pad_rows

    tokenizer = AutoTokenizer.from_pretrained(f"{MADE}/policy")
    model = AutoModelForCausalLM.from_pretrained(f"{MADE}/policy", dtype="float32").eval()
    lines = Path(MADE, "prompts", "train.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    rng = torch.manual_seed(1)

    def complete(prompts, length, stop_ids):
        if side == "ours":
            return generate(model, prompts, length, 1.0, stop_ids, rng)
        ids, mask = pad_rows(prompts, "cpu", left=True)
        how = dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=length)
        how |= dict(eos_token_id=stop_ids or None, pad_token_id=tokenizer.pad_token_id)
        inputs = dict(input_ids=ids, attention_mask=mask.long())
        made = model.generate(**inputs, generation_config=GenerationConfig(**how))
        rows = made[:, ids.shape[1] :].tolist()
        ends = ([t for t, token in enumerate(row, 1) if token in stop_ids] for row in rows)
        return [row[: min(end, default=length)] for row, end in zip(rows, ends, strict=True)]

    # Every 32nd token ends a completion: under random weights after 32 tokens in the mean.
    kinds = {"64 tokens": (64, []), "1 to 128 tokens": (128, [*range(0, len(tokenizer), 32)])}
    complete(prompts[:2], *kinds["1 to 128 tokens"])  # start-up
    found = []
    for batch in BATCHES:
        for kind, settings in kinds.items():
            calls = [prompts[i * batch :][:batch] for i in range(max(1, 16 // batch))]
            started = time.perf_counter()
            made = [len(row) for call in calls for row in complete(call, *settings)]
            seconds = time.perf_counter() - started
            found.append(
                (f"`generate`, batch of {batch}, {kind}", sum(made) / seconds, peak_memory())
            )
    return found


def peak_memory() -> float:
    """The most that this process has held, in MB."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux, whose getrusage counts the parent process too, until exec
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1.024e-3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1e-6


def after_steps(note: Callable) -> list:
    """What `note()` gives after each optimiser step from now on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    found, first = [], []

    def hook(optimizer, *_):
        if type(optimizer).__name__ != "AdamW":  # accelerate wraps it in an optimiser of its own
            return
        first[:] = first or [optimizer]  # PPO's critic has one too
        if optimizer is first[0]:
            found.append(note())

    register_optimizer_step_post_hook(hook)
    return found


def measure(side: Callable, work: Work, steps: int) -> list[tuple]:
    """Train; name, ms an optimiser step and peak memory."""
    times, total = after_steps(time.perf_counter), work.skip + steps
    with tempfile.TemporaryDirectory() as folder:
        side(work, total, folder)
    assert len(times) == total, f"{len(times)} optimiser steps instead of {total}"
    return [(work.told, 1e3 * (times[-1] - times[work.skip - 1]) / steps, peak_memory())]


def floor(work: Work, steps: int) -> str:
    """Time of a measured step's matrix products and attention, each repeated by itself."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    @dataclass
    class Layout:
        shape: tuple
        strides: tuple
        dtype: torch.dtype

        def ones(self) -> torch.Tensor:
            size = 1 + sum((n - 1) * by for n, by in zip(self.shape, self.strides, strict=True))
            return torch.ones(size, dtype=self.dtype).as_strided(self.shape, self.strides)

    calls, inputs = Counter(), {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            given = (args, kwargs or {})
            if re.search("mm|attention", operator.overloadpacket.__name__):
                layout = tree_map_only(
                    torch.Tensor, lambda x: Layout(x.shape, x.stride(), x.dtype), given
                )
                calls[operator, repr(layout)] += 1
                inputs[operator, repr(layout)] = layout
            return operator(*args, **given[1])

    def seconds(call: tuple) -> float:
        args, kwargs = tree_map_only(Layout, Layout.ones, inputs[call])
        times = []
        while len(times) < 3 or (len(times) < 30 and sum(times) < 0.3):
            started = time.perf_counter()
            call[0](*args, **kwargs)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    counts = after_steps(calls.copy)
    with tempfile.TemporaryDirectory() as folder, Record():
        ours(work, work.skip + steps, folder)
    counted = counts[-1] - counts[work.skip - 1]
    total = sum(count * seconds(call) for call, count in counted.items()) / steps
    return f"{1e3 * total:.0f} ms per step in {counted.total() / steps:.0f} calls"


def profiled(work: Work, steps: int) -> str:
    """The stages of a rollout in ms, and the shares of the operators that take most."""
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        ours(work, steps, folder)
        log = next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()
    rows = [json.loads(line) for line in log[2:]]
    told = [
        f"{name[5:-8]} {1e3 * statistics.median(row[name] for row in rows):.0f} ms"
        for name in rows[0]
        if name.startswith("time/") and name.endswith("_seconds")
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU]) as found,
    ):
        ours(work, steps, folder)
    operators = sorted(found.key_averages(), key=lambda x: -x.self_cpu_time_total)
    total = sum(operator.self_cpu_time_total for operator in operators)
    told += [f"{x.key} {x.self_cpu_time_total / total:.0%}" for x in operators[:5]]
    return ", ".join(told)


def run_side(side: str, work: Work, steps: int | None) -> Any:
    """What a process of its own finds out."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    if os.environ.get("SPEED_MEDIUM"):
        import torch

        torch.set_float32_matmul_precision("medium")
    if side == "floor":
        return floor(work, steps or work.steps)
    if side == "profile":
        return profiled(work, steps or (16 if work in TINY.values() else 8))
    if not work.script:
        return sample(side)
    return measure({"ours": ours, "trl": trl}[side], work, steps or work.steps)


def in_a_process(name: str, side: str, steps: int | None) -> Any:
    """What this file prints last for one side of a work."""
    command = [sys.executable, __file__, name, "--side", side]
    command += ["--steps", str(steps)] if steps else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table_row(mine: list[tuple], other: list[tuple], is_rate: bool) -> str:
    """Medians over the runs (least to most), and those of the ratios within each turn."""

    def cell(values, digits=0):
        values = (statistics.median(values), min(values), max(values))
        return "{} ({} to {})".format(*(f"{value:,.{digits}f}" for value in values))

    cells = [mine[0][0]]
    for index, up in ((1, is_rate), (2, False)):
        a, b = ([run[index] for run in runs] for runs in (mine, other))
        ratios = [x / y if up else y / x for x, y in zip(a, b, strict=True)]
        cells += [cell(a), cell(b), cell(ratios, 2)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="+", choices=WORKS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help="optimiser steps measured (PPO: 4, 8...)")
    parser.add_argument("--tokenizer", help="folder or hub name, for the real works")
    parser.add_argument("--data", help="folder with the texts of the real works")
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--medium", action="store_true", help="float32 matmul precision, of both")
    sides = ["ours", "trl", "floor", "profile"]
    parser.add_argument("--side", choices=sides, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return print(json.dumps(run_side(args.side, WORKS[args.works[0]], args.steps)))
    alone = "floor" if args.floor else "profile" if args.profile else None
    if alone and "generate" in args.works:
        parser.error(f"--{alone} is of training")
    if args.data and not (args.tokenizer and Path(args.data).is_dir()):
        parser.error("--data needs a --tokenizer, and to be a folder")
    if args.medium:
        os.environ["SPEED_MEDIUM"] = "1"
    head = ""
    with tempfile.TemporaryDirectory() as folder:
        if REAL.keys() & {*args.works}:
            os.environ["SPEED_FOLDER"] = folder
            print(make_real(folder, args.tokenizer, args.data), end="\n\n", flush=True)
        for name in args.works:
            if alone:
                print(f"{WORKS[name].told}: {in_a_process(name, alone, args.steps)}", flush=True)
                continue
            mine, other = [], []
            for _ in range(args.repeats):
                mine.append(in_a_process(name, "ours", args.steps))
                other.append(in_a_process(name, "trl", args.steps))
            is_rate = name == "generate"
            them, unit = (
                ("transformers", "tokens per second") if is_rate else ("TRL", "ms per step")
            )
            if unit not in head:
                head = f"| workload | ours, {unit} | {them}, {unit} | ratio "
                print(f"{head}| ours, peak MB | {them}, peak MB | ratio |\n|{'---|' * 7}")
            for rows in zip(zip(*mine, strict=True), zip(*other, strict=True), strict=True):
                print(table_row(*rows, is_rate), flush=True)


if __name__ == "__main__":
    main()
