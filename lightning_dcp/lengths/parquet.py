"""Lengths from a column of a Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.lengths.collecting import ALLOWED, MAX_AXES, Collector, LengthsError
from lightning_dcp.lengths.progress import bar

_ROWS = 1 << 16


def read_parquet(path: Path, choose: Callable[[Sequence[str]], list[str]], progress: bool) -> IntArray:
    """Sizes from one column, or one for each axis, int64 ``[n]`` or ``[n, axes]``.

    Args:
        path: the file.
        choose: the columns to read, given those that exist.
        progress: show a progress bar.

    Raises:
        LengthsError: pyarrow is missing, the file is no Parquet file, or holds something that is no size.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise LengthsError(
            f"{path} is a Parquet file, and reading one needs pyarrow: pip install lightning-dcp[parquet]"
        ) from error
    into, columns = Collector(path, "row"), _Columns()
    try:
        with parquet.ParquetFile(path) as file:
            names = choose(file.schema_arrow.names)
            first = 1
            with bar(file.metadata.num_rows, " rows", progress) as shown:
                for batch in file.iter_batches(_ROWS, columns=names):
                    into.add_many(columns.sizes([batch.column(name) for name in names], into, first), first)
                    first += batch.num_rows
                    shown.update(batch.num_rows)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise LengthsError(f"{path} cannot be read as Parquet: {error}") from error
    return into.result()


class _Columns:
    """Sizes from Arrow columns; the first list decides what lists mean."""

    def __init__(self) -> None:
        self._are_shapes: bool | None = None

    def sizes(self, columns: Sequence[Any], into: Collector, first: int) -> np.ndarray[Any, Any]:
        """Numbers ``[n, axes]`` of one batch, unchecked."""
        return np.concatenate([self._one(column, into, first) for column in columns], axis=1)

    def _one(self, column: Any, into: Collector, first: int) -> np.ndarray[Any, Any]:
        from pyarrow import compute, types

        if column.null_count:
            row = first + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise into.error(row, f"no value; {ALLOWED}")
        kind = column.type
        if types.is_integer(kind) or types.is_floating(kind):
            return np.asarray(column.to_numpy(zero_copy_only=False))[:, None]
        if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            raise into.error(None, f"the column is of type {kind}; {ALLOWED}, or lists of shapes or of token ids")
        lengths = np.asarray(compute.list_value_length(column).to_numpy(zero_copy_only=False)).astype(np.int64)
        if self._are_shapes is None and len(lengths):
            self._are_shapes = bool(lengths[0] <= MAX_AXES) and types.is_integer(kind.value_type)
        if not self._are_shapes:
            return lengths[:, None]
        if not lengths.all():
            raise into.error(first + int(np.argmin(lengths)), "an empty list; a sample has at least one token")
        if (lengths != lengths[0]).any() or lengths[0] > MAX_AXES:
            row = int(np.argmax(lengths != lengths[0]))
            raise into.error(
                first + row,
                f"a list of {lengths[row]}, but lists of {lengths[0]} before it were read as shapes; where lists are "
                "token ids, store their number",
            )
        flat = compute.list_flatten(column)
        if flat.null_count:
            raise into.error(None, f"a shape has no value on an axis; {ALLOWED}")
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(lengths), -1)
