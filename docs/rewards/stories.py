"""Rules for stories, and what to judge a story by that these rules do not see.

    python grpo.py --model FOLDER --dataset FOLDER --max-new-tokens 64 \
        --reward-fn docs/rewards/stories.py:happy_words \
        --eval-reward-fn docs/rewards/stories.py:distinct_pairs

A rule that counts rewards repetition. docs/stories.md trains a small pretrained model with both.
"""

import re
from itertools import pairwise

# Words of children's stories in which somebody is happy.
HAPPY = frozenset("happy glad love loved fun smile smiled laugh laughed hug hugged".split())


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"[a-z']+", text.lower())


def friend(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """1 where a friend, or friends, occur in the completion, else 0."""
    rewards = []
    for completion in completions:
        has_friend = not {"friend", "friends"}.isdisjoint(words(completion))
        rewards.append(float(has_friend))
    return rewards


def happy_words(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """How many of the completion's words are in HAPPY; each occurrence counts."""
    return [float(sum(word in HAPPY for word in words(text))) for text in completions]


def distinct_pairs(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """Different pairs of neighbouring words / all such pairs: 1 where no pair occurs twice.

    Distinct-2 of Li et al. (arXiv 1510.03055), of each completion alone.
    """
    fractions = []
    for completion in completions:
        text_words = words(completion)
        pairs = list(pairwise(text_words))
        fractions.append(len(set(pairs)) / max(len(pairs), 1))
    return fractions
