"""Reward functions of cost/speed.py."""


def count_letters(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """A reward that differs between the samples of a model with random weights."""
    return [float(sum(map(str.isalpha, completion))) for completion in completions]
