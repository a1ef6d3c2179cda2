"""An environment that any policy of tiny/calculator calls: whenever it writes a #."""

from collections import Counter

calls = Counter()


def echo(
    prompts: list, completions: list[str], conversation_id: list[int], **columns: list
) -> list[str | None]:
    """The start of the prompt, of two to four characters, twice; then it is over. Each call counts
    by the conversation's number, as an environment that keeps a state would.
    """
    calls.update(conversation_id)
    for number, text in zip(conversation_id, completions, strict=True):
        # --call-end is # or ;
        assert calls[number] - text.endswith("<eos>") in (text.count("#"), text.count(";"))
    return [
        prompt[: 2 + sum(map(ord, prompt)) % 3]
        if text.endswith("#") and text.count("#") < 3
        else None
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def checksums(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """A reward that differs within a group."""
    return [sum(map(ord, completion)) % 7 / 3 for completion in completions]
