"""Lengths from NumPy files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import error as StructError
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.lengths.collecting import Collector, LengthsError

_DAMAGED = (
    *(ValueError, TypeError, EOFError, OverflowError, KeyError, NotImplementedError, RuntimeError, SyntaxError),
    *(BadZipFile, zlib.error, TokenError, StructError),
)
"""What NumPy raises for files that are no arrays of numbers: cut off, overwritten, encrypted, of objects. A header is
Python source to it, so a damaged one fails in the tokenizer or the parser."""


def read_npy(path: Path) -> IntArray:
    """Sizes from one array ``[n]`` or ``[n, axes]``.

    Raises:
        LengthsError: the file holds something else.
    """
    found = _load(path)
    if not isinstance(found, np.ndarray):
        raise LengthsError(f"{path} holds several arrays, not one; give it a name that ends in .npz")
    return _from_array(path, found)


def read_npz(path: Path, choose: Callable[[Sequence[str]], list[str]]) -> IntArray:
    """Sizes from one array of an archive, or from one for each axis.

    Args:
        path: the file.
        choose: the arrays to read, given those that exist.

    Raises:
        LengthsError: the file is no archive, or an array holds something that is no size.
    """
    archive = _load(path)
    if isinstance(archive, np.ndarray):
        raise LengthsError(f"{path} holds one array, not an archive; give it a name that ends in .npy")
    with archive as arrays:
        names = choose(arrays.files)
        try:
            found = [arrays[name] for name in names]
        except _DAMAGED as error:
            raise LengthsError(f"{path} cannot be read: {error}") from error
    if len(found) == 1:
        return _from_array(path, found[0])
    if len({array.shape for array in found}) != 1 or found[0].ndim != 1:
        raise LengthsError(
            f"{path}: {', '.join(names)} have the shapes {[a.shape for a in found]}; each must be [n]"
        )
    return _from_array(path, np.stack(found, axis=-1))


def _load(path: Path) -> Any:
    try:
        # Memory-mapped: only what is looked at is read. Pickled objects could run code.
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except _DAMAGED as error:
        raise LengthsError(f"{path} is no NumPy file of numbers: {error}") from error


def _from_array(path: Path, sizes: np.ndarray[Any, Any]) -> IntArray:
    into = Collector(path, "row")
    into.add_many(sizes, 1)
    return into.result()
