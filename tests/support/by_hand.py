"""The tables of enumerations on the pages, whose numbers are derived in tests."""

import re
from pathlib import Path

import pytest


def rows_of(page, header):
    """The rows of the table whose header starts so, by the first cell or, where that repeats, the
    first two."""
    _, _, rest = Path(page).read_text().partition(f"\n{header}")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    keys = [row[0] for row in rows]
    return {row[0] if keys.count(row[0]) == 1 else (row[0], row[1]): row for row in rows}


def numbers(cells):
    return [float(x) for cell in cells for x in re.findall(r"-?\d+\.?\d*", cell)]


def close(cells, expected, digits):
    """Each number of the cells is the expected one, rounded to its digits."""
    expected = [float(x) for x in expected]
    assert numbers(cells) == pytest.approx(expected, abs=0.501 * 10**-digits)
