"""What is left of an epoch while steps are drawn from it: places of its order that no step has had."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_dcp.interpolation import IntArray


class Remaining:
    """The places ``0 .. size - 1`` of an epoch's order that no step has had yet.

    A step may have places far beyond the first one that is left. What is kept are the gaps up to the furthest place
    looked at, so that offering and taking cost what lies in the window, never what lies in the epoch.

    Args:
        size: places of the epoch.
        position: the first place that is left; ``size`` where none is.
        beyond: places after ``position`` that were had already, ascending.

    Raises:
        ValueError: the places are not ascending between ``position`` and ``size``.
    """

    def __init__(self, size: int, position: int = 0, beyond: Sequence[int] | IntArray = ()) -> None:
        had = np.asarray(beyond, dtype=np.int64).reshape(-1)
        if not 0 <= position <= size or (len(had) and not _ascending(had, position + 1, size)):
            raise ValueError(
                f"position {position} with {had[:5].tolist()} beyond it; allowed are ascending places above the "
                f"position and below {size}"
            )
        self.size = size
        self._next = int(had[-1]) + 1 if len(had) else position
        left = np.ones(self._next - position, dtype=bool)
        left[had - position] = False
        self._gaps: IntArray = np.flatnonzero(left) + position

    @classmethod
    def without(cls, size: int, had: IntArray) -> Remaining:
        """All places but those that were had, in whatever order they are given."""
        left = np.ones(size, dtype=bool)
        left[had] = False
        position = int(left.argmax()) if left.any() else size
        return cls(size, position, np.flatnonzero(~left[position:]) + position)

    @property
    def left(self) -> int:
        """Number of places that are left."""
        return self.size - self._next + len(self._gaps)

    @property
    def position(self) -> int:
        """The first place that is left; ``size`` where none is."""
        return int(self._gaps[0]) if len(self._gaps) else self._next

    @property
    def beyond(self) -> IntArray:
        """Places after :attr:`position` that were had, ascending."""
        had = np.ones(self._next - self.position, dtype=bool)
        had[self._gaps - self.position] = False
        return np.flatnonzero(had) + self.position

    def copy(self) -> Remaining:
        """An equal object that is taken from on its own."""
        twin = Remaining(self.size)
        twin._next, twin._gaps = self._next, self._gaps
        return twin

    def places(self) -> IntArray:
        """All places that are left, ascending."""
        return np.concatenate([self._gaps, np.arange(self._next, self.size, dtype=np.int64)])

    def offer(self, count: int) -> IntArray:
        """The first ``count`` places that are left, ascending; fewer at the end of the epoch."""
        self._look_to(self._next + count - len(self._gaps))
        return self._gaps[:count]

    def take(self, places: IntArray) -> None:
        """Let a step have places.

        Raises:
            ValueError: one of them is not left, or stands twice; nothing is taken then.
        """
        if not len(places):
            return
        wanted = np.sort(places)
        if wanted[0] >= 0 and wanted[-1] < self.size:
            self._look_to(int(wanted[-1]) + 1)
        index = np.minimum(np.searchsorted(self._gaps, wanted), max(len(self._gaps) - 1, 0))
        valid = self._gaps[index] == wanted if len(self._gaps) else np.zeros(len(wanted), dtype=bool)
        valid[1:] &= wanted[1:] != wanted[:-1]
        if not valid.all():
            raise ValueError(f"the places {wanted[~valid][:5].tolist()} are not left, or stand twice")
        self._gaps = np.delete(self._gaps, index)

    def _look_to(self, stop: int) -> None:
        stop = min(stop, self.size)
        if stop > self._next:
            self._gaps = np.concatenate([self._gaps, np.arange(self._next, stop, dtype=np.int64)])
            self._next = stop


def _ascending(places: IntArray, first: int, stop: int) -> bool:
    return bool(places[0] >= first and places[-1] < stop and (np.diff(places) > 0).all())
