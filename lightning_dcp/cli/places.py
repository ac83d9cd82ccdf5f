"""Where in a file a sample's length stands, for messages; looked up only when something is wrong there."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from lightning_dcp.lengths.tables import TABLES, is_headerless, separator_of

_ROWS = (".npy", ".npz", ".parquet", ".pq")
_JSON = (".jsonl", ".ndjson", ".json")


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
    # Only a newline ends a line, as for the reader: a cell in quotes may hold a carriage return.
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        lines = (text.rstrip("\r\n") for text in file)
        found = _lines_of_table(path, lines, column) if suffix in TABLES else _lines(lines, suffix not in _JSON)
        return f"line {next(islice(found, position, None))}"


def _lines(lines: Iterable[str], comments: bool) -> Iterator[int]:
    """Numbers of the lines that hold something."""
    for number, text in enumerate(lines, start=1):
        if (text.split("#", 1)[0] if comments else text).strip():
            yield number


def _lines_of_table(path: Path, lines: Iterator[str], column: str | None) -> Iterator[int]:
    """Numbers of the last lines of the rows; a table of numbers alone has no header and is read as text."""
    before = []
    for text in lines:
        before.append(text)
        if text:
            break
    rows = csv.reader(chain(before, lines), delimiter=separator_of(path, before[-1]))
    if column is None and is_headerless(next(csv.reader(before[-1:], delimiter=separator_of(path, before[-1])))):
        yield from _lines(chain(before, lines), comments=True)
        return
    next(row for row in rows if row)
    for row in rows:
        if row:
            yield rows.line_num
