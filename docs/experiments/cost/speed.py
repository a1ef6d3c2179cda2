"""Seconds an optimiser step takes, and the memory, in these scripts and in TRL, on the same work.

    pip install -e ".[bench]"
    python -m docs.experiments speed grpo dpo rm sft --tokenizer openai-community/gpt2 --data FOLDER
    pip install "trl==1.12.0"                    # the last release that has a PPO trainer
    python -m docs.experiments speed ppo
    python -m docs.experiments speed grpo dpo sft --activation-checkpointing     # on both sides
    python -m docs.experiments speed grpo ppo dpo rm sft --floor                 # without TRL

The model is a Llama of 20M parameters with random weights. FOLDER holds gsm8k/train.jsonl
(`question`, `answer`) and gsm8k_solutions/train.jsonl (`prompt`, a right solution as `chosen`, a
wrong one as `rejected`), both from github.com/openai/grade-school-math. Where a file is absent
random words of the same lengths stand in, and without --tokenizer one of 50,257 words; the output
says so.

Both sides train the same checkpoint on the same rows with the same batch, micro-batch, lengths,
optimiser and number of optimiser steps, in processes that take turns. The clock is the same too: a
hook after each step of any torch optimiser. Start-up, the first steps and evaluations lie outside.
Memory is the highest of the whole process, libraries and evaluations included. Output: rows of a
table in Markdown. `--floor` records the matrix products and attentions of our steps, and says how
long a step's take when each is repeated by itself: no step that computes them can be faster.
"""

import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    logging,
    set_seed,
)

from docs.experiments.lib.measuring import in_own_process, resident
from docs.experiments.lib.runs import read_jsonl, write_jsonl
from docs.experiments.lib.tables import spread
from docs.experiments.rules import count_letters

NUM_ROWS = 512  # of each data set


class Work(NamedTuple):
    """What both sides do. TRL's settings are read off the script's flags."""

    title: str
    script: str
    flags: dict[str, Any]  # of the script, where they are not the default ones
    skip: int = 2  # optimiser steps left out at the start
    steps: int = 6  # optimiser steps measured


def works_in(folder: str) -> dict[str, Work]:
    """Works on the models and the data that `make_inputs` has made in the folder."""
    sampling = dict(
        model=f"{folder}/policy",
        dataset=f"{folder}/prompts",
        max_prompt_length=256,
        max_new_tokens=64,
        num_minibatches=1,
        micro_batch_size=8,
    )
    grpo = sampling | dict(
        prompts_per_rollout=4,
        group_size=8,
        reward_fn=["docs/experiments/rules.py:count_letters"],
    )
    ppo = sampling | dict(prompts_per_rollout=32, update_epochs=4, reward_model=f"{folder}/reward")
    pairs = dict(
        model=f"{folder}/policy",
        dataset=f"{folder}/preferences",
        max_length=512,
        batch_size=16,
        micro_batch_size=4,
    )
    rows = pairs | dict(dataset=f"{folder}/sft")
    pairs_title = "16 pairs in micro-batches of 4"
    return {
        "grpo": Work(
            "GRPO, 4 prompts x 8 samples, 64 new tokens, micro-batches of 8", "grpo", grpo
        ),
        "ppo": Work("PPO, 32 prompts, 64 new tokens, four steps a rollout", "ppo_rlhf", ppo, 4, 8),
        "dpo": Work(f"DPO, {pairs_title}", "dpo", pairs),
        "rm": Work(f"reward model, {pairs_title}", "rm_bradley_terry", pairs),
        "sft": Work("SFT, 16 rows in micro-batches of 4", "sft", rows),
    }


# --- our side ----------------------------------------------------------------------------------
def steps_per_rollout(args: Any) -> int:
    """Optimiser steps; 1 where there are no rollouts."""
    return getattr(args, "update_epochs", 1) * getattr(args, "num_minibatches", 1)


def count_rows(args: Any, steps: int) -> int:
    """The training rows that so many optimiser steps take, or all there are."""
    if hasattr(args, "total_rollouts"):
        rows = steps // steps_per_rollout(args) * args.prompts_per_rollout
    else:
        rows = steps * args.batch_size
    return min(rows, len(read_jsonl(Path(args.dataset, "train.jsonl"))))


def train_ours(work: Work, steps: int, folder: str) -> None:
    """Train with a script of this repository for some optimiser steps."""
    args = import_module(work.script).Args(**work.flags)
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

    args = import_module(work.script).Args(**work.flags)
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
        reward_funcs=count_letters,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )


def ppo_trainer(args: Any, settings: dict, tokenizer: Any, data: Any) -> Any:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    steps = settings.pop("max_steps")
    config = PPOConfig(
        **settings,
        gradient_accumulation_steps=args.prompts_per_rollout // args.micro_batch_size,
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

    return DPOTrainer(
        model=load_policy(args),
        ref_model=load_policy(args),
        args=DPOConfig(**settings, beta=args.beta, max_length=args.max_length),
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


# --- models and data ---------------------------------------------------------------------------
def make_inputs(folder: str, source: str | None, data: str | None) -> str:
    """Write models and data to the folder; returns what they are."""
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


def read_columns(path: Path, columns: tuple[str, ...]) -> list[list[str]]:
    """The first rows of a file."""
    return [[row[column] for column in columns] for row in read_jsonl(path)[:NUM_ROWS]]


def write_split(folder: str, rows: list[dict]) -> None:
    """train.jsonl, and the last eight rows as test.jsonl."""
    Path(folder).mkdir()
    write_jsonl(Path(folder, "train.jsonl"), rows[:-8])
    write_jsonl(Path(folder, "test.jsonl"), rows[-8:])


# --- what is measured, in a process of its own -------------------------------------------------
class Measurement(NamedTuple):
    seconds: float  # per step
    peak: float  # bytes, of the whole process


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


def measure(train: Callable, work: Work) -> Measurement:
    times = note_steps(time.perf_counter)
    total_steps = work.skip + work.steps
    with tempfile.TemporaryDirectory() as folder:
        train(work, total_steps, folder)
    assert len(times) == total_steps, f"{len(times)} optimiser steps instead of {total_steps}"
    seconds = times[-1] - times[work.skip - 1]
    return Measurement(seconds / work.steps, resident("VmHWM"))


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


def measure_floor(work: Work) -> str:
    """Time of a measured step's matrix products and attention, each repeated by itself."""
    recorder = CallRecorder()
    counts_after_steps = note_steps(recorder.counts.copy)
    with tempfile.TemporaryDirectory() as folder, recorder:
        train_ours(work, work.skip + work.steps, folder)
    counts = counts_after_steps[-1] - counts_after_steps[work.skip - 1]
    seconds = sum(count * recorder.seconds(key) for key, count in counts.items())
    calls = counts.total() / work.steps
    return f"{work.title}: {1e3 * seconds / work.steps:.0f} ms per step in {calls:.0f} calls"


# --- the table ---------------------------------------------------------------------------------
COLUMNS = ("workload", "ours, ms per step", "TRL, ms per step", "ratio")
COLUMNS += ("ours, peak MB", "TRL, peak MB", "ratio")


def table_row(title: str, ours: list[Measurement], theirs: list[Measurement]) -> str:
    """Medians over the repeats (least to most), and those of the ratios within each turn."""
    cells = [title]
    for quantity, unit in (("seconds", 1e-3), ("peak", 1e6)):
        our_values = [getattr(run, quantity) / unit for run in ours]
        their_values = [getattr(run, quantity) / unit for run in theirs]
        ratios = [theirs / ours for theirs, ours in zip(their_values, our_values, strict=True)]
        cells += [spread(values, 0, statistics.median) for values in (our_values, their_values)]
        cells.append(spread(ratios, 2, statistics.median))
    return f"| {' | '.join(cells)} |"


def processor_name() -> str:
    """As the system calls it, and whether it has AMX, on which ratios depend."""
    words = Path("/proc/cpuinfo").read_text()
    (name, *_) = re.findall(r"model name\s*: (.*)", words)
    return name + (", AMX" if "amx_tile" in words else "")


def main(
    works: tyro.conf.Positional[tuple[str, ...]],
    repeats: int = 5,
    steps: int | None = None,
    tokenizer: str | None = None,
    data: str | None = None,
    floor: bool = False,
    activation_checkpointing: bool = False,
) -> None:
    """Compare the speed and memory of works.

    Args:
        works: grpo, ppo, dpo, rm, sft
        repeats: turns of each side
        steps: optimiser steps measured (PPO: 4, 8...)
        tokenizer: folder or hub name
        data: folder with the texts
        floor: measure the matrix products of our side alone
        activation_checkpointing: on both sides
    """
    print(f"processor: {processor_name()}")
    with tempfile.TemporaryDirectory() as folder:
        print(make_inputs(folder, tokenizer, data))
        print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        for name in works:
            work = works_in(folder)[name]
            work.flags["activation_checkpointing"] = activation_checkpointing
            work = work._replace(steps=steps or work.steps)
            if floor:
                print(in_own_process(measure_floor, work), flush=True)
                continue
            ours, theirs = [], []
            for _ in range(repeats):
                ours.append(in_own_process(measure, train_ours, work))
                theirs.append(in_own_process(measure, train_trl, work))
            print(table_row(work.title, ours, theirs), flush=True)
