"""The calculator, an environment, and the reward of its task."""

import re


def calculator(prompts: list, completions: list[str], **columns: list) -> list[str | None]:
    """After an open call such as `?37+48=` its result and `;`. None elsewhere: that is the end."""
    calls = [re.search(r"\?(\d+)\+(\d+)=$", completion) for completion in completions]
    return [f"{int(call[1]) + int(call[2])};" if call else None for call in calls]


def right(prompts: list, completions: list[str], answer: list, **columns: list) -> list[float]:
    """1 if what follows the last # is the answer. What the calculator has said does not count."""
    marked = [completion.rpartition("#")[1:] for completion in completions]
    return [float("".join(text) == f"#{a}") for text, a in zip(marked, answer, strict=True)]
