"""Chat messages, and what common/tokens.py makes of a prompt with one completion."""

from array import array
from typing import Any

from common.tokens import encode_completions


def message(role: str | None, content: Any, **more: Any) -> dict[str, Any]:
    return dict(role=role, content=content, **more)


def encode_pair(tokenizer: Any, prompt: Any, completion: Any, stop_ids: list[int]) -> tuple:
    prompt_ids, [completion_ids] = encode_completions(tokenizer, prompt, [completion], stop_ids)
    return prompt_ids, completion_ids


def with_lists(item: Any) -> Any:
    """An item of a split with lists in the place of arrays."""
    if isinstance(item, tuple):
        return type(item)(*map(with_lists, item))
    if isinstance(item, list):
        return [with_lists(part) for part in item]
    return list(item) if isinstance(item, array) else item
