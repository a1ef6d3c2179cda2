"""A CPU that computes and caches as the code would on a GPU."""

import common.generation
import common.logprobs
import common.model
import common.tree


def take_gpu_types(patch, *modules):
    """What `use_bfloat16` says and `GRAPH_DEVICES` has on a GPU; steps are not captured."""
    for module in (common.generation, common.logprobs, common.model, common.tree, *modules):
        if hasattr(module, "use_bfloat16"):
            patch.setattr(module, "use_bfloat16", lambda device: True)
    patch.setattr(common.generation, "GRAPH_DEVICES", ("cpu", "sim", "cuda"))
    patch.setattr(common.generation, "capture", lambda step: step)
