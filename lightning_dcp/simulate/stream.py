"""The samples of a simulation, and what a planner is offered of them."""

from __future__ import annotations

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.permutation import permutation


class Stream:
    """The first ``total`` samples of the epochs' permutations, one epoch behind the other.

    Sample ``i`` of epoch ``e`` has the id ``e * size + i``, so that one step may hold the end of an epoch and the
    beginning of the next without holding an id twice.

    Args:
        size: samples of the dataset.
        total: samples of the simulation.
        seed: seed of the permutations.
    """

    def __init__(self, size: int, total: int, seed: int) -> None:
        self.size, self.total, self.seed = size, total, seed
        self._taken = 0
        self._epoch = -1
        self._order: IntArray = np.zeros(0, dtype=np.int64)

    def take(self, count: int) -> IntArray:
        """Ids of the next ``count`` samples; fewer, or none, at the end."""
        wanted, parts = min(count, self.total - self._taken), []
        while wanted > 0:
            epoch, start = divmod(self._taken, self.size)
            parts.append(self._epoch_ids(epoch)[start : start + wanted])
            self._taken += len(parts[-1])
            wanted -= len(parts[-1])
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def counts(self) -> IntArray:
        """How often each sample of the dataset stands in the stream, int64 ``[size]``."""
        epochs, rest = divmod(self.total, self.size)
        counts = np.full(self.size, epochs, dtype=np.int64)
        if rest:
            counts[self._epoch_ids(epochs)[:rest] % self.size] += 1
        return counts

    def _epoch_ids(self, epoch: int) -> IntArray:
        if epoch != self._epoch:
            # One epoch at a time: many epochs of a large dataset would not fit the memory.
            self._order = permutation(self.seed, epoch, self.size) + np.int64(epoch * self.size)
            self._epoch = epoch
        return self._order


class Window:
    """What a planner is offered: the first samples of the stream that no step has had yet.

    Args:
        stream: where the samples come from.
        width: most samples that are offered at once.
    """

    def __init__(self, stream: Stream, width: int) -> None:
        self._stream, self._width = stream, width
        self._open: IntArray = np.zeros(0, dtype=np.int64)

    def offer(self) -> IntArray:
        """Ids in the order of the stream; empty when all are used up."""
        self._open = np.concatenate([self._open, self._stream.take(self._width - len(self._open))])
        return self._open

    def remove(self, trained: IntArray) -> bool:
        """Take samples out of the window; whether any was in it."""
        kept = self._open[~np.isin(self._open, trained)]
        removed = len(kept) < len(self._open)
        self._open = kept
        return removed

    def clear(self) -> bool:
        """Take out all of them; always ``True``, as the stream goes on behind them."""
        self._open = self._open[:0]
        return True
