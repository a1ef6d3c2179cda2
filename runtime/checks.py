"""What goes wrong with people's models, files, rows and chat templates, and would go on in silence:
an `if` for each. Skip it on a first reading: on good data a script trains the same without it.

A ValueError ends the run; an `UnusableRow` is dropped and counted; a warning is printed once. A new
kind is an `if` here, and a row of the tables in tests/common/test_checks.py.
"""

import ast
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unicodedata import normalize

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from runtime.chats import UnusableRow, message_text, special_tokens, template_message
from runtime.chats import template_words
from runtime.processes import RANK, WORLD_SIZE

# Types of models whose own states or caches count left padding, or cannot drop rows. If another one
# is sampled wrongly, `policy/sampling_kl` is high, and a warning says so.
NOT_SAMPLED = {"bart", "deepseek_v4", "falcon_mamba", "mamba", "minimax", "openai-gpt"}
NOT_SAMPLED |= {"recurrent_gemma", "rwkv", "xlnet", "xlstm"}
MAX_SAMPLING_KL = 0.003  # nats per token; rounding to bfloat16 alone gives about 0.0004
# pydantic would put its own address below a sentence of `__post_init__` that names the flag.
os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")


# --- flags ---------------------------------------------------------------------------------------
def check_flags(argv: list[str], resume: str | None) -> None:
    """The words of a command line, of which tyro takes the last of two alike."""
    flags = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    for flag in flags:
        if flags.count(flag) > 1 or (resume and flag != "--resume"):
            raise ValueError(f"{flag}: each flag once, none beside --resume: a run keeps its own")


# --- models --------------------------------------------------------------------------------------
def check_source(source: str) -> None:
    """Before a model is read from a folder or the hub."""
    flags = "--model, --reference, --reward-model, --teacher"
    if find_adapter_config_file(source):  # transformers would go on with the model below them
        raise ValueError(f"{flags}: merge the adapters in {source} first, see docs/lora.md")
    config, _ = PretrainedConfig.get_config_dict(source)
    quantisation = config.get("quantization_config")
    if quantisation and not quantisation.get("load_in_4bit"):
        raise ValueError(f"{flags}: {source} is quantised; give weights in 16 or 32 bits")


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """The value of --chat-template-kwargs, once the tokenizer is loaded."""
    source, flag = tokenizer.name_or_path, "--chat-template-kwargs"
    values = json.loads(text)
    if unknown := values.keys() - template_words(str(tokenizer.chat_template)):
        raise ValueError(f"{flag}: {source}'s chat template reads no {unknown}")
    strings = [value.lower() for value in values.values() if isinstance(value, str)]
    if {"true", "false"} & {*strings}:  # "false" is true
        raise ValueError(f"{flag}: true and false without quotes: {values}")


def check_tokenizer(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Before a model is loaded that is to read the ids of --model's tokenizer."""
    check_source(source)
    trained = AutoTokenizer.from_pretrained(source)
    if not tokenizer.get_vocab().items() <= trained.get_vocab().items():
        raise ValueError(f"the tokenizer of {source} is not that of --model")
    if trained.chat_template and trained.chat_template != tokenizer.chat_template:
        warnings.warn(f"{source} reads chats in the template of --model, not its own", stacklevel=3)


def check_model(
    model: Any, info: dict, tokenizer: Any, positions: int, new_head: bool = False
) -> None:
    """A loaded model, which is to read so many tokens; `info` says which weights it has."""
    source, config = model.name_or_path, model.config.get_text_config()
    missing, left_out = info["missing_keys"], info["unexpected_keys"]
    if new_head:  # in the place of the old one
        missing, left_out = {*missing} - {"score.weight"}, ()
    if missing or left_out:  # the missing would be random
        raise ValueError(f"{source}: its weights are not those of {type(model).__name__}: {info}")
    num_labels = getattr(getattr(model, "score", None), "out_features", 0)
    if type(model).__name__.endswith("ForSequenceClassification") and num_labels != 1:
        raise ValueError(f"{source}: no `score` head with one label, as --reward-model needs")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ValueError(f"{source}: the tokenizer has more tokens than the embedding")
    limit, reason = getattr(config, "max_position_embeddings", None) or positions, ""
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # of all layers, or of each type of layers
        # LongRoPE (Phi-3) rotates all rows in another way once one is longer than this.
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            limit = part["original_max_position_embeddings"]
            reason = ", beyond which LongRoPE changes"
    if positions > limit:
        needed = f"the {positions} of the --max flags"
        raise ValueError(f"{source} has fewer positions than {needed}: {limit}{reason}")


def check_training(args: Any, model: Any, stop_id: int | None = None) -> None:
    """Before a model is trained, to end its texts with `stop_id`."""
    if args.lora_rank > 0 and stop_id is not None and RANK == 0:  # others have no weights yet
        embedding = model.get_input_embeddings().weight  # frozen
        if (embedding == embedding[stop_id]).all(dim=1).sum() > 1:  # as of tokens never seen
            untrained = f"token {stop_id}, which ends texts, is untrained"
            warnings.warn(f"--lora-rank: {untrained}", stacklevel=2)


def check_4_bits(model: Any) -> None:
    """Before a model is sharded."""
    is_trained = any(weight.requires_grad for weight in model.parameters())
    has_adapters = hasattr(model, "peft_config")
    is_possible = WORLD_SIZE == 1 and (has_adapters or not is_trained)
    if getattr(model, "is_loaded_in_4bit", False) and not is_possible:
        source = f"--model {model.name_or_path} in 4 bits"
        raise ValueError(f"{source} needs --lora-rank above 0 and a single process")


def check_sampled(model: Any) -> None:
    """Before a model is sampled."""
    if model.config.model_type in NOT_SAMPLED:
        name = type(model).__name__
        raise ValueError(f"generate: {name} cannot read rows padded on the left, or drop rows")


def check_sampling_kl(kl: float) -> None:
    """KL(pi_sampler || pi_old), in nats per token, of a rollout: they should be the same."""
    if not kl <= MAX_SAMPLING_KL:  # or NaN
        difference = "the sampler's log-probs are not the policy's, see docs/pitfalls.md"
        warnings.warn(f"policy/sampling_kl {kl:.4f}: {difference}", stacklevel=3)


# --- files ---------------------------------------------------------------------------------------
@contextmanager
def checked_files(dataset: str, files: list[Path]) -> Iterator[None]:
    """While rows are read from the files, if these are known."""
    if len(files) > 1:
        raise ValueError(f"--dataset: a split is several files, {[*map(str, files)]}: keep one")
    with warnings.catch_warnings():
        # pandas would leave out the fields of a row that have no column.
        warnings.filterwarnings("error", message="Length of header")
        yield


def check_rows(rows: Any, columns: set[str], media: list[str]) -> None:
    """The rows of a split, once they are read."""
    if "__index_level_0__" in rows.column_names:  # all columns have moved by one
        raise ValueError("--dataset: a row has more fields than there are columns")
    mixed = [name for name, kind in rows.features.items() if "'content': Json" in str(kind)]
    if mixed:  # there `datasets` reads a string "5" as the number 5
        raise ValueError(f"--dataset: in {mixed} the content of some messages is no string")
    if media:
        warnings.warn(f"--dataset: pictures and sound are not read: {media}", stacklevel=3)
    if missing := columns - {*rows.column_names}:
        raise ValueError(f"no column {missing} in --dataset: it has {rows.column_names}")


def check_imports(file: Path) -> None:
    """A file of functions, before it is loaded: Python would go on with another module of the name
    of one in its folder, which it has or finds first.
    """
    folder, names = file.parent, set()
    for node in ast.walk(ast.parse(file.read_bytes(), file)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    for name in names:
        beside = [*folder.glob(f"{name}.py"), *folder.glob(f"{name}/*.py")]
        found = find_spec(name) if beside else None
        where = found and (found.origin or next(iter(found.submodule_search_locations)))
        if where and not Path(os.path.realpath(where)).is_relative_to(folder):
            raise ValueError(f"{file}: {name} is {beside[0]}, and also {where}: rename one")


# --- rows ----------------------------------------------------------------------------------------
def check_template_values(tokenizer: Any, values: dict) -> None:
    """What the columns of a row give to the chat template."""
    for name in values.keys() - template_words(str(tokenizer.chat_template)):
        unread = f"{tokenizer.name_or_path}'s chat template reads no {name!r}"
        warnings.warn(f"--dataset: {unread}", stacklevel=2)


def check_message(message: Any) -> None:
    """A chat message, as it stands in a row."""
    if not isinstance(message, dict) or not message.get("role"):
        raise ValueError(f"every chat message needs a role and a content, found {message!r:.200}")
    parts = message.get("content") or ""
    if isinstance(parts, str):
        return
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" for part in parts
    ):
        raise ValueError(f"only parts of type `text` can be read, found {parts!r:.200}")


def check_text(tokenizer: Any, text: Any, is_prompt: bool = False, first: int = 0) -> None:
    """A string, or chat messages from the `first` on, before they are tokens."""
    if not isinstance(text, str | list | None):  # a number of a csv, a single message
        raise ValueError(f"expected a string or a list of chat messages, found {text!r:.200}")
    messages = text if isinstance(text, list) else []
    for message in messages[first:]:
        check_message(message)
        if special_tokens(tokenizer).search(str(message)):  # it would end or begin a turn
            raise UnusableRow("with a special token in the text of a message")
    last = messages[-1] if messages else {}
    last_text = message_text(last) if messages else text
    if last_text and says_a_chat(last_text):
        found = f"a text that says a chat: make it a list of messages: {last_text[:200]!r}"
        if is_prompt:
            raise ValueError(f"--dataset: {found}")
        warnings.warn(f"--dataset: {found}", stacklevel=3)
    may_be_empty = last.get("tool_calls") or last.get("role") == "tool"
    if not may_be_empty and (not last_text or not last_text.strip()):
        raise UnusableRow("with an empty prompt or completion (in a csv also NA and null)")
    if is_prompt and last.get("role") == "assistant":
        raise UnusableRow("whose prompt ends with an assistant's turn")
    is_plain = isinstance(text, str) and not special_tokens(tokenizer).search(text)
    if is_prompt and is_plain and tokenizer.chat_template:  # no template has written it
        warnings.warn("--chat: without it string prompts get no chat template", stacklevel=4)


def says_a_chat(text: str) -> bool:
    """Whether a string is JSON, or Python, of a message, of a list of them, or of `messages` with
    such a list; also where it is in quotes a second time.
    """
    found = text.strip()
    if not found.startswith(("[", "{", '"', "'")):
        return False
    for parse in 2 * (json.loads, ast.literal_eval):
        with suppress(Exception):  # no text of this kind, or no text any more
            found = parse(found)
    if isinstance(found, dict):
        found = found.get("messages", [found])
    first = found[0] if found and isinstance(found, list) else None
    keys = {*first} if isinstance(first, dict) else set()
    return {"role", "content"} <= keys or {"from", "value"} <= keys


def check_ids(tokenizer: Any, text: str | list[dict], written: str, ids: list[int]) -> None:
    """The tokens of a string, or of what the chat template has written of messages."""
    if ids[:2] == 2 * [tokenizer.bos_token_id]:
        raise ValueError("two BOS at the start of the token ids")
    # A text comes back from its ids: what the user wrote, without white space beside special
    # tokens, which may take it with them.
    texts = [text] if isinstance(text, str) else [message_text(message) for message in text]
    pieces = [piece.strip() for text in texts for piece in special_tokens(tokenizer).split(text)]
    back = tokenizer.decode(ids)
    pieces = [piece for piece in pieces if piece not in back and piece in written]
    if not pieces:
        return
    # Characters that a tokenizer may write in another way are alike in NFKC; it may add spaces.
    lost = Counter(normalize("NFKC", "".join(pieces))) - Counter(normalize("NFKC", back))
    if any(character.isalnum() for character in lost):
        raise UnusableRow("with characters that the tokenizer of --model does not know")
    if lost and not hasattr(tokenizer, "losses_are_known"):
        tokenizer.losses_are_known = True  # one warning, not one for each row
        name = tokenizer.name_or_path
        warnings.warn(f"--dataset: the tokenizer of {name} loses {[*lost]}", stacklevel=3)


def check_written(tokenizer: Any, messages: str | list[dict], written: str) -> None:
    """What a template has written of messages: all that they say, as it stands or as JSON. It may
    leave out earlier answers, and thoughts.
    """
    if isinstance(messages, str):
        return
    name, words = tokenizer.name_or_path, template_words(str(tokenizer.chat_template))
    lost = []
    for message in map(template_message, messages):
        role, text = message["role"], message["content"]
        is_common = role in ("developer", "tool", "function", "ipython") and role in written
        if role not in {"system", "user", "assistant"} | words and not is_common:
            raise ValueError(f"the chat template of {name} knows no role {role!r}")
        is_written = text.strip() in written or json.dumps(text, ensure_ascii=False) in written
        if role != "assistant" and not is_written:
            raise ValueError(f"the chat template of {name} leaves out what {role!r} says")
        if text[:1].isspace() and text.strip() in written and text.rstrip() not in written:
            lost.append("trims the white space before a text, such as the indentation of code")
        known = {"role", "content", "weight", "tool_call_id"} | words
        lost += [f"reads no {key!r}" for key in message.keys() - known]  # `reasoning_content`
        calls = [call for call in message.get("tool_calls", []) if isinstance(call, dict)]
        for arguments in [call.get("function", call).get("arguments") for call in calls]:
            if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in written:
                lost.append("writes the arguments of a call as a quoted text: give an object")
    if role == "assistant":  # the last answer
        if not text.strip() and "tool_calls" not in words:
            raise UnusableRow("with a tool call instead of a text, which the template leaves out")
        thought, _, answer = text.rpartition("</think>")
        if answer.strip() not in written:
            raise UnusableRow("whose completion the chat template leaves out")
        if thought.rpartition("<think>")[2].strip() not in written:
            lost.append("leaves out the thought of a completion, which is not learned")
    for what in lost:
        warnings.warn(f"--dataset: {name}'s chat template {what}", stacklevel=2)


def check_turn(tokenizer: Any, prompt: Any, completion: Any, first: int) -> None:
    """A prompt and its completion; of messages, those before the `first` were looked at before."""
    check_text(tokenizer, prompt, is_prompt=True, first=first)
    check_text(tokenizer, completion)
    if isinstance(completion, list) and len(completion) > 1:
        raise UnusableRow("with a completion of several messages")
    if isinstance(completion, list) and completion[0]["role"] != "assistant":
        raise UnusableRow("whose completion is not an assistant's turn")


def check_apart(tokenizer: Any, whole_ids: list[int], ids: list[int]) -> None:
    """Ids of a text as a whole, and of its prompt and its answer one by one."""
    if tokenizer.decode(whole_ids) != tokenizer.decode(ids):  # such as a space between the two
        raise UnusableRow("whose answer is another text when it is tokenised by itself")


def check_answer(
    tokenizer: Any, completion: Any, sampled_ids: list[int], ids: list[int], start: int, end: int
) -> None:
    """A completion, ids[start : end + 1]. At the start these part from the ids of the prompt from
    which it is sampled; at the end is their first stop id.
    """
    is_chat = isinstance(completion, list)
    if start < len(sampled_ids) and not is_chat:
        raise UnusableRow("whose prompt's last token changes with the completion: a space?")
    if start < len(sampled_ids):  # the template opens a thought in sampled or trained answers alone
        sampled, trained = tokenizer.decode(sampled_ids[start:]), tokenizer.decode(ids[start:-1])
        answer = message_text(completion[0]).rpartition("</think>")[2].strip()
        if not answer or answer not in trained:
            raise UnusableRow("whose answer begins as the chat template's opening of a thought")
        opening = trained.partition(answer)[0]
        difference = f"an answer is sampled after {sampled!r}, trained after {opening!r}"
        warnings.warn(f"--chat-template-kwargs: {difference}", stacklevel=4)
    if is_chat and end == start:  # no token of what the message says
        raise UnusableRow("whose completion the chat template leaves out")
    if not is_chat and tokenizer.decode(ids[end + 1 :], skip_special_tokens=True).strip():
        raise UnusableRow("whose completion goes on after a stop id")
