"""Seconds an optimiser step takes, and the memory, in these scripts and in TRL, on the same work.

    pip install -e ".[bench]"
    python docs/experiments/speed.py grpo dpo dpo_online rm sft
    pip install "trl==1.12.0"                    # the last release that has a PPO trainer
    python docs/experiments/speed.py ppo
    python docs/experiments/speed.py --activation-checkpointing grpo dpo sft     # on both sides
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
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from measuring import resident
from rules import count_letters
from subprocesses import run_for_json
from tables import spread
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    logging,
    set_seed,
)

from common.generation import generate, pad_rows
from tiny.arithmetic.reward import last_number

BATCH_SIZES = (1, 16, 64, 256)  # of `generate`
NUM_ROWS = 512  # of each data set of real works


@dataclass
class Work:
    """What both sides do. TRL's settings are read off the script's flags."""

    title: str
    script: str
    flags: dict[str, Any]  # of the script, where they are not the default ones
    skip: int = 5  # optimiser steps left out at the start
    steps: int = 50  # optimiser steps measured


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


def real_works(folder: str) -> dict[str, Work]:
    """Works on the models and the data that `make_real` has made in the folder."""
    sampling = dict(
        model=f"{folder}/policy",
        dataset=f"{folder}/prompts",
        max_prompt_length=256,
        max_new_tokens=64,
        num_minibatches=1,
        micro_batch_size=8,
    )
    pairs = dict(
        model=f"{folder}/policy",
        dataset=f"{folder}/preferences",
        max_length=512,
        batch_size=16,
        micro_batch_size=4,
    )
    return {
        "real_grpo": Work(
            "GRPO, 4 prompts x 8 samples, 64 new tokens, micro-batches of 8",
            "grpo",
            sampling
            | dict(
                prompts_per_rollout=4,
                group_size=8,
                reward_fn=["docs/experiments/rules.py:count_letters"],
            ),
            skip=2,
            steps=6,
        ),
        "real_ppo": Work(
            "PPO, 32 prompts, 64 new tokens, four steps a rollout, micro-batches of 8",
            "ppo_rlhf",
            sampling
            | dict(prompts_per_rollout=32, update_epochs=4, reward_model=f"{folder}/reward"),
            skip=4,
            steps=8,
        ),
        "real_dpo": Work(
            "DPO, 16 pairs in micro-batches of 4, reference before", "dpo", pairs, skip=2, steps=6
        ),
        "real_dpo_online": Work(
            "DPO, 16 pairs in micro-batches of 4, reference in each step",
            "dpo",
            pairs | dict(online_reference=True),
            skip=2,
            steps=6,
        ),
        "real_rm": Work(
            "reward model, 16 pairs in micro-batches of 4",
            "rm_bradley_terry",
            pairs,
            skip=2,
            steps=6,
        ),
        "real_sft": Work(
            "SFT, 16 rows in micro-batches of 4",
            "sft",
            pairs | dict(dataset=f"{folder}/sft"),
            skip=2,
            steps=6,
        ),
    }


# --- our side ----------------------------------------------------------------------------------
def make_args(work: Work) -> Any:
    """The flags of the work's script."""
    return import_module(work.script).Args(**work.flags)


def steps_per_rollout(args: Any) -> int:
    """Optimiser steps; 1 where there are no rollouts."""
    return getattr(args, "update_epochs", 1) * getattr(args, "num_minibatches", 1)


def count_rows(args: Any, steps: int) -> int:
    """The training rows that so many optimiser steps take, or all there are."""
    if hasattr(args, "total_rollouts"):
        rows = steps // steps_per_rollout(args) * args.prompts_per_rollout
    else:
        rows = steps * args.batch_size
    all_rows = len(Path(args.dataset, "train.jsonl").read_text().splitlines())
    return min(all_rows, rows)


def train_ours(work: Work, steps: int, folder: str) -> None:
    """Train with a script of this repository for some optimiser steps."""
    args = make_args(work)
    num_rows = count_rows(args, steps)
    args.output_dir = folder
    args.train_split = f"train[:{num_rows}]"
    args.eval_rows = 8
    args.eval_every = args.save_every = 10**9
    if hasattr(args, "total_rollouts"):
        args.total_rollouts = steps // steps_per_rollout(args)
    else:
        args.epochs = (steps - 0.5) * args.batch_size / num_rows
    import_module(work.script).main(args)


# --- TRL's side: the same in float32, and with activation checkpointing where ours has it ------
def train_trl(work: Work, steps: int, folder: str) -> None:
    """Train with TRL for some optimiser steps."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import load_dataset

    args = make_args(work)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = load_dataset(args.dataset, split="train").select(range(count_rows(args, steps)))
    settings = dict(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=args.activation_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to="none",
        save_strategy="no",
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=1,
        max_steps=steps,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.micro_batch_size,
    )
    if hasattr(args, "batch_size"):
        settings["gradient_accumulation_steps"] = args.batch_size // args.micro_batch_size
    make_trainer = {
        "grpo": grpo_trainer,
        "ppo_rlhf": ppo_trainer,
        "dpo": dpo_trainer,
        "rm_bradley_terry": reward_trainer,
        "sft": sft_trainer,
    }[work.script]
    make_trainer(args, settings, tokenizer, data).train()


def load_policy(args: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")


def load_classifier(source: str) -> torch.nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(source, dtype="float32", num_labels=1)


def grpo_trainer(args: Any, settings: dict, tokenizer: Any, data: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    rows_per_step = args.prompts_per_rollout * args.group_size
    config = GRPOConfig(
        **settings,
        gradient_accumulation_steps=rows_per_step // args.micro_batch_size,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        temperature=1.0,
        beta=args.beta,
        epsilon=args.clip_coef,
        loss_type="grpo",
    )
    return GRPOTrainer(
        model=load_policy(args),
        reward_funcs=count_letters if args.reward_fn else last_number,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )


def ppo_trainer(args: Any, settings: dict, tokenizer: Any, data: Any) -> Any:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    steps = settings.pop("max_steps")
    if args.num_minibatches > 1:  # with micro-batches it would take fewer optimiser steps
        settings["per_device_train_batch_size"] = args.prompts_per_rollout
    else:
        accumulation_steps = args.prompts_per_rollout // args.micro_batch_size
        settings["gradient_accumulation_steps"] = accumulation_steps
    config = PPOConfig(
        **settings,
        total_episodes=steps // steps_per_rollout(args) * args.prompts_per_rollout,
        response_length=args.max_new_tokens,
        temperature=1.0,
        stop_token="eos",
        num_sample_generations=0,
        local_rollout_forward_batch_size=64,
        num_mini_batches=args.num_minibatches,
        num_ppo_epochs=args.update_epochs,
        kl_coef=args.beta,
        vf_coef=args.vf_coef,
    )
    tokenizer.padding_side = "left"
    # Repeated, because it wants more than a batch of them.
    prompts = data.repeat(8).map(lambda row: tokenizer(row["prompt"]))
    prompts = prompts.select_columns(["input_ids"])
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=load_policy(args),
        ref_model=load_policy(args),
        reward_model=load_classifier(args.reward_model),
        value_model=load_classifier(args.reward_model),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(8)),
    )


def dpo_trainer(args: Any, settings: dict, tokenizer: Any, data: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    script = import_module("dpo")
    config = DPOConfig(
        **settings,
        beta=script.check_args(args).beta,
        max_length=args.max_length,
        precompute_ref_log_probs=not args.online_reference,
    )
    return DPOTrainer(
        model=load_policy(args),
        ref_model=load_policy(args),
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )


def reward_trainer(args: Any, settings: dict, tokenizer: Any, data: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(
        model=load_classifier(args.model),
        args=RewardConfig(**settings, max_length=args.max_length),
        train_dataset=data,
        processing_class=tokenizer,
    )


def sft_trainer(args: Any, settings: dict, tokenizer: Any, data: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=load_policy(args),
        args=SFTConfig(**settings, max_length=args.max_length),
        train_dataset=data,
        processing_class=tokenizer,
    )


# --- models and data of the real works ---------------------------------------------------------
def make_real(folder: str, source: str | None, data: str | None) -> str:
    """Write models and data of the real works to the folder; returns what they are."""
    tokenizer = AutoTokenizer.from_pretrained(source) if source else make_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    descriptions = [f"tokenizer {source or 'made here, of 50,257 words'}"]
    make_models(folder, tokenizer)

    words = one_token_words(tokenizer)
    data_sets = {}
    for file, columns in (
        ("gsm8k/train.jsonl", ("question", "answer")),
        ("gsm8k_solutions/train.jsonl", ("prompt", "chosen", "rejected")),
    ):
        if data and Path(data, file).exists():
            data_sets[file] = read_columns(Path(data, file), columns)
            descriptions.append(f"{file} from {data}")
        else:
            data_sets[file] = make_texts(words, num_columns=len(columns))
            descriptions.append(f"{file} of random words, lengths as in GSM8K")
    tasks, pairs = data_sets.values()
    write_split(f"{folder}/prompts", [dict(prompt=x, answer=y) for x, y in tasks])
    write_split(f"{folder}/sft", [dict(prompt=x, completion=f" {y}") for x, y in tasks])
    preferences = [dict(prompt=x, chosen=f" {y}", rejected=f" {z}") for x, y, z in pairs]
    write_split(f"{folder}/preferences", preferences)
    return "; ".join(descriptions)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as GPT-2 has tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {f"word{i}": i for i in range(50_256)} | {"<|endoftext|>": 50_256}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def make_models(folder: str, tokenizer: Any) -> None:
    """A policy and a reward model with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        num_labels=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(1)
    logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(f"{folder}/policy")
    tokenizer.save_pretrained(f"{folder}/policy")
    LlamaForSequenceClassification(config).save_pretrained(f"{folder}/reward")
    tokenizer.save_pretrained(f"{folder}/reward")


def one_token_words(tokenizer: Any) -> list[str]:
    """Words that are one token behind a space."""
    words = []
    length = len(tokenizer("a").input_ids) + 1
    for token in random.sample(range(len(tokenizer)), 5000):
        word = tokenizer.decode([token]).strip()
        if word.isalnum() and len(tokenizer(f"a {word}").input_ids) == length:
            words.append(word)
    return words


def make_texts(words: list[str], num_columns: int) -> list[list[str]]:
    """Rows of random words, as long as GSM8K's texts are in GPT-2's tokens: the logarithm of a
    length is normal, and medians are 52 for a prompt and 90 for a solution."""
    rows = []
    for _ in range(NUM_ROWS):
        lengths = [int(random.lognormvariate(3.95, 0.35))]
        lengths += [int(random.lognormvariate(4.5, 0.4)) for _ in range(num_columns - 1)]
        rows.append([" ".join(random.choices(words, k=length)) for length in lengths])
    return rows


def read_columns(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """The first rows of a file."""
    rows = []
    for line in path.read_text().splitlines()[:NUM_ROWS]:
        row = json.loads(line)
        rows.append([row[column] for column in columns])
    return rows


def write_split(folder: str, rows: list[dict]) -> None:
    """train.jsonl, and the last eight rows as test.jsonl."""
    Path(folder).mkdir()
    for split, split_rows in (("train", rows[:-8]), ("test", rows[-8:])):
        lines = [json.dumps(row) + "\n" for row in split_rows]
        Path(folder, f"{split}.jsonl").write_text("".join(lines))


# --- what is measured, in a process of its own -------------------------------------------------
Measurement = tuple[str, float, float]  # title, ms per step or tokens per second, peak in MB


def peak_memory() -> float:
    """The most that this process has held, in MB."""
    if sys.platform == "linux":  # whose getrusage counts the parent process too, until exec
        return resident("VmHWM") * 1e-6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1e-6


def note_steps(note: Callable[[], Any]) -> list:
    """A list that gets what `note()` gives after each optimiser step from now on."""
    notes, first_optimizer = [], None

    def hook(optimizer: Any, *_: Any) -> None:
        nonlocal first_optimizer
        if type(optimizer).__name__ != "AdamW":  # accelerate wraps it in an optimiser of its own
            return
        if first_optimizer is None:
            first_optimizer = optimizer
        if optimizer is first_optimizer:  # PPO's critic has one too
            notes.append(note())

    register_optimizer_step_post_hook(hook)
    return notes


def measure_training(train: Callable, work: Work, steps: int) -> list[Measurement]:
    """Milliseconds an optimiser step, and peak memory."""
    times = note_steps(time.perf_counter)
    total_steps = work.skip + steps
    with tempfile.TemporaryDirectory() as folder:
        train(work, total_steps, folder)
    assert len(times) == total_steps, f"{len(times)} optimiser steps instead of {total_steps}"
    seconds = times[-1] - times[work.skip - 1]
    return [(work.title, 1e3 * seconds / steps, peak_memory())]


def measure_sampling(side: str, folder: str) -> list[Measurement]:
    """Tokens a second and peak memory of each batch size, with equal and with ragged lengths."""
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/policy")
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/policy", dtype="float32").eval()
    lines = Path(folder, "prompts", "train.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    rng = torch.manual_seed(1)

    def sample(prompts: list, max_new_tokens: int, stop_ids: list[int]) -> list[list[int]]:
        if side == "ours":
            return generate(
                model,
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=1.0,
                stop_ids=stop_ids,
                rng=rng,
            )
        ids, mask = pad_rows(prompts, "cpu", left=True)
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max_new_tokens,
            eos_token_id=stop_ids or None,
            pad_token_id=tokenizer.pad_token_id,
        )
        output = model.generate(input_ids=ids, attention_mask=mask.long(), generation_config=config)
        completions = []
        for row in output[:, ids.shape[1] :].tolist():
            ends = [t for t, token in enumerate(row, start=1) if token in stop_ids]
            completions.append(row[: min(ends, default=max_new_tokens)])
        return completions

    # Every 32nd token ends a completion: under random weights after 32 tokens in the mean.
    cases = {
        "64 tokens": (64, []),
        "1 to 128 tokens": (128, list(range(0, len(tokenizer), 32))),
    }
    sample(prompts[:2], *cases["1 to 128 tokens"])  # start-up
    measurements = []
    for batch_size in BATCH_SIZES:
        for name, (max_new_tokens, stop_ids) in cases.items():
            num_batches = max(1, 16 // batch_size)
            num_tokens = 0
            start_time = time.perf_counter()
            for i in range(num_batches):
                batch = prompts[i * batch_size : (i + 1) * batch_size]
                completions = sample(batch, max_new_tokens, stop_ids)
                num_tokens += sum(len(completion) for completion in completions)
            seconds = time.perf_counter() - start_time
            title = f"`generate`, batch of {batch_size}, {name}"
            measurements.append((title, num_tokens / seconds, peak_memory()))
    return measurements


@dataclass
class Layout:
    """What a tensor is like, without its numbers."""

    shape: tuple
    strides: tuple
    dtype: torch.dtype

    def ones(self) -> torch.Tensor:
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        storage = torch.ones(last + 1, dtype=self.dtype)
        return storage.as_strided(self.shape, self.strides)


class CallRecorder(TorchDispatchMode):
    """Counts the matrix products and attentions, by operator and layouts of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()
        self.calls = {}  # operator, arguments and keyword arguments, by the keys of counts

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if re.search("mm|attention", operator.overloadpacket.__name__):
            arguments = tree_map_only(
                torch.Tensor, lambda x: Layout(x.shape, x.stride(), x.dtype), (args, kwargs)
            )
            key = (operator, repr(arguments))
            self.counts[key] += 1
            self.calls[key] = (operator, *arguments)
        return operator(*args, **kwargs)

    def seconds(self, key: tuple) -> float:
        """Median time of a call that is repeated by itself."""
        operator, layouts, keyword_layouts = self.calls[key]
        args, kwargs = tree_map_only(Layout, Layout.ones, (layouts, keyword_layouts))
        times = []
        while len(times) < 3 or (len(times) < 30 and sum(times) < 0.3):
            start_time = time.perf_counter()
            operator(*args, **kwargs)
            times.append(time.perf_counter() - start_time)
        return statistics.median(times)


def measure_floor(work: Work, steps: int) -> str:
    """Time of a measured step's matrix products and attention, each repeated by itself."""
    recorder = CallRecorder()
    counts_after_steps = note_steps(recorder.counts.copy)
    with tempfile.TemporaryDirectory() as folder, recorder:
        train_ours(work, work.skip + steps, folder)
    counts = counts_after_steps[-1] - counts_after_steps[work.skip - 1]
    seconds = sum(count * recorder.seconds(key) for key, count in counts.items())
    return f"{1e3 * seconds / steps:.0f} ms per step in {counts.total() / steps:.0f} calls"


def profile(work: Work, steps: int) -> str:
    """The stages of a rollout in ms, and the shares of the operators that take most."""
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        train_ours(work, steps, folder)
        (log,) = Path(folder).glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()[2:]]
    for metric in rows[0]:
        stage = re.fullmatch(r"time/(\w+)_seconds", metric)
        if stage:
            seconds = statistics.median(row[metric] for row in rows)
            shares.append(f"{stage[1]} {1e3 * seconds:.0f} ms")
    with (
        tempfile.TemporaryDirectory() as folder,
        torch_profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        train_ours(work, steps, folder)
    operators = profiler.key_averages()
    total = sum(operator.self_cpu_time_total for operator in operators)
    slowest = sorted(operators, key=lambda operator: -operator.self_cpu_time_total)[:5]
    shares += [f"{op.key} {op.self_cpu_time_total / total:.0%}" for op in slowest]
    return ", ".join(shares)


def measure(name: str, side: str, steps: int | None, folder: str, checkpointing: bool) -> Any:
    """What a process of its own finds out."""
    if name == "generate":
        return measure_sampling(side, folder)
    work = (TINY | real_works(folder))[name]
    if checkpointing:
        work.flags = work.flags | {"activation_checkpointing": True}
    if side == "floor":
        return measure_floor(work, steps or work.steps)
    if side == "profile":
        return profile(work, steps or (16 if name in TINY else 8))
    train = {"ours": train_ours, "trl": train_trl}[side]
    return measure_training(train, work, steps or work.steps)


# --- the tables --------------------------------------------------------------------------------
def table_row(ours: list[Measurement], theirs: list[Measurement], is_rate: bool) -> str:
    """Medians over the repeats (least to most), and those of the ratios within each turn."""
    title = ours[0][0]
    our_speeds, their_speeds = [run[1] for run in ours], [run[1] for run in theirs]
    our_peaks, their_peaks = [run[2] for run in ours], [run[2] for run in theirs]
    speed_ratios = ratios(their_speeds, our_speeds)
    if is_rate:  # more is better
        speed_ratios = ratios(our_speeds, their_speeds)
    cells = [
        title,
        spread(our_speeds, 0, statistics.median),
        spread(their_speeds, 0, statistics.median),
        spread(speed_ratios, 2, statistics.median),
        spread(our_peaks, 0, statistics.median),
        spread(their_peaks, 0, statistics.median),
        spread(ratios(their_peaks, our_peaks), 2, statistics.median),
    ]
    return f"| {' | '.join(cells)} |"


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    return [x / y for x, y in zip(numerators, denominators, strict=True)]


def print_heading(their_name: str, unit: str) -> None:
    print(
        f"| workload | ours, {unit} | {their_name}, {unit} | ratio "
        f"| ours, peak MB | {their_name}, peak MB | ratio |\n|{'---|' * 7}"
    )


def main() -> None:
    works = TINY | real_works("")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="+", choices=[*works, "generate"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help="optimiser steps measured (PPO: 4, 8...)")
    parser.add_argument("--tokenizer", help="folder or hub name, for the real works")
    parser.add_argument("--data", help="folder with the texts of the real works")
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--medium", action="store_true", help="float32 matmul precision, of both")
    parser.add_argument("--activation-checkpointing", action="store_true", help="of both sides")
    sides = ["ours", "trl", "floor", "profile"]
    parser.add_argument("--side", choices=sides, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:  # in a process of its own
        if args.medium:
            torch.set_float32_matmul_precision("medium")
        work, checkpointing = args.works[0], args.activation_checkpointing
        print(json.dumps(measure(work, args.side, args.steps, args.folder, checkpointing)))
        return
    if (args.floor or args.profile) and "generate" in args.works:
        parser.error("--floor and --profile are of training")
    if args.data and not (args.tokenizer and Path(args.data).is_dir()):
        parser.error("--data needs a --tokenizer, and to be a folder")

    print(f"processor: {processor_name()}", end="\n\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if any(name not in TINY for name in args.works):
            print(make_real(folder, args.tokenizer, args.data), end="\n\n", flush=True)
        printed_unit = None
        for name in args.works:
            if args.floor:
                floor = run_side(args, name, "floor", folder)
                print(f"{works[name].title}: {floor}", flush=True)
                continue
            if args.profile:
                shares = run_side(args, name, "profile", folder)
                print(f"{works[name].title}: {shares}", flush=True)
                continue
            our_runs, their_runs = [], []
            for _ in range(args.repeats):
                our_runs.append(run_side(args, name, "ours", folder))
                their_runs.append(run_side(args, name, "trl", folder))
            is_rate = name == "generate"
            their_name, unit = "TRL", "ms per step"
            if is_rate:
                their_name, unit = "transformers", "tokens per second"
            if unit != printed_unit:
                printed_unit = unit
                print_heading(their_name, unit)
            for row in range(len(our_runs[0])):
                ours = [measurements[row] for measurements in our_runs]
                theirs = [measurements[row] for measurements in their_runs]
                print(table_row(ours, theirs, is_rate), flush=True)


def processor_name() -> str:
    """As the system calls it, and whether it has AMX, on which ratios depend."""
    words = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    names = re.findall(r"model name\s*: (.*)", words)
    return (names or ["unknown"])[0] + (", AMX" if "amx_tile" in words else "")


def run_side(args: argparse.Namespace, name: str, side: str, folder: str) -> Any:
    """What `measure` returns, in a process of its own."""
    command = [__file__, name, "--side", side, "--folder", folder]
    if args.steps:
        command += ["--steps", str(args.steps)]
    if args.medium:
        command += ["--medium"]
    if args.activation_checkpointing:
        command += ["--activation-checkpointing"]
    return run_for_json(command)


if __name__ == "__main__":
    main()
