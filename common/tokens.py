"""Token ids: padding, the ids that end a completion, and the way from texts and chats to ids."""

from contextlib import suppress
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerBase

from runtime.chats import template_message
from runtime.checks import check_answer, check_apart, check_ids, check_text, check_turn
from runtime.checks import check_written


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
        answer = "this is an answer"
        turns = as_chat("?") + as_chat(answer, "assistant")
        # What the template writes after an answer, such as <|im_end|> and a new line.
        _, _, end = tokenizer.apply_chat_template(turns, tokenize=False).partition(answer)
        ids = tokenizer(end, add_special_tokens=False).input_ids
        added = tokenizer.added_tokens_decoder
        stop_ids += [i for i in ids if i in added and added[i].special][:1]
    stop_ids = [i for i in dict.fromkeys(stop_ids) if i is not None]  # each once
    if not stop_ids:  # sampling would never stop, and training would teach no end
        raise ValueError(f"{source}: neither tokenizer nor generation config has an EOS")
    return stop_ids


def pad_rows(rows: list[list[int]], device: Any, side: str = "right") -> tuple[Tensor, Tensor]:
    """Ids (B, L) of rows of different lengths, padded with 0, and a bool mask of the real ones."""
    tensors = [torch.LongTensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    ids = ids.to(device, non_blocking=True)
    return ids.clamp(min=0), ids >= 0  # -1 until the mask is made: 0 and EOS may be real


def as_chat(text: Any, role: str = "user") -> Any:
    """A string as a chat of one message; chat messages as they are."""
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def render(tokenizer: Any, text: str | list[dict], add_generation_prompt: bool = False) -> str:
    """What the chat template writes of messages; a string stays as it is."""
    if isinstance(text, str):
        return text
    messages = [template_message(message) for message in text]
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )


def to_ids(tokenizer: Any, written: str, is_chat: bool) -> list[int]:
    """Token ids of what a chat template has written, which has special tokens of its own; or of a
    string, with the tokenizer's BOS and without an EOS that it appends.
    """
    if is_chat:
        return tokenizer(written, add_special_tokens=False).input_ids
    ids = tokenizer(written).input_ids
    if ids[-1:] == [tokenizer.eos_token_id] and not written.endswith(tokenizer.eos_token):
        ids = ids[:-1]  # at the end of a prompt it says that the text is finished
    return ids


def encode(
    tokenizer: Any, text: str | list[dict], add_generation_prompt: bool = False
) -> list[int]:
    """Token ids of a string or of chat messages."""
    check_text(tokenizer, text, add_generation_prompt)
    written = render(tokenizer, text, add_generation_prompt)
    check_written(tokenizer, text, written)
    ids = to_ids(tokenizer, written, is_chat=isinstance(text, list))
    check_ids(tokenizer, text, written, ids)
    return ids


def encode_completions(
    tokenizer: Any, prompt: Any, completions: list, stop_ids: list[int]
) -> tuple[list[int], list[list[int]]]:
    """Token ids of a prompt and of each of its completions, which end with their first stop id."""
    if any(isinstance(completion, list) for completion in completions):
        prompt = as_chat(prompt)
    if isinstance(prompt, list):
        completions = [as_chat(completion, "assistant") for completion in completions]
    sequences = []
    for completion in completions:
        before, ids, _ = encode_answer(tokenizer, prompt, completion, stop_ids)
        sequences.append((before, ids))
    # All completions share one prompt. If they begin in different places, it ends at the first.
    start = min(len(before) for before, _ in sequences)
    prompt_ids, _ = sequences[0]
    return prompt_ids[:start], [before[start:] + ids for before, ids in sequences]


class Prefix(NamedTuple):
    """The beginning of a conversation that has been tokenised, up to a stop token, behind which
    tokens begin anew. By it sft.py reads a long conversation once, not again for each turn.
    """

    text: str
    ids: list[int]
    num_messages: int


NO_PREFIX = Prefix("", [], 0)


def encode_answer(
    tokenizer: Any, prompt: Any, completion: Any, stop_ids: list[int], prefix: Prefix = NO_PREFIX
) -> tuple[list[int], list[int], Prefix]:
    """Token ids of a prompt and of its completion, which ends with its first stop id. They are
    tokenised as one text, and cut where the ids end from which a completion is sampled. Returns
    also the `prefix` for a later turn of the conversation, which is not tokenised again there.
    """
    is_chat = isinstance(prompt, list)
    check_turn(tokenizer, prompt, completion, first=prefix.num_messages)
    asked = render(tokenizer, prompt, add_generation_prompt=True)
    answered = render(tokenizer, prompt + completion)
    if not (asked.startswith(prefix.text) and answered.startswith(prefix.text)):
        prefix = NO_PREFIX  # the template has changed earlier turns
    new_asked, new_answered = asked[len(prefix.text) :], answered[len(prefix.text) :]
    new_messages = (prompt + completion)[prefix.num_messages :]
    check_written(tokenizer, new_messages, new_answered)
    sampled_ids = to_ids(tokenizer, new_asked, is_chat)
    ids = to_ids(tokenizer, new_answered, is_chat)
    start = len(sampled_ids)
    if ids[:start] != sampled_ids and is_chat and answered.startswith(asked):
        # One token has the prompt's end and the answer's beginning, such as a new line and an
        # indentation. A sampler reads the prompt alone, so the answer is tokenised by itself.
        whole_ids = ids
        ids = sampled_ids + to_ids(tokenizer, answered.removeprefix(asked), is_chat)
        check_apart(tokenizer, whole_ids, ids)
    elif ids[:start] != sampled_ids:  # a chat's template opens a thought in one of the two
        start = len(commonprefix([sampled_ids, ids]))  # it takes any sequences
    ids = [*ids, stop_ids[0]]  # so that there is one
    end = next(i for i in range(start, len(ids)) if ids[i] in stop_ids)
    check_answer(tokenizer, completion, sampled_ids, ids, start, end)
    check_ids(tokenizer, new_messages, new_answered, ids[: end + 1])
    prompt_ids = prefix.ids + ids[:start]
    # A later turn is tokenised from the stop token on, where the template has written it.
    answer_start = len(commonprefix([new_asked, new_answered]))
    stop = new_answered.find(tokenizer.decode(ids[end]), answer_start)
    if is_chat and stop >= 0:
        text = prefix.text + new_answered[:stop]
        prefix = Prefix(text, prefix.ids + ids[:end], len(prompt) + 1)
    return prompt_ids, ids[start : end + 1], prefix
