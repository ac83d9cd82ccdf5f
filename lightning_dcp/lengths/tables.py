"""How tables of text are cut into cells; shared with those who say in which line a sample stands."""

from __future__ import annotations

from pathlib import Path

TABLES = (".csv", ".tsv")
"""Endings of files that are read as tables."""


def separator_of(path: Path, first_line: str) -> str:
    """What separates the cells: a tab in ``.tsv``, else a comma, or semicolons where the header has no comma.

    Spreadsheets write semicolons into ``.csv`` in countries with a decimal comma.

    Args:
        path: the file.
        first_line: its first line that is not empty.
    """
    if path.suffix.lower() == ".tsv":
        return "\t"
    return ";" if ";" in first_line and "," not in first_line else ","


def is_headerless(header: list[str]) -> bool:
    """Whether the first row holds numbers only and is a sample itself."""
    return bool(header) and all(map(_is_number, header))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
