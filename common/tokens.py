"""Token ids: padding, the ids that end a completion, and the way from texts and chats to ids."""

import json
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from functools import cache, partial
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file


def load_tokenizer(
    source: str, chat_template_kwargs: str = "{}", today: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name. Its chat template gets the values of a JSON object,
    and a date YYYY-MM-DD for today's. A ValueError if the model has adapters or is quantised.
    """
    flags = "--model, --reference, --reward-model, --teacher"
    if find_adapter_config_file(source):  # transformers would go on with the model below it
        raise ValueError(f"{flags}: merge the adapters in {source} first, see docs/lora.md")
    with suppress(OSError):  # a tokenizer alone has no config
        if "quantization_config" in PretrainedConfig.get_config_dict(source)[0]:
            raise ValueError(f"{flags}: {source} is quantised; give weights in 16 or 32 bits")
    tokenizer = AutoTokenizer.from_pretrained(source)
    values = json.loads(chat_template_kwargs)
    words = re.findall(r"\w+", str(tokenizer.chat_template))
    if unknown := values.keys() - {*words}:
        raise ValueError(f"--chat-template-kwargs: {source}'s chat template reads no {unknown}")
    if today and "strftime_now(" in str(tokenizer.chat_template):  # else midnight changes prompts
        values["chat_template"] = re.sub(
            r"strftime_now\((['\"])(.*?)\1\)",
            lambda call: repr(date.fromisoformat(today).strftime(call[2])),
            tokenizer.get_chat_template(),
        )
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **values)
    return tokenizer


def pad_rows(rows: list[list[int]], device: Any, side: str = "right") -> tuple[Tensor, Tensor]:
    """Ids (B, L) of rows of different lengths, padded with 0, and a bool mask of the real ones."""
    tensors = [torch.LongTensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    ids = ids.to(device, non_blocking=True)
    return ids.clamp(min=0), ids >= 0  # padding is -1, since 0 or EOS may be real


def find_stop_ids(source: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Sorted ids that end a completion: the tokenizer's EOS, those of `source`'s generation config,
    and what the chat template writes after an assistant's turn. A ValueError if there is none.
    """
    stop_ids = {tokenizer.eos_token_id}
    with suppress(OSError):  # many checkpoints have no generation config
        config_ids = GenerationConfig.from_pretrained(source).eos_token_id
        stop_ids.update(config_ids if isinstance(config_ids, list) else [config_ids])
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "@@"}]
        end = tokenizer.apply_chat_template(turns, tokenize=False).partition("@@")[2]
        ids = tokenizer(end, add_special_tokens=False).input_ids
        added = tokenizer.added_tokens_decoder
        stop_ids.update([i for i in ids if i in added and added[i].special][:1])
    stop_ids.discard(None)
    if not stop_ids:  # sampling would never stop, and training would teach no end
        raise ValueError(f"{source}: neither tokenizer nor generation config has an EOS")
    return sorted(stop_ids)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The pieces of text of token ids, special tokens shown. They join to the whole text (broken
    UTF-8 aside); of a character that takes several tokens the last one has it.
    """
    pieces = []
    for end in range(len(ids)):
        start = max(0, end - 8)  # a token's text depends on the one before it: its space
        before, text = tokenizer.decode(ids[start:end]), tokenizer.decode(ids[start : end + 1])
        pieces.append(text.rstrip("\ufffd")[len(before.rstrip("\ufffd")) :])
    return pieces


def rollout_row(tokenizer: Any, sequences: list, columns: dict[str, Tensor]) -> dict[str, list]:
    """For rollouts.jsonl: of each pair (prompt, completion) of ids the texts, and with three digits
    its number in each column (B,), or its numbers per token in columns (B, T).
    """
    rows = []
    for i, (prompt_ids, ids) in enumerate(sequences):
        row = {"prompt": tokenizer.decode(prompt_ids), "tokens": token_texts(tokenizer, ids)}
        for name, values in columns.items():
            numbers = values[i, : len(ids)] if values.dim() == 2 else values[i]
            row[name] = numbers.double().round(decimals=3).tolist()
        rows.append(row)
    return {"completions": rows}


class UnusableRow(ValueError):
    """A row of the data that is dropped and counted; the message continues "dropped 3 ..."."""


@cache
def special_tokens(tokenizer: Any) -> re.Pattern:
    """Matches each special token, such as <|im_end|>, that a text spells out."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def encode(tokenizer: Any, text: Any, add_generation_prompt: bool = False) -> list[int]:
    """Token ids of a string, with the tokenizer's BOS and without an EOS that it appends, or of
    chat messages through the chat template. A ValueError if that leaves out a message; an
    `UnusableRow` if the text is empty, if a message spells out a special token, which would end or
    begin a turn, or if an assistant's turn is to be answered. A warning if a prompt is a string
    that goes without the chat template that there is.
    """
    refuse_empty(text)
    if isinstance(text, str):
        is_rendered = special_tokens(tokenizer).search(text)
        if add_generation_prompt and tokenizer.chat_template and not is_rendered:
            warnings.warn("--chat: without it string prompts get no chat template", stacklevel=2)
        ids = tokenizer(text).input_ids
        if ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]  # a prompt that ends with EOS would be over
    else:
        if add_generation_prompt and text[-1]["role"] == "assistant":
            raise UnusableRow("whose prompt ends with an assistant's turn")
        messages = [message | {"content": content(message)} for message in text]
        if any(special_tokens(tokenizer).search(message["content"]) for message in messages):
            raise UnusableRow("with a special token in the text of a message")
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        for message in messages:
            # Templates may drop an assistant's thoughts, and write what a tool says as JSON.
            name, role = tokenizer.name_or_path, message["role"]
            if role not in ("assistant", "tool") and message["content"].strip() not in rendered:
                raise ValueError(f"the chat template of {name} leaves out what {role!r} says")
        if text[-1]["role"] == "assistant" and answer(messages[-1]["content"]) not in rendered:
            raise UnusableRow("whose completion the chat template leaves out")
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
    if ids[:2] == 2 * [tokenizer.bos_token_id]:
        raise ValueError("two BOS at the start of the token ids")
    return ids


def content(message: Any) -> str:
    """The text of a chat message; parts are joined, since most templates expect a string."""
    if not isinstance(message, dict) or not message.get("role"):
        raise ValueError(f"every chat message needs a role and a content, found {message!r:.200}")
    parts = message.get("content") or ""
    if isinstance(parts, str):
        return parts
    if any(part.get("type") != "text" for part in parts):
        raise ValueError(f"only parts of type `text` can be read, found {parts!r:.200}")
    return "".join(part["text"] for part in parts)


def answer(text: str) -> str:
    """What follows an assistant's thoughts, if there are any."""
    return text.rpartition("</think>")[2].strip()


def refuse_empty(text: Any) -> None:
    """An `UnusableRow` if a string, or the last of some chat messages, is empty; a ValueError if
    the text is neither.
    """
    if not isinstance(text, str | list | None):
        raise ValueError(f"expected a string or a list of chat messages, found {text!r:.200}")
    last_turn = content(text[-1]) if text and isinstance(text, list) else text
    if not last_turn or not last_turn.strip():
        if isinstance(text, list) and text and text[-1].get("tool_calls"):
            raise UnusableRow("with a tool call instead of a text")
        raise UnusableRow("with an empty prompt or completion (in a csv also NA and null)")


def encode_pair(tokenizer: Any, prompt: Any, completion: Any, stop_ids: list) -> tuple[list, list]:
    """Token ids of a prompt and of its completion, which ends with its first stop id. The two are
    tokenised as one text and cut where it departs from the prompt as the model meets it when it
    samples: at its end, or in what a chat template opens an answer with, such as a thought; then a
    warning. An `UnusableRow` if they depart earlier, if one of the two is empty or left out, if
    the completion is several messages, or if a string goes on after its end. Without a prompt
    (None) the first token takes its place, and all others are learned.
    """
    refuse_empty(completion)
    eos = stop_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if prompt is None:  # several documents or turns may stand in one text
        ids = encode(tokenizer, completion)
        return ids[:1], [*ids[1:], *([] if ids[-1] in stop_ids else [eos])]
    if isinstance(prompt, str) and isinstance(completion, list):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(completion, list) and len(completion) > 1:
        raise UnusableRow("with a completion of several messages")
    prompt_ids = encode(tokenizer, prompt, add_generation_prompt=True)
    ids = encode(tokenizer, prompt + completion)
    if isinstance(completion, list) and completion[0]["role"] != "assistant":
        raise UnusableRow("whose completion is not an assistant's turn")
    start = len(commonprefix([prompt_ids, ids]))  # it takes any sequences
    if start < len(prompt_ids):
        turns = prompt_ids if isinstance(prompt, str) else encode(tokenizer, prompt)
        if start < len(commonprefix([prompt_ids, turns])):
            raise UnusableRow("whose prompt's last token changes with the completion: a space?")
        sampled, trained = tokenizer.decode(prompt_ids[start:]), tokenizer.decode(ids[start:])
        said = answer(content(completion[0]))
        if not said or said not in trained:
            raise UnusableRow("whose answer begins as the chat template's opening of a thought")
        trained = trained.partition(said)[0]
        difference = f"an answer is sampled after {sampled!r}, trained after {trained!r}"
        warnings.warn(f"--chat-template-kwargs: {difference}, in other tokens", stacklevel=2)
    prompt_ids, completion_ids = prompt_ids[:start], [*ids[start:], eos]
    end = min(completion_ids.index(stop_id) for stop_id in stop_ids if stop_id in completion_ids)
    if end == 0 and isinstance(completion, list):  # no token of what the message says
        raise UnusableRow("whose completion the chat template leaves out")
    rest = tokenizer.decode(completion_ids[end + 1 :], skip_special_tokens=True)
    if rest.strip() and isinstance(completion, str):
        raise UnusableRow("whose completion goes on after a stop id")
    return prompt_ids, completion_ids[: end + 1]


def encode_rows(
    split: str,
    rows: Iterable,
    encode_row: Callable[[Any], tuple[Any, list[list[int]]]],
    tokenizer: Any,
    flag: str,
    max_length: int,
    parts_of: Callable[[dict], list] = lambda row: [row],
) -> list:
    """The items that `encode_row` makes of rows, or of their parts, each beside its sequences of
    token ids. What is unusable, or longer than the `max_length` of a flag, is dropped and counted;
    a warning if most are, a ValueError if all are. Prints the counts and the first row.
    """
    items, dropped, longest, first = [], Counter(), 0, ""
    for number, row in enumerate(rows):
        parts = []
        with counted(dropped, f"row {number} of {split}"):
            parts = parts_of(row)
        for part in parts:
            with counted(dropped, f"row {number} of {split}"):
                item, sequences = encode_row(part)
                length = max(map(len, sequences))
                longest = max(longest, length)
                if length > max_length:
                    raise UnusableRow(f"longer than {flag}")
                items.append(item)
                first = first or tokenizer.decode(sequences[0])
    report = f"{split}: {len(items)} rows, dropped {dict(dropped)}; longest {longest} tokens"
    print(f"{report}\n    {first if len(first) < 1000 else first[:500] + ' ... ' + first[-500:]!r}")
    if not items:
        raise ValueError(f"--dataset: no row is left of {report}")
    if len(items) < dropped.total():
        warnings.warn(f"--dataset: MOST ROWS ARE LOST of {report}", stacklevel=2)
    return items


@contextmanager
def counted(dropped: Counter, place: str) -> Iterator[None]:
    """Count an `UnusableRow` by its message; a ValueError tells the place of any other error."""
    try:
        yield
    except UnusableRow as reason:
        dropped[str(reason)] += 1
    except Exception as error:
        raise ValueError(f"--dataset: {place}: {type(error).__name__}: {error}") from error


def checksum(rows: Iterable) -> int:
    """CRC-32 of what is trained on, by which --resume sees that it has changed."""
    crc = 0
    for row in rows:
        crc = zlib.crc32(repr(row).encode(), crc)
    return crc
