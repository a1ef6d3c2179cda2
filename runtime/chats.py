"""Chat messages: as rows have them, and as a chat template reads them."""

import json
import re
from functools import cache
from typing import Any


class UnusableRow(ValueError):
    """A row of the data that is dropped; the message is the reason that is counted."""


def message_text(message: dict) -> str:
    """The text of a chat message; parts are joined, since most templates expect a string."""
    parts = message.get("content") or ""
    return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)


def template_message(message: dict) -> dict:
    """A message as a chat template reads it: with a string, and without keys of no value."""
    given = {key: value for key, value in message.items() if value not in (None, "", [])}
    return without_none(given) | {"content": message_text(message)}


def template_values(row: dict) -> dict:
    """The columns `tools` and `chat_template_kwargs` of a row, or what their JSON says."""
    values = {}
    for column in ("tools", "chat_template_kwargs"):
        value = without_none(row.pop(column, None))
        if value and isinstance(value, str):
            value = json.loads(value)
        if value:
            values |= value if column == "chat_template_kwargs" else {column: value}
    return values


def without_none(value: Any) -> Any:
    """JSON without the keys that `datasets` has added: all rows have those of the others."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


@cache
def special_tokens(tokenizer: Any) -> re.Pattern:
    """Matches each special token, such as <|im_end|>, that a text spells out."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    firsts = "".join({re.escape(token[0]) for token in tokens})  # tried alone, a thousand are slow
    return re.compile(f"(?=[{firsts}])(?:{'|'.join(map(re.escape, tokens))})" if tokens else "(?!)")


@cache
def template_words(template: str) -> set[str]:
    """The words of a chat template: a key of a message that is none of them is not read."""
    return {*re.findall(r"\w+", template)}
