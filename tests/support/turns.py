"""An environment that any policy of tiny/calculator calls: whenever it writes a #."""


def echo(prompts: list, completions: list[str], **columns: list) -> list[str | None]:
    """The start of the prompt, of two to four characters, twice; then it is over."""
    return [
        prompt[: 2 + sum(map(ord, prompt)) % 3]
        if text.endswith("#") and text.count("#") < 3
        else None
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def checksums(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """A reward that differs within a group."""
    return [sum(map(ord, completion)) % 7 / 3 for completion in completions]
