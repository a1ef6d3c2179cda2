"""The reward of the sums: is the last number of a completion the right one?

The default `--reward-fn` of grpo.py. It reads GSM8K's answers (`... #### 1,234`) as well. A reward
function gets lists, one item per completion, and the dataset's other columns by name; it returns a
list of numbers. docs/rewards.md says more.
"""

import re
from math import nan
from unicodedata import decimal

# 72, -3, +4, 1,234.50, $5, .5, 1e-3; a sign behind a digit, a letter or a bracket is an operator.
DIGITS = r"((?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)"
NUMBER = rf"((?:(?<![\w.)])[-+])?)\$?{DIGITS}(?:/{DIGITS})?"  # and 1/3
# What people and models write for - and +: hyphens, dashes, a minus sign, wide characters; and for
# the comma and the point: Arabic and wide ones.
SIGNS = str.maketrans("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d\uff0b", 7 * "-" + "+")
SIGNS |= str.maketrans("\u066c\uff0c\u066b\uff0e", ",,..")
THIN_SPACE = r"(?<=\d)(?:\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"  # 12\,500
FRACTION = r"\\[dt]?frac\{(\d+)\}\{(\d+)\}"  # LaTeX


def last_number(
    prompts: list, completions: list[str], answer: list | None = None, **columns: list
) -> list[float]:
    """1 where the completion's last number is the answer, else 0.

    The errors are those of `check_columns`.
    """
    return [
        float(find_numbers(completion)[-1:] == right_numbers)
        for completion, right_numbers in zip(completions, check_columns(answer), strict=True)
    ]


def check_columns(answer: list | None = None, **columns: list) -> list[list[float]]:
    """The number of each answer, as a list. Called with all training rows before the first rollout.

    A ValueError where an answer, or what follows its `####`, is not one number: a pair, 12:30,
    2\\sqrt{3}, a date, a word.
    """
    if answer is None:
        raise ValueError("last_number needs a column `answer`: which one is it, --answer-column?")
    numbers = [find_numbers(str(right_answer).rpartition("####")[2]) for right_answer in answer]
    for right_answer, found in zip(answer, numbers, strict=True):
        if len(found) != 1:
            reads = "last_number, the default --reward-fn, reads answers that are one number"
            raise ValueError(f"{reads}, and this is none: {right_answer!r:.200}")
    return numbers


def find_numbers(text: str) -> list[float]:
    text = "".join(str(decimal(character, character)) for character in text)  # of any script
    text = re.sub(THIN_SPACE, "", text, flags=re.ASCII)
    text = text.translate(SIGNS).replace("\\!", "").replace("{,}", ",")  # LaTeX's 10,\!080
    text = re.sub(r"(frac(?:\{\d+\})?)(\d)", r"\1{\2}", text)  # \frac1{2}
    text = re.sub(r"(frac\{\d+\})(\d)", r"\1{\2}", text)  # \frac12
    text = re.sub(r"(?<=\d)\\", r" \\", text)  # 2\frac{1}{2} is not 21/2
    text = re.sub(FRACTION, r"\1/\2", text)
    numbers = []
    for sign, digits, denominator in re.findall(NUMBER, text, re.ASCII):
        number = float(sign + digits.replace(",", ""))
        numbers.append(number / (float(denominator.replace(",", "") or 1) or nan))
    return numbers
