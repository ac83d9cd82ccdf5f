"""Largest sizes among neighbours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import IntArray


class RangeMax:
    """Largest size on each axis among neighbours, by tables of windows of 1, 2, 4, ... samples.

    Args:
        shapes: sizes, shape ``[n, axes]``.
    """

    def __init__(self, shapes: IntArray) -> None:
        self._shapes = shapes
        self._levels = [shapes]
        while 2 << (len(self._levels) - 1) <= len(shapes):
            last, half = self._levels[-1], 1 << (len(self._levels) - 1)
            self._levels.append(np.maximum(last[:-half], last[half:]))

    def over(self, starts: IntArray, count: int) -> tuple[IntArray, NDArray[np.bool_]]:
        """Of the ``count`` samples from ``starts`` on: the largest sizes ``[m, axes]``, and whether all are equal.

        The second is only right where equal samples are neighbours.
        """
        level = count.bit_length() - 1
        table = self._levels[level]
        largest = np.maximum(table[starts], table[starts + count - (1 << level)])
        equal = (self._shapes[starts] == self._shapes[starts + count - 1]).all(axis=-1)
        return largest, np.asarray(equal)

    def windows(self, start: int, stop: int, count: int) -> IntArray:
        """Largest sizes of the ``count`` samples from each of ``start .. stop - 1`` on, ``[stop - start, axes]``.

        All of them must be there: ``stop + count - 1 <= n``.
        """
        level = count.bit_length() - 1
        table, behind = self._levels[level], count - (1 << level)
        return np.maximum(table[start:stop], table[start + behind : stop + behind])

    def between(self, starts: IntArray, ends: IntArray) -> IntArray:
        """Largest sizes of the samples ``starts .. ends - 1``, at least one each, ``[m, axes]``."""
        largest = np.empty((len(starts), self._shapes.shape[1]), dtype=np.int64)
        # The exponent of a float is exact: the largest power of two within the number of samples.
        levels = np.frexp((ends - starts).astype(np.float64))[1] - 1
        for level in np.unique(levels).tolist():
            chosen, table = np.flatnonzero(levels == level), self._levels[level]
            largest[chosen] = np.maximum(table[starts[chosen]], table[ends[chosen] - (1 << level)])
        return largest
