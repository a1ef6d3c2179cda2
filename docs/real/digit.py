"""The test of nano-rl (github.com/Michael-JB/nano-rl): learn to name the digit 5.

`python docs/real/digit.py` writes docs/real/digit anew: the prompt with each digit, and 100 times.
"""

import json
from pathlib import Path

PROMPT = (
    "What number between 0 and 9 am I thinking of right now? "
    "You MUST ONLY answer with a single integer."
)


def near_five(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """1 - |d - 5| / 9 for a completion that is one digit d, else 0."""
    return [1 - abs(int(d) - 5) / 9 if d in [*"0123456789"] else 0.0 for d in completions]


if __name__ == "__main__":
    folder = Path("docs/real/digit")
    folder.mkdir(exist_ok=True)
    for split, digits in (("train", "0123456789"), ("test", "5" * 100)):
        rows = [json.dumps({"prompt": PROMPT, "completion": digit}) + "\n" for digit in digits]
        (folder / f"{split}.jsonl").write_text("".join(rows))
