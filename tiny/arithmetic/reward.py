"""The reward of the sums: is the last number of a completion the right one?

The default `--reward-fn` of grpo.py. It reads GSM8K's answers (`... #### 1,234`) as well. A reward
function gets lists, one item per completion, and the dataset's other columns by name; it returns a
list of numbers. docs/rewards.md says more.
"""

import re
from math import nan
from typing import Any

# 72, -3, +4, 1,234.50, $5, .5; a sign right behind a digit, a letter or a bracket is an operator.
DIGITS = r"((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = rf"((?:(?<![\w.)])[-+])?)\$?{DIGITS}(?:/{DIGITS})?"  # and 1/3
# What people and models write for - and +: hyphens, dashes, a minus sign, wide characters.
SIGNS = str.maketrans("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d\uff0b", 7 * "-" + "+")
FRACTION = r"\\[dt]?frac\{(\d+)\}\{(\d+)\}"  # LaTeX


def last_number(
    prompts: list, completions: list[str], answer: list | None = None, **columns: list
) -> list:
    """1 where the completion's last number is the answer's last number, else 0.

    None, which the scripts refuse, where the answer has no number.
    """
    if answer is None:
        raise ValueError("last_number needs a column `answer`: which one is it, --answer-column?")
    rewards = []
    for completion, right_answer in zip(completions, answer, strict=True):
        right_number = find_last_number(right_answer)
        if right_number is None:
            rewards.append(None)
        else:
            rewards.append(float(find_last_number(completion) == right_number))
    return rewards


def find_last_number(text: Any) -> float | None:
    text = re.sub(r"(?<=\d)\\", r" \\", str(text).translate(SIGNS))  # 2\frac{1}{2} is not 21/2
    text = re.sub(FRACTION, r"\1/\2", text)
    numbers = re.findall(NUMBER, text, re.ASCII)
    if not numbers:
        return None
    sign, digits, denominator = numbers[-1]
    number = float(sign + digits.replace(",", ""))
    return number / (float(denominator.replace(",", "") or 1) or nan)
