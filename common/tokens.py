"""Token ids: padding, the ids that end a completion, and the way from texts and chats to ids."""

import json
import os
import re
import warnings
from contextlib import suppress
from functools import cache, partial
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from tokenizers.decoders import DecodeStream
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file


def load_tokenizer(source: str, chat_template_kwargs: str = "{}") -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name, whose chat template gets the values of a JSON object.
    A ValueError if the model has adapters or is quantised, but for bitsandbytes' 4 bits.
    """
    flags = "--model, --reference, --reward-model, --teacher"
    try:
        adapters = find_adapter_config_file(source)
        config = PretrainedConfig.get_config_dict(source)[0]
        tokenizer = None if adapters else AutoTokenizer.from_pretrained(source)
    except Exception as error:
        found = f"{source} is no hub name, and no folder with a model and a tokenizer"
        raise ValueError(f"{error}\n{flags}: {found} seen from {os.getcwd()}") from error
    if adapters:  # transformers would go on with the model below them
        raise ValueError(f"{flags}: merge the adapters in {source} first, see docs/lora.md")
    quantisation = config.get("quantization_config")
    if quantisation and not quantisation.get("load_in_4bit"):
        raise ValueError(f"{flags}: {source} is quantised; give weights in 16 or 32 bits")
    values = json.loads(chat_template_kwargs)
    if unknown := values.keys() - template_words(str(tokenizer.chat_template)):
        raise ValueError(f"--chat-template-kwargs: {source}'s chat template reads no {unknown}")
    strings = [value.lower() for value in values.values() if isinstance(value, str)]
    if {"true", "false"} & {*strings}:
        raise ValueError(f"--chat-template-kwargs: true and false without quotes: {values}")
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **values)
    return tokenizer


def check_tokenizer(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """A ValueError if a model was trained with other token ids, a warning if with another chat
    template, than the tokenizer's.
    """
    trained = load_tokenizer(source)
    if not tokenizer.get_vocab().items() <= trained.get_vocab().items():
        raise ValueError(f"the tokenizer of {source} is not that of --model")
    if trained.chat_template and trained.chat_template != tokenizer.chat_template:
        warnings.warn(f"{source} reads chats in the template of --model, not its own", stacklevel=3)


def pad_rows(rows: list[list[int]], device: Any, side: str = "right") -> tuple[Tensor, Tensor]:
    """Ids (B, L) of rows of different lengths, padded with 0, and a bool mask of the real ones."""
    tensors = [torch.LongTensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    ids = ids.to(device, non_blocking=True)
    return ids.clamp(min=0), ids >= 0  # padding is -1, since 0 or EOS may be real


def find_stop_ids(source: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a completion: the tokenizer's EOS, those of `source`'s generation config,
    and the chat template's first special token after an answer. The first of them is the one that
    completions are given. A ValueError if there is none.
    """
    stop_ids = [tokenizer.eos_token_id]
    with suppress(OSError):  # many checkpoints have no generation config
        config_ids = GenerationConfig.from_pretrained(source).eos_token_id
        stop_ids += config_ids if isinstance(config_ids, list) else [config_ids]
    if tokenizer.chat_template:
        turns = as_chat("?") + as_chat("ANSWER", "assistant")
        _, _, end = tokenizer.apply_chat_template(turns, tokenize=False).partition("ANSWER")
        ids = tokenizer(end, add_special_tokens=False).input_ids
        added = tokenizer.added_tokens_decoder
        stop_ids += [i for i in ids if i in added and added[i].special][:1]
    stop_ids = [i for i in dict.fromkeys(stop_ids) if i is not None]  # each once
    if not stop_ids:  # sampling would never stop, and training would teach no end
        raise ValueError(f"{source}: neither tokenizer nor generation config has an EOS")
    return stop_ids


def rollout_row(tokenizer: Any, sequences: list, columns: dict[str, Tensor]) -> dict[str, list]:
    """A line of rollouts.jsonl: of each pair (prompt, completion) of ids the texts, its number in
    each column (B,), and its numbers per token in columns (B, T), to three decimals. The text of a
    character that takes several tokens stands at the last of them.
    """
    rows = []
    for i, (prompt_ids, ids) in enumerate(sequences):
        stream = DecodeStream(skip_special_tokens=False)
        try:
            tokens = [stream.step(tokenizer.backend_tokenizer, token) or "" for token in ids]
        except Exception:  # bytes that are no character, of a tokenizer that falls back to bytes
            tokens = tokenizer.convert_ids_to_tokens(ids)
        row = {"prompt": tokenizer.decode(prompt_ids), "tokens": tokens}
        for name, values in columns.items():
            numbers = values[i, : len(ids)] if values.dim() == 2 else values[i]
            row[name] = numbers.double().round(decimals=3).tolist()
        rows.append(row)
    return {"completions": rows}


class UnusableRow(ValueError):
    """A row of the data that is dropped; the message is the reason that is counted."""


# --- texts and chats to token ids --------------------------------------------------------------
def encode(tokenizer: Any, text: Any, add_generation_prompt: bool = False) -> list[int]:
    """Token ids of a string, with the tokenizer's BOS and without an EOS that it appends, or of
    chat messages through the chat template. A ValueError if that leaves out a message; an
    `UnusableRow` if the text is empty, if a message spells out a special token, which would end or
    begin a turn, or if an assistant's turn is to be answered. A warning if a prompt is a string
    although there is a chat template.
    """
    refuse_empty(text)
    if isinstance(text, str):
        written, is_rendered = text, special_tokens(tokenizer).search(text)
        if add_generation_prompt and tokenizer.chat_template and not is_rendered:
            warnings.warn("--chat: without it string prompts get no chat template", stacklevel=2)
        ids = tokenizer(text).input_ids
        if ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]  # a prompt that ends with EOS would be over
    else:
        if add_generation_prompt and text[-1]["role"] == "assistant":
            raise UnusableRow("whose prompt ends with an assistant's turn")
        messages = []
        for message in text:
            content = {"content": message_text(message)}
            given = {key: value for key, value in message.items() if value not in (None, "", [])}
            messages.append(without_none(given) | content)
        if any(special_tokens(tokenizer).search(str(message)) for message in messages):
            raise UnusableRow("with a special token in the text of a message")
        written = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        check_nothing_is_lost(tokenizer, messages, written)
        ids = tokenizer(written, add_special_tokens=False).input_ids
    if not ids:
        raise UnusableRow("with a text that has no tokens")
    may_be_written = {tokenizer.bos_token_id, tokenizer.eos_token_id}  # OPT's unk is its BOS
    if tokenizer.unk_token_id in {*ids} - may_be_written and tokenizer.unk_token not in written:
        raise UnusableRow("with characters that the tokenizer of --model does not know")
    if ids[:2] == 2 * [tokenizer.bos_token_id]:
        raise ValueError("two BOS at the start of the token ids")
    return ids


@cache
def template_words(template: str) -> set[str]:
    """The words of a chat template: a key of a message that is none of them is not read."""
    return {*re.findall(r"\w+", template)}


@cache
def special_tokens(tokenizer: Any) -> re.Pattern:
    """Matches the place before each special token, such as <|im_end|>, that a text spells out."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile(f"(?={'|'.join(map(re.escape, tokens)) or '(?!)'})")


def template_values(tokenizer: Any, row: dict) -> dict:
    """The columns `tools` and `chat_template_kwargs` of a row, or what their JSON says, for its
    chat template. A warning if the template does not read them.
    """
    values = {}
    for column in ("tools", "chat_template_kwargs") if tokenizer.chat_template else ():
        value = without_none(row.pop(column, None))
        if value and isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"--dataset: no JSON in the column {column}: {error}") from error
        if value:
            values |= value if column == "chat_template_kwargs" else {column: value}
    for name in values.keys() - template_words(str(tokenizer.chat_template)):
        unread = f"{tokenizer.name_or_path}'s chat template reads no {name!r}"
        warnings.warn(f"--dataset: {unread}", stacklevel=2)
    return values


def without_none(value: Any) -> Any:
    """JSON without the keys that `datasets` has added: all rows have those of the others."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def as_chat(text: Any, role: str = "user") -> Any:
    """A string as a chat of one message; chat messages as they are."""
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def message_text(message: Any) -> str:
    """The text of a chat message; parts are joined, since most templates expect a string."""
    if not isinstance(message, dict) or not message.get("role"):
        raise ValueError(f"every chat message needs a role and a content, found {message!r:.200}")
    parts = message.get("content") or ""
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" for part in parts
    ):
        raise ValueError(f"only parts of type `text` can be read, found {parts!r:.200}")
    return "".join(part["text"] for part in parts)


def refuse_empty(text: Any) -> None:
    """An `UnusableRow` if a string, or the last of some chat messages, is empty; a ValueError if
    the text is neither.
    """
    if not isinstance(text, str | list | None):
        raise ValueError(f"expected a string or a list of chat messages, found {text!r:.200}")
    last_turn = message_text(text[-1]) if text and isinstance(text, list) else text
    if last_turn and re.match(r"""\s*\[\s*{\s*["'](role|content|from)["']""", last_turn):
        raise UnusableRow("whose chat is a text: make it a list of messages")
    is_chat = text and isinstance(text, list)
    may_be_empty = is_chat and (text[-1].get("tool_calls") or text[-1]["role"] == "tool")
    if not may_be_empty and (not last_turn or not last_turn.strip()):
        raise UnusableRow("with an empty prompt or completion (in a csv also NA and null)")


def check_nothing_is_lost(tokenizer: Any, messages: list[dict], rendered: str) -> None:
    """A ValueError if a template has left out a message or does not know its role, an `UnusableRow`
    if it has left out only the last answer, a warning if its thought, the indentation of a text, or
    a key of a message. Templates may drop earlier answers and thoughts, and write what a tool says
    as JSON.
    """
    name, words = tokenizer.name_or_path, template_words(str(tokenizer.chat_template))
    lost = []
    for message in messages:
        role, text = message["role"], message["content"]
        is_common = role in ("developer", "tool", "function", "ipython") and role in rendered
        if role not in {"system", "user", "assistant"} | words and not is_common:
            raise ValueError(f"the chat template of {name} knows no role {role!r}")
        if role not in ("assistant", "tool") and text.strip() not in rendered:
            raise ValueError(f"the chat template of {name} leaves out what {role!r} says")
        if text[:1].isspace() and text.strip() in rendered and text.rstrip() not in rendered:
            lost.append("trims the white space before a text, such as the indentation of code")
        known = {"role", "content", "weight", "tool_call_id"} | words
        lost += [f"reads no {key!r}" for key in message.keys() - known]  # `reasoning_content`
        calls = [call for call in message.get("tool_calls", []) if isinstance(call, dict)]
        for arguments in [call.get("function", call).get("arguments") for call in calls]:
            if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in rendered:
                lost.append("writes the arguments of a call as a quoted text: give an object")
    if role == "assistant":  # the last answer
        if not text.strip() and "tool_calls" not in words:
            raise UnusableRow("with a tool call instead of a text, which the template leaves out")
        thought, _, answer = text.rpartition("</think>")
        if answer.strip() not in rendered:
            raise UnusableRow("whose completion the chat template leaves out")
        if thought.rpartition("<think>")[2].strip() not in rendered:
            lost.append("leaves out the thought of a completion, which is not learned")
    for what in lost:
        warnings.warn(f"--dataset: {name}'s chat template {what}", stacklevel=2)


def encode_completions(
    tokenizer: Any, prompt: Any, completions: list, stop_ids: list[int]
) -> tuple[list[int], list[list[int]]]:
    """Token ids of a prompt and of each of its completions, which end with their first stop id. A
    completion is tokenised as one text with the prompt, and cut where it begins. An `UnusableRow`
    if one of them is empty or left out, if a completion is several messages, or if a string goes on
    after a stop id. A warning if a string begins with the whole prompt.
    """
    for text in (prompt, *completions):
        refuse_empty(text)
    asked = message_text(as_chat(prompt)[-1])
    if any(isinstance(text, str) and text.startswith(asked) for text in completions):
        repeated = "a completion begins with its whole prompt, which the model reads twice"
        warnings.warn(f"--dataset: {repeated}", stacklevel=2)
    if any(isinstance(completion, list) for completion in completions):
        prompt = as_chat(prompt)
    if isinstance(prompt, list):
        completions = [as_chat(completion, "assistant") for completion in completions]
        if any(len(completion) > 1 for completion in completions):
            raise UnusableRow("with a completion of several messages")
    sampled_ids = encode(tokenizer, prompt, add_generation_prompt=True)
    sequences = []
    for completion in completions:
        ids = encode(tokenizer, prompt + completion)
        if isinstance(completion, list) and completion[0]["role"] != "assistant":
            raise UnusableRow("whose completion is not an assistant's turn")
        start = completion_start(tokenizer, prompt, completion, sampled_ids, ids)
        ids = [*ids, stop_ids[0]]
        end = next(i for i in range(start, len(ids)) if ids[i] in stop_ids)
        if end == start and isinstance(completion, list):  # no token of what the message says
            raise UnusableRow("whose completion the chat template leaves out")
        rest = tokenizer.decode(ids[end + 1 :], skip_special_tokens=True)
        if rest.strip() and isinstance(completion, str):
            raise UnusableRow("whose completion goes on after a stop id")
        sequences.append((start, ids[: end + 1]))
    # All completions share one prompt, which ends where the first of them begins.
    start = min(start for start, _ in sequences)
    return sampled_ids[:start], [ids[start:] for _, ids in sequences]


def completion_start(
    tokenizer: Any, prompt: Any, completion: Any, sampled_ids: list[int], ids: list[int]
) -> int:
    """Where a completion begins in the ids of the whole text: after the ids from which it is
    sampled, if the text begins with these. If not, because the template opens or closes a thought
    in sampled or in trained answers alone: where the two part, and a warning. An `UnusableRow` if
    they part in the prompt itself, or if the answer cannot be told from the opening.
    """
    start = len(commonprefix([sampled_ids, ids]))  # it takes any sequences
    if start == len(sampled_ids):
        return start
    prompt_ids = sampled_ids if isinstance(prompt, str) else encode(tokenizer, prompt)
    if start < len(commonprefix([sampled_ids, prompt_ids])):
        raise UnusableRow("whose prompt's last token changes with the completion: a space?")
    sampled, trained = tokenizer.decode(sampled_ids[start:]), tokenizer.decode(ids[start:])
    answer = message_text(completion[0]).rpartition("</think>")[2].strip()
    if not answer or answer not in trained:
        raise UnusableRow("whose answer begins as the chat template's opening of a thought")
    opening = trained.partition(answer)[0]
    difference = f"an answer is sampled after {sampled!r}, trained after {opening!r}"
    warnings.warn(f"--chat-template-kwargs: {difference}", stacklevel=3)
    return start
