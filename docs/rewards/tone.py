"""The tone of a text by a dictionary of rated words (VADER, Hutto and Gilbert 2014).

    pip install -e ".[real]"
    python grpo.py --reward-fn docs/rewards/tone.py:tone ...

It knows words, negations and exclamation marks, and nothing of what a text is about.
"""

from functools import cache
from typing import Any


@cache
def analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError as error:
        raise ImportError('VADER comes with an extra: pip install -e ".[real]"') from error
    return SentimentIntensityAnalyzer()


def tone(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """VADER's compound score, from -1 (negative) to 1 (positive)."""
    return [analyzer().polarity_scores(text)["compound"] for text in completions]
