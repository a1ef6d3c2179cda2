"""What several processes send to each other and hold, and how long a pass takes.

    torchrun --nproc_per_node=2 docs/experiments/processes.py

Each process passes rows of its own through one random model, sharded as the scripts do it. Bytes
are those of the whole tensors that are gathered, or scattered, for each parameter; of N processes
each receives, or sends, (N - 1) / N of them.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo
from common.generation import RANK, WORLD_SIZE, unsharded
from common.logprobs import completion_logprobs


class Count(TorchDispatchMode):
    """Adds up the bytes of the whole tensors that are gathered or scattered, and the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"gathered": 0, "scattered": 0}
        self.calls = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if name.startswith(("c10d::", "_c10d_functional::")):
            if "all_gather_into_tensor" in name:
                self.bytes["gathered"] += result.numel() * result.element_size()
                self.calls += 1
            elif "allgather_base" in name:
                self.bytes["gathered"] += args[0].numel() * args[0].element_size()
                self.calls += 1
            elif "reduce_scatter" in name:
                self.bytes["scattered"] += args[1].numel() * args[1].element_size()
                self.calls += 1
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="of all processes together")
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()
    _, device = grpo.start_run(grpo.Args(output_dir=tempfile.mkdtemp()))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1_000,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
    )
    model = grpo.shard(LlamaForCausalLM(config).eval(), device)
    count = model.num_parameters()
    held = sum(
        weight.to_local().numel() if WORLD_SIZE > 1 else weight.numel()
        for weight in model.parameters()
    )
    print(f"{WORLD_SIZE} x {device.type}: {count:,} parameters, {held / count:.0%} here")
    pairs = [(row[:1], row[1:]) for row in torch.randint(1_000, (args.rows, args.length)).tolist()]

    def forward() -> torch.Tensor:
        return completion_logprobs(model, pairs, range(RANK, args.rows, WORLD_SIZE))

    def score() -> None:
        with torch.no_grad():
            forward()

    def train() -> None:
        forward().sum().backward()
        model.zero_grad()

    def gather() -> None:
        with unsharded(model):
            pass

    def measure(name: str, run: Callable[[], None]) -> None:
        run()
        with Count() as counted:
            run()
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        sent = {name: number / count for name, number in counted.bytes.items()}
        print(
            f"{name:<42}{sent['gathered']:>6.2f} gathered {sent['scattered']:>6.2f} scattered, "
            f"bytes a parameter in {counted.calls} calls; {statistics.median(seconds):.3f} s"
        )

    measure("gathering the weights for a rollout", gather)
    measure("log-probs of a micro-batch", score)
    measure("forward and backward of a micro-batch", train)
    if WORLD_SIZE > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
