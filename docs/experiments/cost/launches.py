"""Kernel launches, and the waits of the processor for the device, counted without a GPU.

    pip install -e ".[bench]"
    python -m docs.experiments launches

A GPU runs kernels one after another while Python launches the next ones ahead of it. Small kernels
run faster than Python launches them, so their number decides the time; and where Python waits for
the device, to read a value or to copy something there, it is ahead of nothing. Both are counted on
a device made of CPU memory (tests/support/simulated_gpu.py), so they have no noise. An operation of
PyTorch counts as one launch unless it is a view; on a GPU some are several kernels. Everything is
in float32; under bfloat16 autocast casts are added on both sides.
"""

import contextlib
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common.generation
from common.generation import generate
from common.logprobs import add_adapters, completion_logprobs
from docs.experiments.cost.speed import Work, train_ours, train_trl
from docs.experiments.lib.measuring import (
    SCRIPTS,
    noted_steps,
    quietly,
    random_llama,
    two_steps,
)

ROOT = Path(__file__).parents[3]
OUR_FOLDERS = (ROOT, ROOT / "common")
sys.path.append(str(ROOT / "tests/support"))

import simulated_graph  # noqa: E402
from simulated_gpu import SIM, SimTensor, SimulatedGPU  # noqa: E402

NO_KERNEL = "empty empty_like empty_strided new_empty _unsafe_view detach alias".split()
# Operations that hand a value, or a shape that depends on values, to the processor.
READS = "_local_scalar_dense nonzero masked_select equal is_nonzero _unique2 unique_dim".split()
READS += ["unique_consecutive", "lift_fresh"]  # the last ends `torch.tensor(..., device=device)`


class LaunchCounter(TorchDispatchMode):
    """Counts launches by operation, on `SIM` or any device, and keeps our frames of each wait."""

    def __init__(self, any_device: bool = False) -> None:
        super().__init__()
        self.any_device = any_device
        self.launches = Counter()
        self.waits = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs, output))
        if self.any_device or any(isinstance(leaf, SimTensor) for leaf in leaves):
            if not function.is_view and name not in NO_KERNEL:
                self.launches[name] += 1
            if is_wait(name, args, kwargs, output):
                self.note_wait()
        return output

    def note_wait(self) -> None:
        frames = traceback.extract_stack()
        ours = [frame for frame in frames if Path(frame.filename).parent in OUR_FOLDERS]
        self.waits.append(ours)


def is_wait(name: str, args: tuple, kwargs: dict, output: Any) -> bool:
    """Whether the processor waits: it reads a value, or copies without `non_blocking`."""
    if name in READS:
        return True
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [index for index in args[1] if index is not None]
        return any(index.dtype == torch.bool or index.device.type == "cpu" for index in indices)
    if name == "_to_copy":
        is_moved = args[0].device.type != output.device.type
        return is_moved and not (kwargs.get("non_blocking") and output.device.type != "cpu")
    if name == "copy_":
        is_moved = args[0].device.type != args[1].device.type and args[1].dim() > 0
        return is_moved and args[2:] != (True,)
    return False


@contextlib.contextmanager
def counted() -> Iterator[LaunchCounter]:
    """Counts what runs within it; tensors of `SIM` can be made there."""
    counter = LaunchCounter()
    to_list = SimTensor.tolist

    def tolist(tensor: Tensor) -> list:
        counter.note_wait()
        return to_list(tensor)

    with SimulatedGPU(), counter, patch.object(SimTensor, "tolist", tolist):
        yield counter


# --- generate and log-probs --------------------------------------------------------------------
def make_model(vocabulary: int = 151_936, lora_rank: int = 0) -> torch.nn.Module:
    """A Llama of four layers, by default with Qwen2.5's vocabulary, on the simulated device."""
    model = random_llama(
        device="cpu",
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4_096,
    )
    add_adapters(model, lora_rank, seed=1)
    with SimulatedGPU():
        model.to(SIM)
        generate_ours(model, 2)  # what is tried once: the cache, and below the head
        logprobs_ours(model, [([5], [6])] * 4)
    model.zero_grad()
    return model


PROMPTS = [[5] * 10] * 4 + [[7] * 8] * 4


def generate_ours(model: Any, num_tokens: int) -> None:
    generate(
        model,
        PROMPTS,
        max_new_tokens=num_tokens,
        temperature=1.0,
        stop_ids=[1],
        rng=torch.Generator().manual_seed(1),
    )


def generate_theirs(model: Any, num_tokens: int) -> None:
    rows = [[0] * (10 - len(prompt)) + prompt for prompt in PROMPTS]
    ids = torch.tensor(rows, device=SIM)
    model.generate(
        input_ids=ids,
        attention_mask=(ids > 0).long(),
        max_new_tokens=num_tokens,
        do_sample=True,
        top_k=0,
        eos_token_id=1,
        pad_token_id=0,
    )


def per_token(function: Callable[[Any, int], None], model: Any) -> tuple[float, float]:
    """Launches and waits of one more token: the difference of 24 and 8, divided by 16."""
    launches, waits = [], []
    for num_tokens in (8, 24):
        with counted() as counter:
            function(model, num_tokens)
        launches.append(counter.launches.total())
        waits.append(len(counter.waits))
    return (launches[1] - launches[0]) / 16, (waits[1] - waits[0]) / 16


def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A simulated graph, whose replay is one launch."""
    replay_step = simulated_graph.capture(step)

    def replay() -> Tensor:
        counter = torch.utils._python_dispatch._get_current_dispatch_mode()
        before = counter.launches.copy()
        output = replay_step()
        counter.launches = before + Counter(["replay"])
        return output

    return replay


def per_token_of_graph(model: Any) -> tuple[float, float]:
    with (
        patch.object(common.generation, "GRAPH_DEVICES", ("sim",)),
        patch.object(common.generation, "capture", capture),
    ):
        return per_token(generate_ours, model)


def logprobs_ours(model: Any, sequences: list) -> None:
    logprobs, entropies = completion_logprobs(model, sequences, range(4), entropy=True)
    (logprobs.sum() + entropies.sum()).backward()


def completion_logits(model: Any, sequences: list) -> tuple[Tensor, Tensor]:
    """The logits and the ids of the completions' tokens."""
    rows = [prompt + completion for prompt, completion in sequences]
    ids = torch.tensor(rows).to(SIM, non_blocking=True)
    start = len(sequences[0][0])
    logits = model(input_ids=ids, use_cache=False).logits[:, start - 1 : -1]
    return logits, ids[:, start:]


def logprobs_plain(model: Any, sequences: list) -> None:
    """All logits, their log-softmax, the tokens' log-probs and the entropies."""
    logits, ids = completion_logits(model, sequences)
    log_p = logits.log_softmax(dim=-1)
    logprobs = log_p.gather(2, ids[:, :, None])
    (logprobs.sum() - (log_p.exp() * log_p).sum()).backward()


def logprobs_trl(model: Any, sequences: list) -> None:
    """TRL's functions of GRPO: the tokens' log-probs, and their entropies without a gradient."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits, ids = completion_logits(model, sequences)
    selective_log_softmax(logits, ids).sum().backward()
    entropy_from_logits(logits.detach())


def count_logprobs(
    function: Callable[[Any, list], None], model: Any, num_tokens: int
) -> LaunchCounter:
    """Forward and backward pass of four rows that have so many completion tokens in all."""
    sequences = [([5] * 10, [6] * (num_tokens // 4))] * 4
    with counted() as counter:
        function(model, sequences)
        model.zero_grad()
    return counter


# --- the scripts -------------------------------------------------------------------------------
def count_script(name: str) -> tuple[int, int, LaunchCounter]:
    """Launches and waits from the first to the second optimiser step of a run, and all of them."""
    script = import_module(name)
    flags = two_steps(script, micro_batch_size=4)
    if hasattr(script, "generate"):
        flags["max_new_tokens"] = 8
    with (
        tempfile.TemporaryDirectory() as folder,
        counted() as counter,
        noted_steps(lambda: (counter.launches.total(), len(counter.waits))) as notes,
        patch.object(script, "join_processes", lambda: SIM),
    ):
        quietly(script.main, script.Args(output_dir=folder, **flags))
    (launches, waits), (more_launches, more_waits) = notes
    return more_launches - launches, more_waits - waits, counter


# --- whole steps beside TRL, which does not know the simulated device --------------------------
ROWS = dict(batch_size=16, micro_batch_size=4)
SAMPLES = dict(prompts_per_rollout=4, group_size=8, num_minibatches=1, max_new_tokens=8)
WORKS = (
    Work("SFT, 16 rows in micro-batches of 4", "sft", 16, ROWS),
    Work("reward model, 16 pairs in micro-batches of 4", "rm_bradley_terry", 16, ROWS),
    Work("DPO, 16 pairs in micro-batches of 4", "dpo", 16, ROWS),
    Work("GRPO, 4 prompts x 8 samples", "grpo", 4, SAMPLES | {"micro_batch_size": 8}),
)


def count_step(train: Callable, work: Work) -> int:
    """Operations from one optimiser step to the next, on the CPU, AdamW's included."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LaunchCounter(any_device=True) as counter,
        noted_steps(counter.launches.total) as totals,
    ):
        quietly(train, work, 3 * work.rows_per_step, folder)
    return totals[-1] - totals[-2]


def main() -> None:
    model, adapted = make_model(), make_model(lora_rank=16)
    print("| a token of | launches | waits |\n|---|---|---|")
    for name, (launches, waits) in {
        "generate, graph": per_token_of_graph(model),
        "generate, growing cache": per_token(generate_ours, model),
        "model.generate": per_token(generate_theirs, model),
        "generate, growing cache, adapters": per_token(generate_ours, adapted),
    }.items():
        print(f"| `{name}` | {launches:.1f} | {waits:.2f} |")

    print("\n| micro-batch, forward and backward | launches | waits |\n|---|---|---|")
    for name, counter in {
        "log-softmax of all logits": count_logprobs(logprobs_plain, model, 256),
        "TRL, 1,024 tokens": count_logprobs(logprobs_trl, model, 1_024),
        "`completion_logprobs`, one chunk": count_logprobs(logprobs_ours, model, 256),
        "8,192 tokens": count_logprobs(logprobs_ours, model, 8_192),
        "one chunk, adapters": count_logprobs(logprobs_ours, adapted, 256),
    }.items():
        print(f"| {name} | {counter.launches.total():,} | {len(counter.waits)} |")

    print("\n| script | launches per step | waits |\n|---|---|---|")
    for name in SCRIPTS:
        launches, waits, _ = count_script(name)
        print(f"| `{name}.py` | {launches:,} | {waits} |", flush=True)

    print("\n| step, on the CPU | ours | TRL |\n|---|---|---|")
    for work in WORKS:
        ours, theirs = (count_step(train, work) for train in (train_ours, train_trl))
        print(f"| {work.title} | {ours:,} | {theirs:,} |", flush=True)
