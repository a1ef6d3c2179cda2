"""Reward functions written for TRL, called from here.

    python grpo.py --reward-fn docs/rewards/trl_style.py:boxed ...

TRL (1.16.0) calls f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric) and
the dataset's columns, all by name; here it is prompts, completions and columns. A chat's completion
is a list of one message there, and its text here. There None says that a rule does not
apply, and `adapt` makes it 0.
"""

import re
from collections.abc import Callable
from functools import wraps


def adapt(function: Callable) -> Callable:
    """A function that reads `completion[0]["content"]`, as one of this repository."""

    @wraps(function)
    def wrapper(prompts: list, completions: list[str], **columns: list) -> list[float]:
        chats = [[{"role": "assistant", "content": completion}] for completion in completions]
        rewards = function(prompts=prompts, completions=chats, **columns)
        return [0.0 if reward is None else reward for reward in rewards]

    return wrapper


@adapt
def boxed(completions, solution, **kwargs):
    r"""A function as TRL's documentation has them: 1 where the last \boxed{} is the solution."""
    rewards = []
    for completion, right_answer in zip(completions, solution, strict=True):
        answers = re.findall(r"\\boxed\{\s*(-?[\d.]+)\s*\}", completion[0]["content"])
        if right_answer is None:
            rewards.append(None)
        else:
            rewards.append(float(answers[-1:] == [str(right_answer)]))
    return rewards
