"""A CPU that computes and caches as the code would on a GPU."""

import pytest
import torch

import common.generation
import common.logprobs
import runtime.model
import common.prompts


def take_gpu_types(patch, *modules):
    """What `use_bfloat16` says and `GRAPH_DEVICES` has on a GPU; steps are not captured."""
    for module in (common.generation, common.logprobs, runtime.model, common.prompts, *modules):
        if hasattr(module, "use_bfloat16"):
            patch.setattr(module, "use_bfloat16", lambda device: True)
    patch.setattr(common.generation, "GRAPH_DEVICES", ("cpu", "sim", "cuda"))
    patch.setattr(common.generation, "capture", lambda step: step)


def compute_in_bfloat16():
    """For a process of its own, before its script is imported."""
    take_gpu_types(pytest.MonkeyPatch())
    clip = torch.nn.utils.clip_grad_norm_

    def checked(weights, max_norm):
        weights = list(weights)
        matrices = [weight.grad.to_local() for weight in weights if weight.dim() == 2]
        rounded = [torch.equal(grad, grad.bfloat16().float()) for grad in matrices]
        assert not all(rounded), "the sum of gradients over ranks was rounded to bfloat16"
        return clip(weights, max_norm)

    torch.nn.utils.clip_grad_norm_ = checked
