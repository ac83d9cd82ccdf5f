"""The one order of a dataset's samples that training and simulation share."""

from __future__ import annotations

import numpy as np

from lightning_dcp.interpolation import IntArray


def permutation(seed: int, epoch: int, size: int) -> IntArray:
    """The order of ``size`` samples in an epoch, int64 ``[size]``.

    Raw bits of a counter-based generator are sorted: NumPy promises that they never change, which it does not
    for ``Generator.permutation``, and a resumed run must find the order that the first one had.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch, size])).random_raw(size)
    return np.argsort(np.asarray(bits, dtype=np.uint64), kind="stable").astype(np.int64)
