"""A CPU that computes and caches as the code would on a GPU."""

import pytest

import common.distributed
import common.generation
import common.logprobs


def take_gpu_types(patch, *modules):
    """What `use_bfloat16` says and `GRAPH_DEVICES` has on a GPU; steps are not captured."""
    for module in (common.distributed, common.generation, common.logprobs, *modules):
        if hasattr(module, "use_bfloat16"):
            patch.setattr(module, "use_bfloat16", lambda device: True)
    patch.setattr(common.generation, "GRAPH_DEVICES", ("cpu", "sim", "cuda"))
    patch.setattr(common.generation, "capture", lambda step: step)


def compute_in_bfloat16():
    """For a process of its own, before its script is imported."""
    take_gpu_types(pytest.MonkeyPatch())
