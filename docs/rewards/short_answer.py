"""Answers of a few words, such as names, dates and labels: exact match, and the words in common.

    python grpo.py --reward-fn docs/rewards/short_answer.py:exact --dataset FOLDER --chat ...

As SQuAD compares them (Rajpurkar et al. 2016, arXiv 1606.05250): without case, punctuation and
articles. The column `answer` is a text, or a list of texts of which the best counts. The completion
is compared as a whole, so the prompt should ask for the answer alone.
"""

import re
from collections import Counter
from string import punctuation

WITHOUT_PUNCTUATION = str.maketrans("", "", punctuation)


def exact(prompts: list, completions: list[str], answer: list, **columns: list) -> list[float]:
    """1 for an answer, else 0."""
    return [
        max(float(words(completion) == words(right)) for right in listed(answers))
        for completion, answers in zip(completions, answer, strict=True)
    ]


def f1(prompts: list, completions: list[str], answer: list, **columns: list) -> list[float]:
    """F1 of the words: the harmonic mean of the shares of the completion's words that are in the
    answer, and of the answer's that are in the completion.
    """
    return [
        max(shared_words(words(completion), words(right)) for right in listed(answers))
        for completion, answers in zip(completions, answer, strict=True)
    ]


def listed(answers: str | float | list) -> list:
    return answers if isinstance(answers, list) else [answers]


def words(text: str | float) -> list[str]:
    plain = str(text).lower().translate(WITHOUT_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def shared_words(found: list[str], right: list[str]) -> float:
    if not found or not right:
        return float(found == right)
    return 2 * (Counter(found) & Counter(right)).total() / (len(found) + len(right))
