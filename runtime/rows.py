"""The rows of a split of --dataset, as token ids. Those that cannot be used are counted."""

import re
import warnings
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from tqdm import tqdm

from runtime.chats import UnusableRow, template_values
from runtime.checks import check_rows, check_template_values, checked_files
from runtime.processes import RANK, WORLD_SIZE, all_gather

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
    path, name = Path(dataset).absolute(), split.partition("[")[0]
    paths = [path / f"{name}.{kind}" for kind in ("jsonl", "json", "csv", "parquet")]
    files = [path for path in paths if path.is_file()]
    if path.is_file():  # `datasets` puts a single file into the split `train`
        files, name = [path], "train"
    source, options = dataset, {"name": config}  # a hub name, or a folder searched for the split
    if path.is_file() or (files and config is None and "+" not in split):
        # Without its name `datasets` would take all files with NAME in them.
        source, options = str(files[0].parent), {"data_files": {name: escape(str(files[0]))}}
        for kind in READER_OPTIONS:
            options |= READER_OPTIONS[kind] if kind in files[0].name else {}  # also .jsonl.gz
    with checked_files(dataset, files):
        rows = load_dataset(source, split=split, **options)
        rows.data.validate(full=True)  # until here any bytes are a text
    types = {name: str(feature) for name, feature in rows.features.items()}
    media = [name for name in types if re.search(r"\b(Image|Audio|Video|Pdf)\(", types[name])]
    rows = rows.remove_columns(media)
    check_rows(dataset, rows, columns, answer_column, media)
    return rows if answer_column == "answer" else rows.rename_column(answer_column, "answer")


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

    def checksum(self, *models: str | None) -> int:
        """CRC-32 of all rows and columns, and of the weights in folders of models, by which
        --resume sees that they have changed.
        """
        checksum = 0
        for batch in self.rows.with_format("arrow").iter(1000):  # an image by its bytes
            checksum = zlib.crc32(repr(batch.to_pydict()).encode(), checksum)
        for folder in filter(None, models):
            for file in sorted(Path(folder).glob("*.safetensors")):
                checksum = zlib.crc32(np.memmap(file, mode="r"), checksum)
        return checksum


def encode_rows(
    rows: Dataset,
    encode_row: Callable[[dict], list[list[int]]],
    to_item: Callable,
    tokenizer: Any,
    max_length: int,
    flag: str = "--max-length",
    rest: str | None = None,
) -> EncodedRows:
    """The items of a split. `encode_row` pops the columns that it reads; it returns lists: the ids
    of a prompt, or none, and what goes on after it, such as the ids of its completions. `to_item`
    makes an item of the row and these. Rows that are unusable, or longer than `max_length`, the
    value of `flag`, are dropped and counted: a warning if most are, a ValueError if all are, or if
    a row fails otherwise. Prints the counts, the columns that are left for `rest`, or for nobody,
    and the first row. Each rank encodes a part of the rows.
    """
    split, encoded, dropped, longest, left = str(rows.split), [], Counter(), 0, []
    apply_chat_template = tokenizer.apply_chat_template
    first, end = (len(rows) * rank // WORLD_SIZE for rank in (RANK, RANK + 1))
    mine = tqdm(rows.select(range(first, end)), split, disable=RANK > 0 or len(rows) < 5000)
    for number, row in enumerate(mine, first):
        try:
            values = template_values(row) if tokenizer.chat_template else {}
            check_template_values(tokenizer, values)
            tokenizer.apply_chat_template = partial(apply_chat_template, **values)
            ids = encode_row(row)
            length = len(ids[0]) + max(map(len, ids[1:]), default=0)
            longest = max(longest, length)
            if length > max_length:
                raise UnusableRow(f"longer than {flag}")
            encoded.append((number, [array("i", numbers) for numbers in ids]))
            left = [*row]
        except UnusableRow as reason:
            dropped[str(reason)] += 1
        except Exception as error:
            where = f"--dataset: row {number} of {split}"
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    tokenizer.apply_chat_template = apply_chat_template
    encoded, longest = all_gather(encoded), max(all_gather([longest]))
    dropped = sum(all_gather([dropped]), Counter())
    report = f"{split}: {len(encoded)} rows, dropped {dict(dropped)}; longest {longest} tokens"
    if not encoded:
        raise ValueError(f"--dataset: no row is left of {report}")
    types = {column.name: str(column.type) for column in rows.features.arrow_schema}
    if left and rest:
        types = {name: types[name] for name in left}
        report += f"; for {rest}: {types}"
    elif left:
        report += f"; not read: {left}"
    prompt_ids, *completions = map(list, encoded[0][1])
    text = tokenizer.decode(prompt_ids + completions[0] if completions else prompt_ids)
    if len(text) > 1000:
        text = f"{text[:500]} ... {text[-500:]}"
    print(f"{report}\n    {text!r}")
    if len(encoded) < dropped.total():
        warnings.warn(f"--dataset: MOST ROWS ARE LOST of {report}", stacklevel=2)
    return EncodedRows(rows, to_item, encoded)
