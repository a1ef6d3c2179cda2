"""Spelling a word backward: the task of the RLHF Book (github.com/natolambert/rlhf-book, code/).

    python docs/rewards/spell_backward.py FOLDER < WORDS
    python grpo.py --reward-fn docs/rewards/spell_backward.py:letters --dataset FOLDER ...

WORDS has a word per line, such as the file of reasoning-gym, whose rule this is.
"""

import json
import random
import sys
from pathlib import Path


def letters(prompts: list, completions: list[str], answer: list[str], **columns: list) -> list:
    """1 for the answer, else the share of its letters that stand in their places; 0.8 if all do
    and more follow. Case and white space around the completion do not count."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion.strip().lower()
        same = sum(a == b for a, b in zip(text, right.lower(), strict=False)) / len(right)
        rewards.append(0.8 if same == 1 and len(text) > len(right) else same)
    return rewards


def make_row(word: str) -> dict:
    return {"prompt": f"Spell {word} backward. Write nothing else.", "answer": word[::-1]}


if __name__ == "__main__":
    words = [word for word in sys.stdin.read().split() if word.isalpha() and 3 <= len(word) <= 10]
    random.Random(0).shuffle(words)
    for split, chosen in (("train", words[:-500]), ("test", words[-500:])):
        rows = [json.dumps(make_row(word)) + "\n" for word in chosen]
        Path(sys.argv[1]).mkdir(exist_ok=True)
        Path(sys.argv[1], f"{split}.jsonl").write_text("".join(rows))
