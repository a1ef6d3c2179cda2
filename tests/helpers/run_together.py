"""Run scripts one after the other under torchrun: `run_together.py FILE` with a JSON list of
[script, flags, step]; a step that is not null is that of the checkpoint after which the run stops.
With the word `bfloat16` behind it they compute and cache as on a GPU.

One process for several runs saves the time that it takes to import PyTorch and transformers.
"""

import contextlib
import importlib
import json
import os
import sys
import weakref

import pytest
import torch
from gpu_types import take_gpu_types
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import common.generation


class StoppedError(Exception):
    pass


def ignore(**options):
    pass


def watch(script, step):
    """Check what every run must do, and let one stop after the checkpoint of a step."""
    size = int(os.environ["WORLD_SIZE"])
    shard, save_checkpoint, log = script.shard, script.save_checkpoint, script.log
    decode = common.generation.decode
    models = weakref.WeakSet()

    def checked_shard(model, device):
        whole = sum(weight.numel() for weight in model.parameters())
        sharded = shard(model, device)
        weights = list(sharded.parameters())
        assert all(isinstance(weight, DTensor) for weight in weights)
        # A weight that cannot be divided evenly leaves the first processes one row more.
        most = sum(weight.shape[1:].numel() for weight in weights)
        assert abs(sum(weight.to_local().numel() for weight in weights) - whole / size) <= most
        units = {name for name, part in sharded.named_modules() if isinstance(part, FSDPModule)}
        roots = {"model", "score"} if hasattr(model, "score") else {""}
        layers = 0  # of a lone head
        if hasattr(model, "config"):
            layers = sharded.config.num_hidden_layers
        assert units == roots | {f"model.layers.{i}" for i in range(layers)}
        models.add(sharded)
        return sharded

    def checked_log(*arguments):
        # dpo.py loads its reference for an evaluation only
        kept = {"ppo_rlhf": 4, "grpo": 3, "reinforce": 2}
        assert len(models) == kept.get(script.__name__, 1)
        log(*arguments)

    def stopping_save(run_dir, trained, state):
        save_checkpoint(run_dir, trained, state)
        if state["step"] == step:
            raise StoppedError

    script.shard, script.save_checkpoint, script.log = checked_shard, stopping_save, checked_log

    def checked_decode(model, *arguments):
        whole = [not isinstance(weight, DTensor) for weight in model.parameters()]
        assert all(whole), "gathered before, not in each step"
        units = [part for part in model.modules() if isinstance(part, FSDPModule)]
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in units)
        return decode(model, *arguments)

    common.generation.decode = checked_decode


def main():
    with open(sys.argv[1]) as file:
        runs = json.load(file)
    # PyTorch finds groups by name, and a process's second one may find what is left of its first.
    torch.distributed.init_process_group()
    leave = torch.distributed.destroy_process_group
    torch.distributed.init_process_group = torch.distributed.destroy_process_group = ignore
    decode = common.generation.decode
    for name, flags, step in runs:
        common.generation.decode = decode
        sys.modules.pop(name, None)
        script = importlib.import_module(name)
        if "bfloat16" in sys.argv:
            take_gpu_types(pytest.MonkeyPatch(), script)
        watch(script, step)
        with contextlib.suppress(StoppedError):
            script.main(script.parse_args(flags))
    torch.distributed.barrier()
    leave()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as the scripts do
