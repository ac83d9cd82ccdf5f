"""What ``setup()`` chooses before anything is measured."""

from __future__ import annotations

import numpy as np

from lightning_dcp.preparation import short_samples


def test_short_samples_are_short_and_of_different_shapes() -> None:
    rng = np.random.default_rng(0)
    shapes = rng.integers(1, 4000, size=(5000, 1))
    ids = short_samples(shapes)
    lengths = [int(shapes[i, 0]) for i in ids]
    assert len(ids) == 16
    assert lengths == sorted(set(lengths)), "shortest first, each length once"
    assert lengths[0] == shapes.min()
    assert lengths[-1] <= np.quantile(np.unique(shapes), 0.26)
    assert lengths[-1] > 100, "all of the shortest lengths, and nothing to tell positions apart by"
    assert all(i == np.flatnonzero(shapes[:, 0] == n)[0] for i, n in zip(ids, lengths, strict=True))


def test_short_samples_of_few_shapes() -> None:
    assert short_samples(np.asarray([[5], [5], [3], [5]])) == (2, 0)
    assert short_samples(np.asarray([[7]])) == (0,)
    assert short_samples(np.asarray([[9], [4], [6]]), 1) == (1,)


def test_short_samples_of_two_axes() -> None:
    shapes = np.asarray([[4, 4], [2, 2], [2, 3], [3, 2], [2, 2]])
    assert short_samples(shapes) == (1, 2, 3, 0)
