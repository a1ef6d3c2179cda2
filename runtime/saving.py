"""What a run writes: checkpoints, whole weights, a line of rollouts.jsonl; and what --resume needs
beside a checkpoint: the order of the data, and whether they are still the same.
"""

import os
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.decoders import DecodeStream
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from transformers import GenerationConfig, PreTrainedModel

from runtime.adapters import adapter_layers, base_of, merge_adapter
from runtime.functions import FILES
from runtime.processes import RANK, WORLD_SIZE, from_rank_0

# What a checkpoint has: whole tensors on rank 0, of what is trained alone.
CHECKPOINT_OPTIONS = dcp.StateDictOptions(
    full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False
)


def lock_run(run_dir: Path) -> None:
    """Refuse a second process that would write into a run's folder. The lock on its file `lock`
    ends with the process, also with one that is killed; a process may take its own again.
    """
    if RANK > 0:
        return
    file = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT)  # closing it would end the lock
    try:
        import fcntl  # not on Windows

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked children would keep that of flock
    except (BlockingIOError, PermissionError) as error:
        raise RuntimeError(f"--resume {run_dir}: another process is still at this run") from error
    except (ImportError, OSError) as error:
        reason = f"no second process is refused: {error}"
        warnings.warn(f"--resume {run_dir}: {reason}", stacklevel=3)


def shuffled(items: list, seed: int, skip: int) -> Iterator:
    """The items, endlessly, each time in another random order; the first `skip` are left out."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(items), generator=rng)
        yield from (items[i] for i in order[skip:])
        skip = max(skip - len(items), 0)


def checksum(items: list, *sources: str | None) -> int:
    """CRC-32 of items as they are encoded, and of what is read of models in folders, their adapters
    and bases: by it --resume sees that they have changed. Rank 0 computes it for all.
    """
    value, folders = 0, []
    for source in filter(None, sources):
        folders += [source, f"{source}/adapter", base_of(source)]
    for item in items if RANK == 0 else ():
        value = zlib.crc32(repr(item).encode(), value)
    for folder in filter(None, folders if RANK == 0 else ()):
        for path in sorted(Path(folder).glob("*")):
            if path.suffix in (".safetensors", ".bin", ".json", ".jinja"):
                with path.open("rb") as file:
                    while piece := file.read(2**24):
                        value = zlib.crc32(piece, value)
    return from_rank_0(value)


def write_checkpoint(path: Path, training: dict[str, tuple], state: dict) -> None:
    """`torch.save` of the state and, by name, of each model and optimizer, beside the old file,
    which the new one replaces once it is on the disk: a kill at any moment leaves one intact.
    """
    state = state | {"functions": FILES}
    for key, (model, optimizer) in training.items():  # all ranks
        weights, moments = dcp.get_state_dict(model, optimizer, options=CHECKPOINT_OPTIONS)
        state[key] = {name: weights[name] for name in moments.get("state", [])}, moments
    if RANK > 0:
        return
    lock_run(path.parent)
    beside = path.with_suffix(".tmp")
    try:
        torch.save(state, beside)
        with open(beside, "rb+") as file:
            os.fsync(file)
    except (OSError, RuntimeError) as error:  # torch does not say that a disk is full
        beside.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written, is the disk full? {error}") from error
    os.replace(beside, path)


def read_checkpoint(path: Path, training: dict[str, tuple], data: int) -> dict:
    """Load what `write_checkpoint` has written into models and optimizers; returns the state. Its
    `data`, a checksum, must be the same. Warns of changed reward functions and environments:
    whoever mends one that has crashed wants to go on.
    """
    lock_run(path.parent)
    try:  # a mapped file keeps its place on the disk until the run ends, where weights are its own
        state = torch.load(path, weights_only=True, mmap=torch.cuda.is_available())
    except (EOFError, RuntimeError, OSError) as error:
        raise OSError(f"{path} cannot be read, was it cut off? {error}") from error
    if state["data"] != data:
        raise ValueError(f"--resume {path.parent}: its training rows or its models have changed")
    for file, crc in state.get("functions", {}).items():
        if FILES.get(file, crc) != crc:
            warnings.warn(f"--resume {path.parent}: {file} has changed since", stacklevel=3)
    for key, (model, optimizer) in training.items():
        weights, moments = state.pop(key)
        if dcp.set_model_state_dict(model, weights, options=CHECKPOINT_OPTIONS).unexpected_keys:
            raise ValueError(f"--resume {path.parent}: its weights are not those of its --model")
        dcp.set_optimizer_state_dict(model, optimizer, moments, options=CHECKPOINT_OPTIONS)
    return state


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """After training: whole weights, for `from_pretrained`. Adapters are merged into them, in
    float32; `adapter/` has these alone, by peft's names, and the heads that were trained.
    """
    if hasattr(model, "peft_config"):
        save_adapter(model, folder / "adapter")  # first: not lost if there is no memory to merge it
        if WORLD_SIZE == 1:
            model.cpu()  # float32 takes more: a GPU of 12 GB that trains 7B in 4 bits has not 26
        if getattr(model, "is_loaded_in_4bit", False):
            for weight in model.parameters():
                if hasattr(weight, "quant_state"):
                    weight.quant_state.dtype = torch.float32  # not rounded to the checkpoint's type
            model.dequantize(torch.float32)
            model.is_loaded_in_4bit = False
        model.float()  # frozen weights were bfloat16
        for layer in adapter_layers(model):
            merge_adapter(layer)
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = dcp.get_model_state_dict(model, options=options)  # all ranks
    weights = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):  # a tied weight once
        if name in gathered and "lora_" not in name:
            weights[name.replace(".base_layer", "")] = gathered[name]
    if RANK == 0:
        rope = getattr(model.config, "rope_parameters", None) or {}
        if "rope_theta" in rope:  # where transformers 4 and llama.cpp look for it
            model.config.rope_theta = rope["rope_theta"]
        model.save_pretrained(folder, state_dict=weights)
        for file in folder.rglob("*.safetensors"):  # which only their owner could read
            shutil.copymode(folder / "config.json", file)


def save_model(run_dir: Path, model: Any, tokenizer: Any, stop_ids: list[int]) -> None:
    """Write the model into the run's folder, for `from_pretrained` and --model."""
    # Not the base model's: that may ask for top-k, or be one that transformers refuses to save.
    config = GenerationConfig(eos_token_id=stop_ids, pad_token_id=tokenizer.pad_token_id)
    model.generation_config = config
    save_weights(model, run_dir)  # all ranks
    if RANK == 0:
        tokenizer.save_pretrained(run_dir)
    print(f"model: {run_dir} (docs/viewer.html shows the run)", flush=True)


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """A, B and heads: what was trained."""
    gathered = dcp.get_model_state_dict(model, options=CHECKPOINT_OPTIONS)  # all ranks
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    if RANK == 0:
        names = {"base_model.model." + name.replace(".default", ""): name for name in trained}
        model.peft_config["default"].save_pretrained(folder)
        weights = {in_peft: gathered[name] for in_peft, name in names.items()}
        save_file(weights, folder / "adapter_model.safetensors")


def rollout_row(tokenizer: Any, sequences: list, columns: dict[str, Tensor]) -> dict[str, list]:
    """A line of rollouts.jsonl: of each pair (prompt, completion) of ids the texts, its number in
    each column (B,), and its numbers per token in columns (B, T), to three decimals. The text of a
    character that takes several tokens stands at the last of them.
    """
    rows = []
    for i, (prompt_ids, ids) in enumerate(sequences):
        stream, tokens = DecodeStream(skip_special_tokens=False), []
        try:
            for t, token in enumerate(ids):
                tokens.append(stream.step(tokenizer.backend_tokenizer, token) or "")
                if t >= 15 and not any(tokens[-16:]):  # no characters, which have at most 4 bytes
                    tokens[-1] = tokenizer.decode(ids[t - 15 : t + 1])
                    stream = DecodeStream(skip_special_tokens=False)  # the old one reads all again
        except Exception:  # bytes that are no character, of a tokenizer that falls back to bytes
            tokens = tokenizer.convert_ids_to_tokens(ids)
        row = {"prompt": tokenizer.decode(prompt_ids), "tokens": tokens}
        for name, values in columns.items():
            numbers = values[i, : len(ids)] if values.dim() == 2 else values[i]
            row[name] = numbers.double().round(decimals=3).tolist()
        rows.append(row)
    return {"completions": rows}
