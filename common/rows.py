"""The rows of a split of --dataset, as token ids. Those that cannot be used are counted."""

import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import load_dataset

from common.ranks import RANK, WORLD_SIZE, all_gather
from common.tokens import UnusableRow

ROWS_PER_WORKER = 2500  # for fewer it does not pay to start a process
FEATURES = datasets.Features(
    row=datasets.Value("int32"),  # its number in the split
    part=datasets.Value("int32"),  # number of the part, if the row is split
    ids=datasets.List(datasets.List(datasets.Value("int32"))),  # of the prompt, of each completion
    target=datasets.Value("uint32"),  # checksum of what else is trained on
    length=datasets.Value("int32"),  # of the longest sequence, in tokens
    dropped=datasets.Value("string"),  # the reason, if it is
)


def load_rows(dataset: str, config: str | None, split: str, columns: set[str]) -> datasets.Dataset:
    """The rows of a split of --dataset, a file, a folder or a hub name, which must have these
    columns.
    """
    path, name = Path(dataset).absolute(), split.partition("[")[0]
    paths = [path / f"{name}.{kind}" for kind in ("jsonl", "json", "csv", "parquet")]
    files = [escape(str(path)) for path in paths if path.is_file()]
    if path.is_file():  # `datasets` puts a single file into the split `train`
        rows = load_dataset(str(path.parent), data_files={"train": escape(str(path))}, split=split)
    elif files and config is None and "+" not in split:
        # Without their names `datasets` would take all files with NAME in them.
        rows = load_dataset(str(path), data_files={name: files}, split=split)
    else:  # a name on the hub, or a folder that `datasets` searches for the split
        rows = load_dataset(dataset, config, split=split)
    if missing := columns - {*rows.column_names}:
        raise ValueError(f"no column {missing} in --dataset: it has {rows.column_names}")
    return rows


@dataclass(eq=False)
class EncodedRows(Sequence):
    """The usable rows of a split as items. Their token ids are in memory, 4 bytes each; all else
    stays where `datasets` has it, on the disk, and is read with the item.
    """

    rows: datasets.Dataset
    split_row: Callable[[dict], list[dict]]
    to_item: Callable
    encoded: pa.Table  # see FEATURES; dropped ones have no ids
    usable: np.ndarray  # the places in it of rows that were not dropped

    def __len__(self) -> int:
        return len(self.usable)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = self.usable[range(len(self))[index]]
        row, part, ids = (self.encoded[name][index].as_py() for name in ("row", "part", "ids"))
        return self.to_item(self.split_row(self.rows[row])[part], *ids)

    def checksum(self) -> int:
        """CRC-32 of what is trained on, by which --resume sees that it has changed."""
        sequences = pc.list_flatten(self.encoded["ids"])
        checksum = zlib.crc32(self.encoded["target"].to_numpy())
        checksum = zlib.crc32(pc.list_value_length(sequences).to_numpy(), checksum)
        return zlib.crc32(pc.list_flatten(sequences).to_numpy(), checksum)


def encode_rows(
    rows: datasets.Dataset,
    encode_row: Callable[[dict], tuple[list[list[int]], Any]],
    to_item: Callable,
    tokenizer: Any,
    max_length: int,
    flag: str = "--max-length",
    split_row: Callable[[dict], list[dict]] = lambda row: [row],
) -> EncodedRows:
    """The items of a split: one per row, or one per part that `split_row` makes of it.
    `encode_row` returns the token ids of a prompt and of each of its completions, and what else is
    trained on; `to_item` makes an item of a row and these ids; both may pop from the row. Rows that
    are unusable, or longer than `max_length`, the value of `flag`, are dropped and counted: a
    warning if most are, a ValueError if all are, or if a row fails otherwise. Prints the counts and
    the first row. Each rank encodes a part of the rows, a large one in several processes.
    """
    split = str(rows.split)
    first = len(rows) * RANK // WORLD_SIZE
    mine = rows.select(range(first, len(rows) * (RANK + 1) // WORLD_SIZE))

    def encode_batch(batch: Any, numbers: list[int], worker: int | None) -> pa.Table:
        if worker:
            warnings.simplefilter("ignore")  # the first process says enough
        items = []
        for number, *values in zip(numbers, *batch.values(), strict=True):
            parts = split_row(dict(zip(batch, values, strict=True)))
            for part, row in enumerate(parts):
                ids, target, length, dropped = [], None, 0, None
                try:
                    ids, target = encode_row(row)
                    length = len(ids[0]) + max(map(len, ids[1:]), default=0)
                    if length > max_length:
                        raise UnusableRow(f"longer than {flag}")
                except UnusableRow as reason:
                    ids, dropped = [], str(reason)
                except Exception as error:
                    where = f"--dataset: row {first + number} of {split}"
                    raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
                items.append(
                    {
                        "row": first + number,
                        "part": part,
                        "ids": ids,
                        "target": zlib.crc32(repr(target).encode()),
                        "length": length,
                        "dropped": dropped,
                    }
                )
        return pa.Table.from_pylist(items, FEATURES.arrow_schema)

    cores = os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    workers = min(cores, len(mine) // ROWS_PER_WORKER)
    if RANK > 0 or len(mine) < 2 * ROWS_PER_WORKER:
        datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", module="dill")  # workers find the script's classes by name
    mapped = mine.map(
        encode_batch,
        with_indices=True,
        with_rank=True,
        batched=True,
        remove_columns=mine.column_names,
        features=FEATURES,
        keep_in_memory=True,
        load_from_cache_file=False,
        new_fingerprint="encoded",  # else a hash of all that is used
        num_proc=workers if workers > 1 else None,
        desc=split,
    )
    datasets.enable_progress_bars()
    tables = [table for table in all_gather([mapped.data.table]) if len(table)]
    encoded = pa.concat_tables([FEATURES.arrow_schema.empty_table(), *tables])
    dropped = Counter(encoded["dropped"].drop_null().to_pylist())
    longest = pc.max(encoded["length"]).as_py() or 0
    usable = encoded["dropped"].is_null().to_numpy().nonzero()[0]  # a filtered table is a copy
    report = f"{split}: {len(usable)} rows, dropped {dict(dropped)}; longest {longest} tokens"
    if not len(usable):
        raise ValueError(f"--dataset: no row is left of {report}")
    prompt_ids, *completions = encoded["ids"][usable[0]].as_py()
    text = tokenizer.decode(prompt_ids + completions[0] if completions else prompt_ids)
    if len(text) > 1000:
        text = f"{text[:500]} ... {text[-500:]}"
    print(f"{report}\n    {text!r}")
    if len(usable) < dropped.total():
        warnings.warn(f"--dataset: MOST ROWS ARE LOST of {report}", stacklevel=2)
    return EncodedRows(rows, split_row, to_item, encoded, usable)
