"""A CPU that computes and caches as the code would on a GPU."""

import common.generation
import common.logprobs


def take_gpu_types(patch, *modules):
    """What `use_bfloat16` and `use_static_cache` say on a GPU; steps are not captured."""
    for module in (common.generation, common.logprobs, *modules):
        if hasattr(module, "use_bfloat16"):
            patch.setattr(module, "use_bfloat16", lambda device: True)
    patch.setattr(common.generation, "use_static_cache", lambda device: True)
    patch.setattr(common.generation, "capture", lambda step: step)
