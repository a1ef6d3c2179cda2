"""What common/tokens.py makes of one text, or of a prompt with a completion, alone in its batch."""

from typing import Any

from common import tokens
from common.tokens import Encoding


def result_of(tokenizer: Any, encoding: Encoding) -> Any:
    """What an encoding returns; its error is raised."""
    [(result, _)] = tokens.encode_all(tokenizer, [encoding])
    if isinstance(result, Exception):
        raise result
    return result


def encode(tokenizer: Any, text: Any, **options: Any) -> list[int]:
    return result_of(tokenizer, tokens.encode(tokenizer, text, **options))


def encode_pair(tokenizer: Any, prompt: Any, completion: Any, stop_ids: list[int]) -> tuple:
    return result_of(tokenizer, tokens.encode_pairs(tokenizer, prompt, [completion], stop_ids))[0]
