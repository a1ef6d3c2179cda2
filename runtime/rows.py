"""The rows of a split of --dataset, as token ids. Those that cannot be used are counted."""

import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence, Iterator
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from tqdm import tqdm

from runtime.adapters import base_of
from runtime.chats import UnusableRow, template_values
from runtime.checks import check_rows, check_template_values, checked_files
from runtime.processes import RANK, WORLD_SIZE, all_gather, from_rank_0

READER_OPTIONS = {
    ".csv": {"index_col": False},  # else a field too many in the first row moves all columns by one
    ".tsv": {"index_col": False},
    ".json": {"parse_agent_traces": False},  # else some columns make it the log of an agent
}


def load_rows(
    dataset: str, config: str | None, split: str, columns: set[str], answer_column: str = "answer"
) -> Dataset:
    """The rows of a split of --dataset, a file, a folder or a hub name, which must have these
    columns. Pictures and sound are left out: nothing here reads them. The column of an answer is
    renamed to `answer`.
    """
    path, split_name = Path(dataset).absolute(), split.partition("[")[0]
    candidates = [
        path / f"{split_name}.{kind}" for kind in ("jsonl", "json", "csv", "tsv", "parquet")
    ]
    files = [file for file in candidates if file.is_file()]
    if path.is_file():  # `datasets` puts a single file into the split `train`
        files, split_name = [path], "train"
    source, options = dataset, {"name": config}  # a hub name, or a folder searched for the split
    if path.is_file() or (files and config is None and "+" not in split):
        # Without its name `datasets` would take all files with NAME in them.
        source, options = str(files[0].parent), {"data_files": {split_name: escape(str(files[0]))}}
        suffix = Path(files[0].name.removesuffix(".gz")).suffix.replace("jsonl", "json")
        options |= READER_OPTIONS.get(suffix, {})
    with checked_files(dataset, files):
        rows = load_dataset(source, split=split, **options)
    types = {column: str(feature) for column, feature in rows.features.items()}
    media = [column for column in types if re.search(r"\b(Image|Audio|Video|Pdf)\(", types[column])]
    rows = rows.remove_columns(media)
    check_rows(rows, columns, media)
    return rows if answer_column == "answer" else rows.rename_column(answer_column, "answer")


def encode_rows(
    rows: Dataset,
    encode_row: Callable[[dict], tuple[Any, Sequence[int]]],
    tokenizer: Any,
    max_length: int,
    flag: str = "--max-length",
    most: int | None = None,
    reader: str | None = None,
) -> list:
    """The items of a split, at most the first `most`. `encode_row` pops the columns that it reads
    of a row; it returns an item, and the token ids of its longest text. Rows that are unusable, or
    longer than `max_length`, the value of `flag`, are dropped and counted: a warning if most are, a
    ValueError if all are, or if a row fails otherwise. Prints the counts, the columns that are left
    for a `reader`, or for nobody, and the first text. Each rank encodes a part of the rows.
    """
    split, dropped, longest = str(rows.split), Counter(), 0  # the longest also of those dropped
    items, first_ids, left = [], [], []
    apply_chat_template = tokenizer.apply_chat_template
    first, end = (len(rows) * rank // WORLD_SIZE for rank in (RANK, RANK + 1))
    mine = tqdm(rows.select(range(first, end)), split, disable=RANK > 0 or len(rows) < 5000)
    for number, row in enumerate(mine, first):
        if len(items) == most:
            break
        try:
            values = template_values(row) if tokenizer.chat_template else {}
            check_template_values(tokenizer, values)
            tokenizer.apply_chat_template = partial(apply_chat_template, **values)
            item, ids = encode_row(row)
            longest = max(longest, len(ids))
            if len(ids) > max_length:
                raise UnusableRow(f"longer than {flag}")
            items.append(item)
            first_ids = first_ids or list(ids)
            left = [*row]
        except UnusableRow as reason:
            dropped[str(reason)] += 1
        except Exception as error:
            where = f"--dataset: row {number} of {split}"
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    tokenizer.apply_chat_template = apply_chat_template
    items, longest = all_gather(items)[:most], max(all_gather([longest]))
    dropped = sum(all_gather([dropped]), Counter())
    report = f"{split}: {len(items)} rows, dropped {dict(dropped)}; longest {longest} tokens"
    if not items:
        raise ValueError(f"--dataset: no row is left of {report}")
    types = {column.name: str(column.type) for column in rows.features.arrow_schema}
    if left and reader:
        types = {name: types[name] for name in left}
        report += f"; for {reader}: {types}"
    elif left:
        report += f"; not read: {left}"
    text = tokenizer.decode(next(ids for ids in all_gather([first_ids]) if ids))
    if len(text) > 1000:
        text = f"{text[:500]} ... {text[-500:]}"
    print(f"{report}\n    {text!r}")
    if len(items) < dropped.total():
        warnings.warn(f"--dataset: MOST ROWS ARE LOST of {report}", stacklevel=2)
    return items


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
