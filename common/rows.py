"""The rows of a split of --dataset, as token ids. Those that cannot be used are counted."""

import re
import warnings
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from tqdm import tqdm

from common.model import RANK, WORLD_SIZE, all_gather
from common.tokens import UnusableRow

TEXT_TYPES = re.compile("(large_)?(string|list)|struct")  # the last two: chat messages


def load_rows(dataset: str, config: str | None, split: str, columns: set[str]) -> Dataset:
    """The rows of a split of --dataset, a file, a folder or a hub name, which must have these
    columns.
    """
    path, name = Path(dataset).absolute(), split.partition("[")[0]
    paths = [path / f"{name}.{kind}" for kind in ("jsonl", "json", "csv", "parquet")]
    files = [path for path in paths if path.is_file()]
    if len(files) > 1:
        raise ValueError(f"--dataset: {name} is several files, {[*map(str, files)]}: keep one")
    if path.is_file():  # `datasets` puts a single file into the split `train`
        files, name = [path], "train"
    if path.is_file() or (files and config is None and "+" not in split):
        # Without its name `datasets` would take all files with NAME in them.
        data_files = {name: escape(str(files[0]))}
        # Some columns make it believe that a file of json is the log of an agent.
        options = {"parse_agent_traces": False} if ".json" in files[0].name else {}
        rows = load_dataset(str(files[0].parent), data_files=data_files, split=split, **options)
    else:  # a name on the hub, or a folder that `datasets` searches for the split
        rows = load_dataset(dataset, config, split=split)
    if missing := columns - {*rows.column_names}:
        raise ValueError(f"no column {missing} in --dataset: it has {rows.column_names}")
    mixed = [name for name in rows.features if "'content': Json" in str(rows.features[name])]
    if mixed:  # there `datasets` reads a string "5" as the number 5
        raise ValueError(f"--dataset: in {mixed} the content of some messages is no string")
    return rows


@dataclass(eq=False)
class EncodedRows(Sequence):
    """The usable rows of a split as items. Their token ids are in memory, 4 bytes each; all else
    stays where `datasets` has it, on the disk, and is read with the item.
    """

    rows: Dataset
    to_item: Callable
    encoded: list[tuple[int, list[array]]]  # of each item the row's number and its token ids

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number, ids = self.encoded[index]
        return self.to_item(self.rows[number], *map(list, ids))

    def checksum(self) -> int:
        """CRC-32 of all rows and columns, by which --resume sees that they have changed."""
        checksum = 0
        for batch in self.rows.with_format("arrow").iter(1000):  # an image by its bytes
            checksum = zlib.crc32(repr(batch.to_pydict()).encode(), checksum)
        return checksum


def encode_rows(
    rows: Dataset,
    encode_row: Callable[[dict], list[list[int]]],
    to_item: Callable,
    tokenizer: Any,
    max_length: int,
    flag: str = "--max-length",
) -> EncodedRows:
    """The items of a split. `encode_row` returns lists: the ids of a prompt, or none, and what goes
    on after it, such as the ids of its completions; `to_item` makes an item of the row and these.
    Both may pop from the row. Rows that are unusable, or longer than `max_length`, the value of
    `flag`, are dropped and counted: a warning if most are, a ValueError if all are, or if a row
    fails otherwise. Prints the counts, the columns that are no text, and the first row. Each rank
    encodes a part of the rows.
    """
    split, encoded, dropped, longest = str(rows.split), [], Counter(), 0
    first, end = (len(rows) * rank // WORLD_SIZE for rank in (RANK, RANK + 1))
    mine = tqdm(rows.select(range(first, end)), split, disable=RANK > 0 or len(rows) < 5000)
    for number, row in enumerate(mine, first):
        try:
            ids = encode_row(row)
            length = len(ids[0]) + max(map(len, ids[1:]), default=0)
            longest = max(longest, length)
            if length > max_length:
                raise UnusableRow(f"longer than {flag}")
            encoded.append((number, [array("i", numbers) for numbers in ids]))
        except UnusableRow as reason:
            dropped[str(reason)] += 1
        except Exception as error:
            where = f"--dataset: row {number} of {split}"
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    encoded, longest = all_gather(encoded), max(all_gather([longest]))
    dropped = sum(all_gather([dropped]), Counter())
    report = f"{split}: {len(encoded)} rows, dropped {dict(dropped)}; longest {longest} tokens"
    if not encoded:
        raise ValueError(f"--dataset: no row is left of {report}")
    types = {column.name: str(column.type) for column in rows.features.arrow_schema}
    if no_text := {name: types[name] for name in types if not TEXT_TYPES.match(types[name])}:
        report += f"; no text in {no_text}"
    prompt_ids, *completions = map(list, encoded[0][1])
    text = tokenizer.decode(prompt_ids + completions[0] if completions else prompt_ids)
    if len(text) > 1000:
        text = f"{text[:500]} ... {text[-500:]}"
    print(f"{report}\n    {text!r}")
    if len(encoded) < dropped.total():
        warnings.warn(f"--dataset: MOST ROWS ARE LOST of {report}", stacklevel=2)
    return EncodedRows(rows, to_item, encoded)
