"""Small tokenizers of each kind, for the tests of what becomes of a text."""

from string import ascii_letters, digits
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import TokenizersBackend


def made(model: Any, special: tuple = (), unk_token: str | None = None, **parts: Any) -> Any:
    """Of the parts of a `Tokenizer`, with these special tokens."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer = TokenizersBackend(tokenizer_object=tokenizer, unk_token=unk_token)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    return tokenizer


def bpe(tokens: list[str], merges: tuple = (), **options: Any) -> BPE:
    return BPE({t: i for i, t in enumerate([*tokens, *map("".join, merges)])}, [*merges], **options)


def of_characters(more: str = "", unk_token: str | None = None, **parts: Any) -> Any:
    """A token for each letter without accent, digit and `=`, and none for other characters."""
    tokens = [unk_token or "<pad>", *ascii_letters, *digits, "=", *more]
    model = bpe(tokens, unk_token=unk_token)
    return made(model, unk_token=unk_token, decoder=decoders.Fuse(), **parts)


def of_bytes(merges: tuple = (), special: tuple = ()) -> Any:
    return made(
        bpe(pre_tokenizers.ByteLevel.alphabet(), merges),
        special,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoder=decoders.ByteLevel(),
    )


def metaspace(prepend_scheme: str, merges: tuple = (), special: tuple = ()) -> Any:
    """Puts a space before each text, or before the first."""
    return made(
        bpe([*"\u2581=:+\n", *ascii_letters, *digits], merges),
        special,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme),
        decoder=decoders.Metaspace(prepend_scheme=prepend_scheme),
    )


def word_pieces() -> Any:
    tokens = ["un", "##aff", "##able", "1", "+", "2", "="]
    return made(
        WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="un"),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )


def llama_2() -> Any:
    """Falls back to bytes, and puts a space before a text."""
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"\u25810123456789+=;"]
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    space = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    return made(
        bpe(tokens, unk_token="<unk>", byte_fallback=True),
        unk_token="<unk>",
        normalizer=normalizers.Sequence(space),
        decoder=decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]),
    )
