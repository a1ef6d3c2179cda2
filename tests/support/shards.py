"""Runs on several processes, one after the other: `shards.py '["sft.py", "--seed", "1"]' ...`.

In each, weights are divided, and whole while it samples.
"""

import json
import runpy
import sys

from runs import keep_earlier_checkpoints
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import common.generation
import runtime.model
import runtime.processes


def watch():
    shard, decode = runtime.model.shard, common.generation.decode

    def checked_shard(model, device):
        whole = sum(weight.numel() for weight in model.parameters())
        sharded = shard(model, device)
        weights = [*sharded.parameters()]
        assert all(isinstance(weight, DTensor) for weight in weights)
        # A weight that cannot be divided evenly leaves the first processes one row more.
        most = sum(weight.shape[1:].numel() for weight in weights)
        own = sum(weight.to_local().numel() for weight in weights)
        assert abs(own - whole / runtime.processes.WORLD_SIZE) <= most
        units = {name for name, part in sharded.named_modules() if isinstance(part, FSDPModule)}
        heads = {name for name, _ in model.named_children()} & {"score", "value_head"}
        roots = {"model", *heads} if heads else {""}
        num_layers = model.config.num_hidden_layers if hasattr(model, "config") else 0
        assert units == roots | {f"model.layers.{i}" for i in range(num_layers)}
        return sharded

    def checked_decode(model, *arguments):
        assert not any(isinstance(weight, DTensor) for weight in model.parameters())
        units = [part for part in model.modules() if isinstance(part, FSDPModule)]
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in units)
        return decode(model, *arguments)

    runtime.model.shard, common.generation.decode = checked_shard, checked_decode


def run_in_turn(commands):
    """The processes join before the first run and part after the last."""
    device, leave = runtime.processes.join_processes(), runtime.processes.leave_processes
    runtime.processes.join_processes = lambda: device
    runtime.processes.leave_processes = lambda: None
    for command in commands:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
    leave()


if __name__ == "__main__":
    watch()
    with keep_earlier_checkpoints():
        run_in_turn([json.loads(command) for command in sys.argv[1:]])
