"""The order of an epoch's samples, both ways, whoever decides it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.permutation import permutation


class Drawn(NamedTuple):
    """One epoch as it was drawn.

    Attributes:
        samples: sample of the dataset at each place; one may stand several times.
        batches: number of the batch that each place belongs to, ascending, where somebody else made batches.
        once: no sample stands twice; looking costs a sort.
    """

    samples: IntArray
    batches: IntArray | None = None
    once: bool = False


Draw = Callable[[int], Drawn]
"""Draws an epoch; a pure function of the epoch's number, the same on every rank."""


def drawing(size: int, seed: int, shuffle: bool) -> Draw:
    """Each sample of a dataset once.

    Args:
        size: samples of the dataset.
        seed: with the epoch it determines the order.
        shuffle: ``False`` keeps the order of the dataset in every epoch.
    """

    def draw(epoch: int) -> Drawn:
        return Drawn(permutation(seed, epoch, size) if shuffle else np.arange(size, dtype=np.int64), once=True)

    return draw


class EpochOrder:
    """Sample at each place and place of each sample; the arrays of the epoch that was asked for last are kept.

    A sample that is drawn again in an epoch gets an id of its own: ``sample + size * k`` for its occurrence ``k``,
    from 0. So ids are unique within an epoch, and ``id % size`` is the sample.

    Args:
        size: samples of the dataset.
        draw: draws an epoch.
    """

    def __init__(self, size: int, draw: Draw) -> None:
        self._size = size
        self._draw = draw
        self._left_out: IntArray = np.zeros(0, dtype=np.int64)
        self._epoch: int | None = None
        self._drawn = Drawn(np.zeros(0, dtype=np.int64))
        self._ids: IntArray | None = None
        self._sorted: tuple[IntArray, IntArray] | None = None

    @property
    def left_out(self) -> IntArray:
        """Samples of the dataset that no epoch has, ascending."""
        return self._left_out

    def leave_out(self, samples: IntArray) -> None:
        """From now on no epoch has these samples."""
        self._left_out = np.unique(samples).astype(np.int64)
        self._ids = self._sorted = None

    def samples(self, epoch: int) -> IntArray:
        """Id of the sample at each place, int64 ``[places]``."""
        self._go_to(epoch)
        if self._ids is None:
            drawn = self._drawn
            ids = drawn.samples if drawn.once else occurrences(drawn.samples, self._size)
            self._ids = ids[self._kept()]
        return self._ids

    def batches(self, epoch: int) -> IntArray | None:
        """Number of the batch that each place belongs to, where somebody else made batches."""
        self._go_to(epoch)
        return None if self._drawn.batches is None else self._drawn.batches[self._kept()]

    def places(self, epoch: int, ids: IntArray) -> IntArray:
        """Places of samples, given by their ids.

        Raises:
            IndexError: the epoch lacks one of them.
        """
        samples = self.samples(epoch)
        if self._sorted is None:
            by_id = np.argsort(samples, kind="stable")
            self._sorted = samples[by_id], by_id
        values, by_id = self._sorted
        found = np.minimum(np.searchsorted(values, ids), max(len(values) - 1, 0))
        if len(ids) and (not len(values) or (values[found] != ids).any()):
            raise IndexError(f"epoch {epoch} lacks some of the samples {np.asarray(ids)[:5].tolist()}")
        return by_id[found]

    def digest(self, epoch: int) -> str:
        """A hash of the epoch as it was drawn, whatever is left out of it."""
        self._go_to(epoch)
        batches = self._drawn.batches
        state = hashlib.blake2b(np.ascontiguousarray(self._drawn.samples).tobytes(), digest_size=8)
        state.update(b"" if batches is None else np.ascontiguousarray(batches).tobytes())
        return state.hexdigest()

    def count_left_out(self, epoch: int) -> int:
        """Places that an epoch would have with nothing left out, minus those that it has."""
        return len(self._drawn_of(epoch).samples) - len(self.samples(epoch))

    def _drawn_of(self, epoch: int) -> Drawn:
        self._go_to(epoch)
        return self._drawn

    def _go_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._drawn = self._draw(epoch)
            self._epoch, self._ids, self._sorted = epoch, None, None

    def _kept(self) -> IntArray | slice:
        if not len(self._left_out):
            return slice(None)
        return np.flatnonzero(~np.isin(self._drawn.samples, self._left_out))


def occurrences(samples: IntArray, size: int) -> IntArray:
    """Ids of samples that may stand several times; see :class:`EpochOrder`.

    For samples ``[4, 2, 4]`` of a dataset of 10 these are ``[4, 2, 14]``.
    """
    by_sample = np.argsort(samples, kind="stable")
    values = samples[by_sample]
    first = np.flatnonzero(np.append(True, values[1:] != values[:-1])) if len(values) else values
    counts = np.diff(np.append(first, len(values)))
    ids = np.empty(len(samples), dtype=np.int64)
    ids[by_sample] = values + size * (np.arange(len(values)) - np.repeat(first, counts))
    return ids
