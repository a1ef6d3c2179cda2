"""What a run calls and what comes back: the functions of its script, and the steps it takes."""

import inspect
from types import ModuleType

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def spy_on(module: ModuleType, monkeypatch, name: str) -> list:
    """(arguments, result) of each call of a function of the module."""
    calls, original = [], getattr(module, name)

    def spy(*args, **options):
        calls.append(((*args, *options.values()), original(*args, **options)))
        return calls[-1][1]

    monkeypatch.setattr(module, name, spy)
    return calls


def spy_by_name(module: ModuleType, monkeypatch, name: str) -> list[dict]:
    """Copies of the arguments of each call by their names, and of its "result"."""
    calls, original = [], getattr(module, name)

    def copy(x):
        if isinstance(x, tuple):
            return tuple(copy(part) for part in x)
        if isinstance(x, dict):
            return {key: copy(part) for key, part in x.items()}
        if isinstance(x, torch.Generator):
            return x.clone_state()
        return x.detach().clone() if torch.is_tensor(x) else x

    def spy(*args, **options):
        given = inspect.signature(original).bind(*args, **options).arguments
        calls.append({key: copy(x) for key, x in given.items()})
        result = original(*args, **options)
        calls[-1]["result"] = copy(result)
        return result

    monkeypatch.setattr(module, name, spy)
    return calls


def watch_steps(monkeypatch) -> list[tuple]:
    """Of each step its weights, its gradient before it is clipped, and the largest norm."""
    steps, clip = [], torch.nn.utils.clip_grad_norm_

    def spy(parameters, max_norm):
        parameters = [p for p in parameters if p.grad is not None]  # no frozen ones
        weights = [p.detach().clone() for p in parameters]
        steps.append((weights, [p.grad.clone() for p in parameters], max_norm))
        return clip(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
    return steps


class Record(TorchDispatchMode):
    """Keeps what an operation returns."""

    def __init__(self, operation):
        super().__init__()
        self.operation, self.outputs = operation, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.outputs += [output] * (function is self.operation)
        return output
