"""Readers of lengths: text, CSV, JSON lines, NumPy and Parquet files, a million samples in seconds."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_dcp.cost import IntArray
from lightning_dcp.lengths.arrays import read_npy, read_npz
from lightning_dcp.lengths.collecting import MAX_AXES, Collector, LengthsError, parse, whole_number
from lightning_dcp.lengths.parquet import read_parquet
from lightning_dcp.lengths.progress import bar
from lightning_dcp.lengths.tables import is_headerless, separator_of

Lines = Iterator[tuple[int, str]]
"""Numbers, from 1, and texts of the lines of a file."""


def read_lengths(source: str | Path, column: str | None = None, progress: bool = False) -> IntArray:
    """Sizes of the samples in a file, int64 ``[n]``, or ``[n, axes]`` where a sample has several.

    The ending of the name decides:

    - ``.npy`` and ``.npz``: an array ``[n]`` or ``[n, axes]``; ``column`` is the name of the array.
    - ``.jsonl``, ``.ndjson``, ``.json``: one JSON value on each line, a number, a list, or an object with ``column``.
      A ``.json`` that is one list alone is refused: it could be one sample or many.
    - ``.parquet``, ``.pq``: the column of a table (needs pyarrow).
    - ``.csv``, ``.tsv``: the column of a table with a header; without one as text. Semicolons may separate the cells.
    - anything else: text, one sample on each line, several axes separated by blanks, commas or ``x``; empty lines
      and what follows a ``#`` are skipped.

    Where there is only one column it need not be named; several, joined by commas (``frames,patches``), make a shape.
    A column may hold lists: of 1 to 3 integers they are shapes, longer ones are token ids and their length counts. The
    first list decides for the whole file; an empty one is refused.

    Args:
        source: the file.
        column: the column, or columns joined by commas.
        progress: show a progress bar on the standard error output.

    Raises:
        LengthsError: the file does not exist or cannot be read as what its name says, has no such column, or a
            sample's size is no integer from 1 to 2**31 - 1. The message names the line.
    """
    path = Path(source)
    if not path.is_file():
        kind = "is a directory" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise LengthsError(f"{path} {kind}; give a file of lengths: .txt, .csv, .jsonl, .npy, .npz or .parquet")
    reader = _READERS.get(path.suffix.lower(), _read_text)
    try:
        return reader(path, column, progress)
    except OSError as error:
        raise LengthsError(f"{path} cannot be read: {error}") from error


def _lines(path: Path, progress: bool) -> Lines:
    """Lines without their ends; a byte order mark is skipped."""
    with path.open("rb") as file, bar(path.stat().st_size, "B", progress) as shown:
        number = 0
        while chunk := file.readlines(1 << 20):
            for raw in chunk:
                number += 1
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise LengthsError(
                        f"{path}, line {number}: not UTF-8 ({error.reason}); save it as UTF-8"
                    ) from None
                yield number, text.rstrip("\r\n")
            shown.update(sum(map(len, chunk)))


def _read_text(path: Path, column: str | None, progress: bool) -> IntArray:
    if column is not None:
        raise LengthsError(
            f"{path} is read as text, which has no columns, so column={column!r} names none; leave it out, or give "
            "a file whose name ends in .csv, .jsonl, .npz or .parquet"
        )
    return _from_text(path, _lines(path, progress))


def _from_text(path: Path, lines: Lines) -> IntArray:
    into = Collector(path, "line")
    for number, line in lines:
        if "\r" in line:
            raise into.error(number, "a carriage return inside it; lines must end in a newline")
        text = line.split("#", 1)[0].strip() if "#" in line else line.strip()
        if text:
            into.add(parse(text, into, number), number)
    return into.result()


def _read_csv(path: Path, column: str | None, progress: bool) -> IntArray:
    into = Collector(path, "line")
    first = next((text for _, text in _lines(path, False) if text), "")
    lines = (text for _, text in _lines(path, progress))
    rows = csv.reader(lines, delimiter=separator_of(path, first), strict=True)
    try:
        header = [cell.strip() for cell in next((row for row in rows if row), [])]
        if column is None and is_headerless(header):
            return _from_text(path, _lines(path, progress))
        wanted = [header.index(name) for name in _wanted(path, column, header)]
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise into.error(rows.line_num, f"{len(row)} cells; the header has {len(header)}")
            into.add((size for k in wanted for size in _cell(row[k], into, rows.line_num)), rows.line_num)
    except csv.Error as error:
        raise into.error(rows.line_num, f"no CSV ({error})") from error
    return into.result()


def _cell(text: str, into: Collector, number: int) -> list[int]:
    if not text.strip():
        raise into.error(number, "an empty cell; every sample needs a size")
    return parse(text, into, number)


def _read_json_lines(path: Path, column: str | None, progress: bool) -> IntArray:
    into, values, lists = Collector(path, "line"), _Values(), 0
    for number, text in _lines(path, progress):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise into.error(number, f"no JSON value ({error}); each line must hold one") from error
        sizes: list[int] = []
        if isinstance(value, dict):
            for name in _wanted(path, column, list(value), number):
                sizes += values.sizes(value[name], into, number)
        elif column is not None:
            raise into.error(number, f"no object with the column {column!r}; leave the column out for bare values")
        else:
            sizes += values.sizes(value, into, number)
        into.add(sizes, number)
        lists += isinstance(value, list)
    found = into.result()
    if path.suffix.lower() == ".json" and len(found) == lists == 1:
        raise LengthsError(
            f"{path} is one list, which could be one sample or many; write one value on each line, and name it .jsonl"
        )
    return found


class _Values:
    """Sizes from numbers and lists; the first list decides what lists mean."""

    def __init__(self) -> None:
        self._are_shapes: bool | None = None

    def sizes(self, value: Any, into: Collector, number: int) -> Sequence[int]:
        """The sizes that a value stands for."""
        if not isinstance(value, list):
            return [whole_number(value, into, number)]
        if not value:
            raise into.error(number, "an empty list; a sample has at least one token")
        if self._are_shapes is None:
            numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
            self._are_shapes = numbers and len(value) <= MAX_AXES
        if not self._are_shapes:
            return [len(value)]
        if len(value) > MAX_AXES:
            raise into.error(
                number,
                f"a list of {len(value)}, but the first list had at most {MAX_AXES} integers and was read as a shape; "
                "where lists are token ids, store their number",
            )
        return [whole_number(v, into, number) for v in value]


def _read_npy(path: Path, column: str | None, _: bool) -> IntArray:
    if column is not None:
        raise LengthsError(f"{path} is one array without columns, so column={column!r} names none; leave it out")
    return read_npy(path)


def _read_npz(path: Path, column: str | None, _: bool) -> IntArray:
    return read_npz(path, lambda names: _wanted(path, column, names))


def _read_parquet(path: Path, column: str | None, progress: bool) -> IntArray:
    return read_parquet(path, lambda names: _wanted(path, column, names), progress)


def _wanted(path: Path, column: str | None, names: Sequence[str], line: int | None = None) -> list[str]:
    """Names of the columns to read."""
    if column is None and len(names) == 1:
        return list(names)
    wanted = (
        [] if column is None else [column] if column in names else [name.strip() for name in column.split(",")]
    )
    missing = [name for name in wanted if name not in names]
    where = f"{path}" if line is None else f"{path}, line {line}"
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise LengthsError(f"{where} has the column {twice[0]!r} more than once; rename one of them")
    if wanted and not missing:
        return wanted
    shown = ", ".join(names) or "none"
    if missing:
        raise LengthsError(f"{where} has no column {missing[0]!r}; it has {shown}")
    raise LengthsError(f"{where} has the columns {shown}; say which one holds the length (column=...)")


_READERS: dict[str, Callable[[Path, str | None, bool], IntArray]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
    ".pq": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
