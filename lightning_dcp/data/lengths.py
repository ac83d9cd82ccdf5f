"""Readers of lengths: the shape of every sample of a dataset, from the cheapest source that knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import ConcatDataset, Subset
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from lightning_dcp.cost import IntArray
from lightning_dcp.data.randomness import isolated
from lightning_dcp.plan import Shape

Lengths = str | Sequence[int] | Sequence[Sequence[int]] | np.ndarray[Any, Any] | Callable[[Any], Any]
"""A column name, one length (or shape) per sample, or a function of the dataset that returns them."""

ATTRIBUTES = ("lengths", "shapes")
COLUMN = "length"
SEQUENCE_KEY = "input_ids"


def read_shapes(dataset: Any, lengths: Lengths | None = None) -> IntArray:
    """Shapes of all samples, int64 ``[n, axes]``.

    The first source that exists is taken: ``lengths``; the attribute ``lengths`` or ``shapes`` of the dataset; its
    column ``length``; else every sample is read once and measured, with a progress bar on rank 0.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        lengths: see :data:`Lengths`.

    Raises:
        ValueError: the dataset is empty or has no length, the numbers are no integers from 1, there are not
            as many as samples, or a sample has nothing that could be measured. The sentence names the sample.
    """
    size = dataset_size(dataset)
    known = known_shapes(dataset, lengths)
    if known is not None:
        return check_shapes(known, size)
    return check_shapes(_scan(dataset, size), size)


def known_shapes(dataset: Any, lengths: Lengths | None = None) -> Any:
    """Shapes from a source that costs no reading of samples, unchecked; ``None`` where there is none."""
    if isinstance(dataset, Subset) and (lengths is None or isinstance(lengths, str)):
        whole = known_shapes(dataset.dataset, lengths)
        return None if whole is None else np.asarray(whole)[list(dataset.indices)]
    if isinstance(lengths, str):
        column = _column(dataset, lengths)
        if column is None:
            column = _indexed(dataset, lengths)
        if column is None:
            raise ValueError(
                f'the dataset has no column "{lengths}"; name one that dataset["..."] returns, or pass the '
                "lengths themselves or a function of the dataset"
            )
        return column
    if callable(lengths):
        return lengths(dataset)
    if lengths is not None:
        return lengths
    if isinstance(dataset, ConcatDataset):
        parts = [known_shapes(part) for part in dataset.datasets]
        return (
            None if any(part is None for part in parts) else np.concatenate([np.asarray(part) for part in parts])
        )
    for name in ATTRIBUTES:
        found = getattr(dataset, name, None)
        if found is not None and not callable(found):
            return found
    return _column(dataset, COLUMN)


def dataset_size(dataset: Any) -> int:
    """Number of samples.

    Raises:
        ValueError: the dataset is empty, or is a stream without a length.
    """
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ValueError(
            f"{type(dataset).__name__} has no length; a dataset with __len__ and __getitem__ is needed, since all "
            "samples of a step are known before it is planned"
        ) from error
    if size == 0:
        raise ValueError(f"the dataset ({type(dataset).__name__}) is empty; it needs at least one sample")
    return int(size)


def check_shapes(values: Any, size: int) -> IntArray:
    """Turn lengths ``[n]`` or shapes ``[n, axes]`` into int64 ``[n, axes]``.

    Raises:
        ValueError: see :func:`read_shapes`.
    """
    try:
        array = np.asarray(values)
        if array.dtype == object:
            raise ValueError("they are of several kinds or of different numbers of axes")
    except ValueError as error:
        raise ValueError(
            f"the lengths are no table of numbers: {error}. Give one integer, or one row of integers, per sample"
        ) from error
    if array.ndim not in (1, 2) or len(array) != size:
        raise ValueError(
            f"the lengths have the shape {array.shape} for {size} samples; give one integer, or one row of "
            "integers, per sample"
        )
    table = array.reshape(size, -1)
    if table.shape[1] == 0 or not np.issubdtype(table.dtype, np.number):
        raise ValueError(f"the lengths are of type {array.dtype}; they must be integers of at least 1")
    wrong = ~(table >= 1) | (table != np.floor(table)) | ~np.isfinite(table)
    if wrong.any():
        sample = int(np.flatnonzero(wrong.any(axis=1))[0])
        raise ValueError(
            f"sample {sample} has the length {_plain(table[sample])}; lengths must be integers of at least 1. "
            "Remove empty samples from the dataset"
        )
    return np.ascontiguousarray(table, dtype=np.int64)


def shape_of(row: IntArray) -> Shape:
    """A row of the table as a tuple of plain integers."""
    return tuple(int(axis) for axis in row)


def measure(sample: Any, axes: int = 1) -> Shape | None:
    """Shape of one sample: of ``input_ids``, else of the first value that has at least ``axes`` axes."""
    fields = _fields(sample)
    names = [SEQUENCE_KEY, *fields] if SEQUENCE_KEY in fields else list(fields)
    for name in names:
        shape = _shape(fields[name])
        if len(shape) >= axes:
            return shape[:axes]
    return None


def _fields(sample: Any) -> Mapping[Any, Any]:
    """The values of a sample by name; those of a tuple or a dataclass by their place."""
    if isinstance(sample, Mapping):
        return sample
    if is_dataclass(sample):
        return vars(sample)
    if isinstance(sample, tuple) and not all(isinstance(value, Number) for value in sample):
        return dict(enumerate(sample))
    return {SEQUENCE_KEY: sample}


def _scan(dataset: Any, size: int) -> list[Shape]:
    shapes = []
    silent = getattr(rank_zero_only, "rank", 0) != 0
    with isolated():
        for index in tqdm(range(size), desc="reading lengths", unit="sample", disable=silent):
            shape = measure(dataset[index])
            if shape is None:
                raise ValueError(
                    f"sample {index} holds no tensor, array or list whose length could be measured; give the "
                    "lengths (lengths=...) or override sample_shapes"
                )
            shapes.append(shape)
    return shapes


def _column(dataset: Any, name: str) -> Any:
    """A column of a table-like dataset; ``None`` where the dataset has no such column."""
    names = getattr(dataset, "column_names", None)
    if names is not None:
        # A lazy column gives one row after the other unless it is asked for all of them.
        return dataset[name][:] if name in names else None
    return dataset.get(name) if isinstance(dataset, Mapping) else None


def _indexed(dataset: Any, name: str) -> Any:
    """What indexing with a name returns; only on request, as a dataset may ignore its index."""
    try:
        with isolated():
            return dataset[name]
    except Exception:
        # An ordinary dataset is indexed by numbers; how it refuses a name is up to its author.
        return None


def _shape(value: Any) -> Shape:
    if isinstance(value, torch.Tensor | np.ndarray):
        return tuple(int(axis) for axis in value.shape)
    if isinstance(value, list | tuple):
        return (len(value), *_shape(value[0])) if value else (0,)
    return ()


def _plain(row: Any) -> Any:
    numbers = [value.item() for value in row]
    return numbers[0] if len(numbers) == 1 else tuple(numbers)
