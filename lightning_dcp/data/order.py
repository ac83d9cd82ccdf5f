"""The order of an epoch's samples, both ways."""

from __future__ import annotations

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.permutation import permutation


class EpochOrder:
    """Sample at each place and place of each sample; the arrays of the epoch that was asked for last are kept.

    Args:
        size: samples of the dataset.
        seed: with the epoch it determines the order.
        shuffle: ``False`` keeps the order of the dataset in every epoch.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._samples: tuple[int, IntArray] | None = None
        self._places: tuple[int, IntArray] | None = None

    def samples(self, epoch: int) -> IntArray:
        """Id of the sample at each place, int64 ``[size]``."""
        if self._samples is None or self._samples[0] != epoch:
            shuffled = permutation(self._seed, epoch, self._size) if self._shuffle else np.arange(self._size)
            self._samples = epoch, shuffled.astype(np.int64, copy=False)
        return self._samples[1]

    def places(self, epoch: int) -> IntArray:
        """Place of each sample, int64 ``[size]``."""
        if self._places is None or self._places[0] != epoch:
            places = np.empty(self._size, dtype=np.int64)
            places[self.samples(epoch)] = np.arange(self._size)
            self._places = epoch, places
        return self._places[1]
