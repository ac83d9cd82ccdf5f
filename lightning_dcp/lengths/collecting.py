"""Sizes as they come in from a file, checked one by one, each with its place."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.interpolation import MAX_TOKENS

ALLOWED = f"a size is an integer from 1 to {MAX_TOKENS}"
MAX_AXES = 3
"""Most numbers that are read as one shape; a longer list is the tokens of a sample."""


class LengthsError(ValueError):
    """A file of lengths cannot be read; the message names the file, the line or row, and what is allowed."""


class Collector:
    """Sizes of samples in the order of a file.

    Args:
        path: the file, for messages.
        place: what a sample is called there: ``line`` or ``row``.
    """

    def __init__(self, path: Path, place: str) -> None:
        self.path = path
        self.place = place
        self.axes = 0
        self._first = 0
        self._values = array("q")

    def add(self, sizes: Iterable[int], number: int) -> None:
        """One more sample.

        Args:
            sizes: integers on each axis.
            number: its line or row, from 1.

        Raises:
            LengthsError: a size out of range, or another number of axes than before.
        """
        found = tuple(sizes)
        tokens = 1
        for size in found:
            tokens *= size
            if not 1 <= size <= MAX_TOKENS:
                raise self.error(number, f"the size is {size}; {ALLOWED}")
        if tokens > MAX_TOKENS:
            raise self.error(number, f"the shape {found} has {tokens} tokens; allowed are up to {MAX_TOKENS}")
        if len(found) != self.axes or not found:
            self._start(found, number)
        self._values.extend(found)

    def add_many(self, sizes: np.ndarray[Any, Any], first: int) -> None:
        """Samples from an array ``[n]`` or ``[n, axes]`` of integers or whole floats; ``first`` is its first row."""
        if sizes.dtype.kind not in "iuf" or sizes.ndim not in (1, 2) or (sizes.ndim == 2 and not sizes.shape[1]):
            raise self.error(
                None,
                f"an array of shape {sizes.shape} and type {sizes.dtype}; {ALLOWED}, in an array [n] or [n, axes]",
            )
        rows = sizes if sizes.ndim == 2 else sizes[:, None]
        # Half precision cannot hold the bound.
        with np.errstate(invalid="ignore", over="ignore"):
            wrong = ~((rows >= 1) & (rows <= MAX_TOKENS) & (rows == np.floor(rows))).all(axis=1)
            wrong |= rows.astype(np.float64).prod(axis=1) > MAX_TOKENS
        if wrong.any():
            row = int(np.argmax(wrong))
            self.add((whole_number(value, self, first + row) for value in rows[row].tolist()), first + row)
        if len(rows):
            if rows.shape[1] != self.axes:
                self._start(tuple(rows[0].tolist()), first)
            self._values.frombytes(np.ascontiguousarray(rows, dtype=np.int64).tobytes())

    def result(self) -> IntArray:
        """All sizes, int64 ``[n]`` or ``[n, axes]``.

        Raises:
            LengthsError: there were none.
        """
        if not self._values:
            raise LengthsError(f"{self.path} holds no length; it must have at least one sample")
        values = np.frombuffer(self._values, dtype=np.int64)
        return values if self.axes == 1 else values.reshape(-1, self.axes)

    def error(self, number: int | None, what: str) -> LengthsError:
        """An error at a line or row, or about the file as a whole."""
        where = "" if number is None else f", {self.place} {number}"
        return LengthsError(f"{self.path}{where}: {what}")

    def _start(self, found: tuple[int, ...], number: int) -> None:
        if not found or len(found) > MAX_AXES:
            raise self.error(number, f"{len(found)} sizes; one sample has 1 to {MAX_AXES}, one for each axis")
        if self.axes:
            raise self.error(
                number,
                f"{len(found)} sizes, but {self.place} {self._first} has {self.axes}; all samples must have as many",
            )
        self.axes, self._first = len(found), number


def whole_number(value: Any, into: Collector, number: int) -> int:
    """An integer, or a float without a fraction.

    Raises:
        LengthsError: anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    # Infinity and NaN are no integers either; int() of them would raise another error.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise into.error(number, f"got {_short(value)}; {ALLOWED}")


def parse(text: str, into: Collector, number: int) -> list[int]:
    """The sizes of one sample: integers separated by blanks, commas, semicolons or ``x``.

    Raises:
        LengthsError: something that is no integer.
    """
    try:
        return [int(text)]
    except ValueError:
        fields = text.replace(",", " ").replace(";", " ").replace("x", " ").split()
    return [_field(field, text, into, number) for field in fields]


def _field(field: str, text: str, into: Collector, number: int) -> int:
    try:
        return int(field)
    except ValueError:
        pass
    try:
        return whole_number(float(field), into, number)
    except (ValueError, LengthsError):
        raise into.error(number, f"got {_short(text)}; {ALLOWED}, or several with blanks, commas or x") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
