"""What several processes send to each other and hold, and how long a pass takes.

    torchrun --nproc_per_node=2 docs/experiments/processes.py

Each process passes rows of its own through one random model, sharded as the scripts do it. Bytes
are those of the whole tensors that are gathered, or scattered, for each parameter; of N processes
each receives, or sends, (N - 1) / N of them.
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from measuring import median_seconds, random_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

import grpo
from common.generation import RANK, WORLD_SIZE, shard, unsharded
from common.logprobs import completion_logprobs


class TransferCounter(TorchDispatchMode):
    """Adds up the bytes of the whole tensors that are gathered or scattered, and the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered_bytes = 0
        self.scattered_bytes = 0
        self.calls = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if name.startswith(("c10d::", "_c10d_functional::")):
            if "all_gather_into_tensor" in name:
                self.gathered_bytes += result.numel() * result.element_size()
                self.calls += 1
            elif "allgather_base" in name:
                self.gathered_bytes += args[0].numel() * args[0].element_size()
                self.calls += 1
            elif "reduce_scatter" in name:
                self.scattered_bytes += args[1].numel() * args[1].element_size()
                self.calls += 1
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="of all processes together")
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()
    _, device, _ = grpo.start_run(grpo.Args(output_dir=tempfile.mkdtemp()))
    config = LlamaConfig(
        vocab_size=1_000,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
    )
    model = shard(random_model(config), device)
    num_parameters = model.num_parameters()
    weights = list(model.parameters())
    if WORLD_SIZE > 1:
        weights = [weight.to_local() for weight in weights]
    held = sum(weight.numel() for weight in weights) / num_parameters
    print(f"{WORLD_SIZE} x {device.type}: {num_parameters:,} parameters, {held:.0%} here")
    ids = torch.randint(1_000, (args.rows, args.length)).tolist()
    sequences = [(row[:1], row[1:]) for row in ids]

    def logprobs() -> torch.Tensor:
        return completion_logprobs(model, sequences, range(RANK, args.rows, WORLD_SIZE))

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
        seconds = median_seconds(function, repeats=5)
        print(
            f"{name:<42}{gathered:>6.2f} gathered {scattered:>6.2f} scattered, "
            f"bytes a parameter in {counter.calls} calls; {seconds:.3f} s"
        )

    measure("gathering the weights for a rollout", gather)
    measure("log-probs of a micro-batch", score)
    measure("forward and backward of a micro-batch", train)
    if WORLD_SIZE > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
