"""Where in a file a sample's length stands, for messages; looked up only when something is wrong there."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

_ROWS = (".npy", ".npz", ".parquet", ".pq")
_JSON = (".jsonl", ".ndjson", ".json")
_TABLES = {".csv": ",", ".tsv": "\t"}


def place_of(path: Path, position: int, column: str | None = None) -> str:
    """``line 17`` or ``row 17`` of a sample, counted from 1 as :func:`lightning_dcp.lengths.read_lengths` does.

    Args:
        path: a file that was read without an error.
        position: position of the sample, from 0.
        column: the column that was read.
    """
    suffix = path.suffix.lower()
    if suffix in _ROWS:
        return f"row {position + 1}"
    with path.open(encoding="utf-8-sig") as file:
        if suffix in _TABLES:
            found = _lines_of_table(file, _TABLES[suffix], column)
        else:
            comment = "" if suffix in _JSON else "#"
            found = _lines(file, comment)
        return f"line {next(islice(found, position, None))}"


def _lines(file: Iterator[str], comment: str) -> Iterator[int]:
    """Numbers of the lines that hold something."""
    for number, text in enumerate(file, start=1):
        if (text.split(comment, 1)[0] if comment else text).strip():
            yield number


def _lines_of_table(file: Iterator[str], separator: str, column: str | None) -> Iterator[int]:
    """Numbers of the last lines of the rows; a table of numbers alone has no header."""
    rows = csv.reader(file, delimiter=separator)
    header = next(row for row in rows if row)
    if column is None and all(_is_number(cell) for cell in header):
        yield rows.line_num
    for row in rows:
        if row:
            yield rows.line_num


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
