"""Token ids: padding, the ids that end a completion, and the way from texts and chats to ids."""

import json
from contextlib import suppress
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from runtime.chats import template_message
from runtime.checks import check_completion, check_completions, check_ids, check_source, check_text
from runtime.checks import check_template_kwargs


def load_tokenizer(source: str, chat_template_kwargs: str = "{}") -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name. Its chat template gets the values of a JSON object."""
    check_source(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    values = json.loads(chat_template_kwargs)
    check_template_kwargs(tokenizer, values)
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **values)
    return tokenizer


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


def pad_rows(rows: list[list[int]], device: Any, side: str = "right") -> tuple[Tensor, Tensor]:
    """Ids (B, L) of rows of different lengths, padded with 0, and a bool mask of the real ones."""
    tensors = [torch.LongTensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    ids = ids.to(device, non_blocking=True)
    return ids.clamp(min=0), ids >= 0  # padding is -1, since 0 or EOS may be real


def as_chat(text: Any, role: str = "user") -> Any:
    """A string as a chat of one message; chat messages as they are."""
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def encode(tokenizer: Any, text: Any, add_generation_prompt: bool = False) -> list[int]:
    """Token ids of a string, with the tokenizer's BOS and without an EOS that it appends, or of
    chat messages through the chat template.
    """
    check_text(tokenizer, text, add_generation_prompt)
    if isinstance(text, str):
        messages, written = [], text
        ids = tokenizer(text).input_ids
        if ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]  # a prompt that ends with EOS would be over
    else:
        messages = [template_message(message) for message in text]
        written = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        ids = tokenizer(written, add_special_tokens=False).input_ids
    check_ids(tokenizer, messages, written, ids)
    return ids


def encode_completions(
    tokenizer: Any, prompt: Any, completions: list, stop_ids: list[int]
) -> tuple[list[int], list[list[int]]]:
    """Token ids of a prompt and of each of its completions, which end with their first stop id. A
    completion is tokenised as one text with the prompt, and cut where it begins.
    """
    check_completions(tokenizer, prompt, completions)
    if any(isinstance(completion, list) for completion in completions):
        prompt = as_chat(prompt)
    if isinstance(prompt, list):
        completions = [as_chat(completion, "assistant") for completion in completions]
    sampled_ids = encode(tokenizer, prompt, add_generation_prompt=True)
    sequences = []
    for completion in completions:
        ids = encode(tokenizer, prompt + completion)
        start = len(commonprefix([sampled_ids, ids]))  # it takes any sequences
        ids = [*ids, stop_ids[0]]
        end = next(i for i in range(start, len(ids)) if ids[i] in stop_ids)
        check_completion(tokenizer, prompt, completion, sampled_ids, ids, start, end)
        sequences.append((start, ids[: end + 1]))
    # All completions share one prompt, which ends where the first of them begins.
    start = min(start for start, _ in sequences)
    return sampled_ids[:start], [ids[start:] for _, ids in sequences]
