"""Format rewards: 1 where a completion has the form that was asked for, whatever it says.

    python grpo.py --reward-weights 1 0.2 \
        --reward-fn tiny/arithmetic/reward.py:last_number docs/rewards/formats.py:shown

A form is not an answer: give such a rule a small weight beside a rule that checks the answer.
"""

import re

# Thoughts, then an answer, and nothing around them (DeepSeek-R1, arXiv 2501.12948).
THOUGHT = re.compile(r"\s*<think>(.+?)</think>\s*<answer>(.+?)</answer>\s*", re.DOTALL)
TAG = re.compile(r"</?(?:think|answer)>")
# The form of the demonstrations in tiny/arithmetic that show their working: `6,6,0,8,5#5`.
SHOWN = re.compile(r"\d(,\d){4}#\d", re.ASCII)


def think(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """1 for `<think>...</think> <answer>...</answer>` with each tag once, else 0. The first tag may
    be missing: many chat templates end the prompt with it.
    """
    rewards = []
    for completion in completions:
        text = completion if "<think>" in completion else "<think>" + completion
        has_form = THOUGHT.fullmatch(text) is not None
        num_tags = len(TAG.findall(text))
        rewards.append(1.0 if has_form and num_tags == 4 else 0.0)
    return rewards


def shown(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """1 for five digits with commas between them, a `#` and a digit, else 0."""
    return [1.0 if SHOWN.fullmatch(completion) else 0.0 for completion in completions]
