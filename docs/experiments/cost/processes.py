"""What several processes send to each other.

    torchrun --nproc_per_node=2 -m docs.experiments processes

Each process passes rows of its own through one random model, sharded as the scripts do it. Bytes
are those of the whole tensors that are gathered, or scattered, for each parameter; of N processes
each receives, or sends, (N - 1) / N of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.distributed import RANK, WORLD_SIZE, join_processes, leave_processes, shard, unsharded
from common.logprobs import completion_logprobs
from docs.experiments.lib.measuring import random_llama

VOCABULARY = 1_000
ROWS, LENGTH = 16, 128  # of all processes together


class TransferCounter(TorchDispatchMode):
    """Adds up the bytes of the whole tensors that are gathered or scattered."""

    gathered_bytes = scattered_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if "all_gather_into_tensor" in name:
            self.gathered_bytes += result.nbytes
        elif "allgather_base" in name:
            self.gathered_bytes += args[0].nbytes
        elif "reduce_scatter" in name:
            self.scattered_bytes += args[1].nbytes
        return result


def main() -> None:
    device = join_processes()
    model = random_llama(
        device="cpu",
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1_536,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    model = shard(model, device)
    num_parameters = model.num_parameters()
    print(f"{WORLD_SIZE} x {device.type}: {num_parameters:,} parameters")
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH)).tolist()
    sequences = [(row[:1], row[1:]) for row in ids]

    def logprobs() -> torch.Tensor:
        return completion_logprobs(model, sequences, range(RANK, ROWS, WORLD_SIZE))

    def gather() -> None:
        with unsharded(model):
            pass

    @torch.no_grad()
    def score() -> None:
        logprobs()

    def train() -> None:
        logprobs().sum().backward()
        model.zero_grad()

    def measure(name: str, function: Callable[[], None]) -> None:
        function()
        with TransferCounter() as counter:
            function()
        gathered = counter.gathered_bytes / num_parameters
        scattered = counter.scattered_bytes / num_parameters
        print(f"{name:<42}{gathered:>6.2f} gathered {scattered:>6.2f} scattered, bytes a parameter")

    measure("gathering the weights for a rollout", gather)
    measure("log-probs of a micro-batch", score)
    measure("forward and backward of a micro-batch", train)
    leave_processes()
