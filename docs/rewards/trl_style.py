"""Reward functions written for TRL, called from here.

    python grpo.py --reward-fn docs/rewards/trl_style.py:boxed ...

TRL (1.16.0) calls f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric) and
the dataset's columns, all by name; here it is prompts, completions and columns. A chat's completion
is a list of one message there, and its text here. None says there that a rule does not apply, and
is an error here.
"""

import re
from collections.abc import Callable
from functools import wraps


def adapt(function: Callable) -> Callable:
    """A function that reads `completion[0]["content"]`, as one of this repository."""

    @wraps(function)
    def wrapper(prompts: list, completions: list[str], **columns: list) -> list[float]:
        chats = [[{"role": "assistant", "content": text}] for text in completions]
        found = function(prompts=prompts, completions=chats, **columns)
        return [0.0 if reward is None else reward for reward in found]

    return wrapper


@adapt
def boxed(completions, solution, **kwargs):
    r"""A function as TRL's documentation has them: 1 where the last \boxed{} is the solution."""
    contents = [completion[0]["content"] for completion in completions]
    last = [re.findall(r"\\boxed\{\s*(-?[\d.]+)\s*\}", content)[-1:] for content in contents]
    return [
        None if right is None else float(found == [str(right)])
        for found, right in zip(last, solution, strict=True)
    ]
