"""Token ids: padding, the ids that end a completion, and the way from texts and chats to ids."""

import json
import re
import warnings
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import date
from functools import cache, partial
from itertools import accumulate, pairwise
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from common.ranks import RANK, WORLD_SIZE, all_gather

BATCH_ROWS = 1000  # tokenised at a time


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
        if PretrainedConfig.get_config_dict(source)[0].get("quantization_config"):
            raise ValueError(f"{flags}: {source} is quantised; give weights in 16 or 32 bits")
    tokenizer = AutoTokenizer.from_pretrained(source)
    values = json.loads(chat_template_kwargs)
    words = re.findall(r"\w+", str(tokenizer.chat_template))
    if unknown := values.keys() - {*words}:
        raise ValueError(f"--chat-template-kwargs: {source}'s chat template reads no {unknown}")
    if today and "strftime_now(" in str(tokenizer.chat_template):  # else midnight changes prompts
        values["chat_template"] = re.sub(
            r"strftime_now\(\s*(['\"])(.*?)\1\s*\)",
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


# --- texts and chats to token ids --------------------------------------------------------------
# Yields a text, and whether special tokens are added; is sent its ids; returns what becomes of
# them. So the texts of many rows are tokenised at once, see `encode_all`.
Encoding = Generator[tuple[str, bool], list[int], Any]


@cache
def special_tokens(tokenizer: Any) -> re.Pattern:
    """Matches before each special token, such as <|im_end|>, that a text spells out."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile(f"(?={'|'.join(map(re.escape, tokens)) or '(?!)'})")


def encode(tokenizer: Any, text: Any, add_generation_prompt: bool = False) -> Encoding:
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
        ids = yield text, True
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
        ids = yield rendered, False
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


def encode_text(tokenizer: Any, text: Any, stop_ids: list[int]) -> Encoding:
    """Token ids of a text without a prompt: the first one, and the others with an EOS. Stop ids
    within it, of several turns or documents, end nothing.
    """
    ids = yield from encode(tokenizer, text)
    if len(ids) == 1 or ids[-1] not in stop_ids:
        ids = [*ids, stop_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id]
    return ids[:1], ids[1:]


def encode_pairs(tokenizer: Any, prompt: Any, completions: list, stop_ids: list[int]) -> Encoding:
    """Token ids (prompt, completion) of a prompt with each of some completions, which end with
    their first stop id. The two are tokenised as one text and cut where it departs from the prompt
    as the model meets it when it samples: at its end, or in what a chat template opens an answer
    with, such as a thought; then a warning. An `UnusableRow` if they depart earlier, if one of the
    two is empty or left out, if the completion is several messages, or if a string goes on after a
    stop id.
    """
    eos = stop_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    pairs, sampled_ids = [], None
    for completion in completions:
        refuse_empty(completion)
        if isinstance(prompt, str) and isinstance(completion, list):
            prompt, sampled_ids = [{"role": "user", "content": prompt}], None
        if isinstance(prompt, list) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if isinstance(completion, list) and len(completion) > 1:
            raise UnusableRow("with a completion of several messages")
        if sampled_ids is None:
            sampled_ids = yield from encode(tokenizer, prompt, add_generation_prompt=True)
        ids = yield from encode(tokenizer, prompt + completion)
        if isinstance(completion, list) and completion[0]["role"] != "assistant":
            raise UnusableRow("whose completion is not an assistant's turn")
        start = len(commonprefix([sampled_ids, ids]))  # it takes any sequences
        if start < len(sampled_ids):
            turns = sampled_ids
            if isinstance(prompt, list):
                turns = yield from encode(tokenizer, prompt)
            if start < len(commonprefix([sampled_ids, turns])):
                raise UnusableRow("whose prompt's last token changes with the completion: a space?")
            sampled, trained = tokenizer.decode(sampled_ids[start:]), tokenizer.decode(ids[start:])
            said = answer(content(completion[0]))
            if not said or said not in trained:
                raise UnusableRow("whose answer begins as the chat template's opening of a thought")
            trained = trained.partition(said)[0]
            difference = f"an answer is sampled after {sampled!r}, trained after {trained!r}"
            warnings.warn(f"--chat-template-kwargs: {difference}, in other tokens", stacklevel=2)
        ids = [*ids[start:], eos]
        end = min(ids.index(stop_id) for stop_id in stop_ids if stop_id in ids)
        if end == 0 and isinstance(completion, list):  # no token of what the message says
            raise UnusableRow("whose completion the chat template leaves out")
        rest = tokenizer.decode(ids[end + 1 :], skip_special_tokens=True)
        if rest.strip() and isinstance(completion, str):
            raise UnusableRow("whose completion goes on after a stop id")
        pairs.append((sampled_ids[:start], ids[: end + 1]))
    return pairs


def encode_all(tokenizer: Any, encodings: list[Encoding]) -> list[tuple[Any, list]]:
    """Of each encoding what it returns, or the error that it raises, and the token ids that it was
    sent. Texts that are waited for at the same time are tokenised together: fast tokenizers do
    that in parallel.
    """
    results, sent = [None] * len(encodings), [[] for _ in encodings]
    running = range(len(encodings))
    while running:
        waiting = {True: {}, False: {}}  # with special tokens and without: pieces by encoding
        for i in running:
            try:
                text, add_special_tokens = encodings[i].send(sent[i][-1] if sent[i] else None)
                is_rendered = not add_special_tokens and can_split(tokenizer)
                pieces = special_tokens(tokenizer).split(text) if is_rendered else [text]
                waiting[add_special_tokens][i] = pieces
            except StopIteration as end:
                results[i] = end.value
            except Exception as error:
                results[i] = error
        for add_special_tokens, pieces_of in waiting.items():
            # A system message, a pair's prompt or an earlier turn stands in many texts.
            pieces = [*dict.fromkeys(piece for pieces in pieces_of.values() for piece in pieces)]
            if pieces:
                batch = tokenizer(
                    pieces, add_special_tokens=add_special_tokens, return_attention_mask=False
                )
                ids_of = dict(zip(pieces, batch.input_ids, strict=True))
                for i, pieces in pieces_of.items():
                    sent[i].append([token for piece in pieces for token in ids_of[piece]])
        running = [*waiting[True], *waiting[False]]
    return list(zip(results, sent, strict=True))


@cache
def can_split(tokenizer: Any) -> bool:
    """Whether a text that is split before each special token gives the tokens of the whole. Not
    where such a token looks at what stands before it, or is found in normalised text.
    """
    special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    unsafe = (token.lstrip or token.single_word or token.normalized for token in special)
    return tokenizer.is_fast and not any(unsafe)


# --- the rows of a split -----------------------------------------------------------------------
class EncodedRows(Sequence):
    """The usable rows of a split as items. An item is made when it is read: its encoding is sent
    the token ids of its texts again. These are kept, in 4 bytes each; all else stays where
    `datasets` has it, on the disk.
    """

    def __init__(self, rows: Any, encode_row: Callable, parts_of: Callable):
        self.rows, self.encode_row, self.parts_of = rows, encode_row, parts_of
        self.places = array("i")  # of each item the numbers of its row and of its part of it
        # Of each text how many ids of the one before it it repeats, how many follow, and these.
        self.texts = array("i")
        self.sizes = array("i")  # of each item that of its part of `texts`
        self.checks = array("I")  # of each item a checksum of what else of it is trained on

    def append(self, place: tuple[int, int], texts: list[list[int]], rest: Any) -> None:
        self.places.extend(place)
        size = len(self.texts)
        for before, text in pairwise([[], *texts]):
            shared = len(commonprefix([before, text]))
            self.texts.extend([shared, len(text) - shared, *text[shared:]])
        self.sizes.append(len(self.texts) - size)
        self.checks.append(zlib.crc32(repr(rest).encode()))

    def gather(self) -> None:
        """The items of all ranks."""
        for name in ("places", "texts", "sizes", "checks"):
            parts = all_gather([getattr(self, name)])
            setattr(self, name, sum(parts[1:], parts[0]))
        self.starts = array("q", accumulate(self.sizes, initial=0))  # in `texts`

    def checksum(self) -> int:
        """CRC-32 of what is trained on, by which --resume sees that it has changed."""
        return zlib.crc32(self.checks, zlib.crc32(self.texts))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        number, part = self.places[2 * index : 2 * index + 2]
        encoding = self.encode_row(self.parts_of(self.rows[number])[part])
        next(encoding)
        ids, at = [], self.starts[index]
        try:
            while True:
                shared, size = self.texts[at : at + 2]
                ids = ids[:shared] + self.texts[at + 2 : at + 2 + size].tolist()
                at += 2 + size
                encoding.send(ids)
        except StopIteration as end:
            return end.value[0]


def encode_rows(
    split: str,
    rows: Any,
    encode_row: Callable[[Any], Encoding],
    tokenizer: Any,
    flag: str,
    max_length: int,
    parts_of: Callable[[dict], list] = lambda row: [row],
) -> EncodedRows:
    """The items of a split's rows, or of their parts. `encode_row` returns an item, its sequences
    of token ids, and what else of it is trained on. What is unusable, or longer than the
    `max_length` of a flag, is dropped and counted; a warning if most are, a ValueError if all are,
    or if a row fails otherwise. Prints the counts and the first row. Each rank encodes some rows.
    """
    kept, dropped, longest, first = EncodedRows(rows, encode_row, parts_of), Counter(), 0, ""
    mine = range(len(rows) * RANK // WORLD_SIZE, len(rows) * (RANK + 1) // WORLD_SIZE)
    progress = tqdm(desc=split, total=len(mine), unit=" rows", delay=3, disable=RANK > 0)
    for start in mine[::BATCH_ROWS]:
        numbers = range(start, min(start + BATCH_ROWS, mine.stop))
        places, encodings = [], []
        columns = rows[start : numbers.stop]
        for number, row in zip(numbers, zip(*columns.values(), strict=True), strict=True):
            parts = parts_of(dict(zip(columns, row, strict=True)))
            places += [(number, part) for part in range(len(parts))]
            encodings += map(encode_row, parts)
        encoded = encode_all(tokenizer, encodings)
        for place, (result, texts) in zip(places, encoded, strict=True):
            try:
                if isinstance(result, Exception):
                    raise result
                _, sequences, rest = result
                length = max(map(len, sequences))
                longest = max(longest, length)
                if length > max_length:
                    raise UnusableRow(f"longer than {flag}")
                kept.append(place, texts, rest)
                first = first or tokenizer.decode(sequences[0])
            except UnusableRow as reason:
                dropped[str(reason)] += 1
            except Exception as error:
                where = f"--dataset: row {place[0]} of {split}"
                raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
        progress.update(len(numbers))
    progress.close()
    kept.gather()
    dropped, longest = sum(all_gather([dropped]), Counter()), max(all_gather([longest]))
    first = next(filter(None, all_gather([first])), "")
    report = f"{split}: {len(kept)} rows, dropped {dict(dropped)}; longest {longest} tokens"
    print(f"{report}\n    {first if len(first) < 1000 else first[:500] + ' ... ' + first[-500:]!r}")
    if not kept:
        raise ValueError(f"--dataset: no row is left of {report}")
    if len(kept) < dropped.total():
        warnings.warn(f"--dataset: MOST ROWS ARE LOST of {report}", stacklevel=2)
    return kept
