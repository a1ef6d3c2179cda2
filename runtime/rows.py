"""The rows of a split of --dataset, as token ids. Those that cannot be used are counted."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

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
    of a row; it returns an item, and the token ids of its longest text, as of a pair. Rows that are
    unusable, or longer than `max_length`, the value of `flag`, are dropped and counted: a warning
    if most are, a ValueError if all are, or if a row fails otherwise. Prints the counts, the first
    text, and which columns are left: for the `reader`, or else for nobody. Each rank encodes a part
    of the rows.
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
