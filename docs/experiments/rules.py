"""Second rewards for tiny/arithmetic, on other scales than the 0 or 1 of a right answer.

    python grpo.py --reward-fn last_number docs/experiments/rules.py:brevity --reward-weights 4 1

`python docs/experiments/figures.py gdpo` trains with them.
"""

import re


def brevity(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """Minus the characters: -2 for an answer at once (`#5`), -11 with working (`6,6,0,8,5#5`)."""
    return [-float(len(completion)) for completion in completions]


def working(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """10 for five digits with commas between them and the answer, whatever the digits are."""
    return [10.0 * bool(re.fullmatch(r"\d(,\d){4}#\d", completion)) for completion in completions]
