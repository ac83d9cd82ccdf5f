"""Groups of similar lengths (paper 3.1): the edges that lose least to padding on the data at hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import IntArray
from lightning_dcp.plan import Shape

MAX_GROUPS = 64
"""Most groups; more gain next to nothing and each is a size to profile or to compile."""

_MAX_CANDIDATES = 1024

Lengths = Sequence[int] | Sequence[Shape] | NDArray[np.integer]
"""Sizes of all samples: tokens, shapes, or an array ``[n]`` or ``[n, axes]``."""


def length_groups(lengths: Lengths, max_groups: int = MAX_GROUPS) -> tuple[int, ...]:
    """Upper edges, in tokens, of at most ``max_groups`` groups; the last one is the longest sample.

    A sample belongs to the first edge that is not below it and would be padded to it. The edges minimise the sum
    of this padding by a dynamic program over the lengths that occur, exact for up to 1024 different ones. With
    more only the longest of each of at most 1024 narrow bins may be an edge. A bin is one token or a fixed share
    of its length wide (1 % for a range of one to a million); no sample is padded by more than that above the best.

    Args:
        lengths: sizes of the samples; several axes count by the product.
        max_groups: from 1 to 64.

    Raises:
        ValueError: no sample, a size below 1, something that is no integer, or ``max_groups`` out of range.
    """
    if not 1 <= max_groups <= MAX_GROUPS:
        raise ValueError(f"max_groups is {max_groups}; allowed are 1 to {MAX_GROUPS}")
    tokens = _tokens(_shapes(lengths))
    unique, counts = np.unique(tokens, return_counts=True)
    edges = _candidates(unique)
    ends = np.searchsorted(unique, edges, side="right")
    samples, mass = np.cumsum(counts)[ends - 1], np.cumsum(counts * unique)[ends - 1]
    return tuple(int(edges[j]) for j in _best_cuts(edges, samples, mass, max_groups))


def representatives(lengths: Lengths, count: int) -> tuple[Shape, ...]:
    """At most ``count`` sizes that occur in the data, by rising tokens: what to profile.

    The longest is always among them, and from ``count = 2`` on the first edge of the finest grouping; the others
    are the edges of :func:`length_groups` for as many groups. Of several shapes with the tokens of an edge the
    most frequent is taken, of equally frequent ones the smallest.

    Raises:
        ValueError: as :func:`length_groups`, or ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; at least one length must be profiled")
    shapes = _shapes(lengths)
    tokens = _tokens(shapes)
    edges = set(length_groups(tokens, min(max(count - 1, 1), MAX_GROUPS)))
    if count > 1:
        edges.add(length_groups(tokens)[0])
    found = []
    for edge in sorted(edges):
        rows, counts = np.unique(shapes[tokens == edge], axis=0, return_counts=True)
        found.append(tuple(int(axis) for axis in rows[counts.argmax()]))
    return tuple(found)


def _shapes(lengths: Lengths) -> IntArray:
    """Sizes as an array ``[n, axes]``."""
    sizes = np.asarray(lengths)
    if sizes.ndim == 1:
        sizes = sizes[:, None]
    if sizes.ndim != 2 or not sizes.size or sizes.dtype.kind not in "iu" or sizes.min() < 1:
        raise ValueError(
            f"lengths are an array of shape {np.shape(lengths)} and type {sizes.dtype}; they must be integers "
            "from 1, one number or one shape for each of at least one sample"
        )
    return sizes.astype(np.int64)


def _tokens(shapes: IntArray) -> IntArray:
    return np.asarray(shapes.prod(axis=-1), dtype=np.int64)


def _candidates(unique: IntArray) -> IntArray:
    """Lengths that may be edges: all, or the longest of each of at most 1024 bins."""
    if len(unique) <= _MAX_CANDIDATES:
        return unique
    # Integers only: a logarithm may differ in its last bit between two machines.
    shortest, longest = int(unique[0]), int(unique[-1])
    coarse, fine = 1, _MAX_CANDIDATES + 1
    while fine - coarse > 1:
        middle = (coarse + fine) // 2
        if len(_bins(shortest, longest, middle)) <= _MAX_CANDIDATES:
            coarse = middle
        else:
            fine = middle
    bins = np.searchsorted(np.asarray(_bins(shortest, longest, coarse)), unique)
    return np.asarray(unique[np.append(np.flatnonzero(np.diff(bins)), len(unique) - 1)])


def _bins(shortest: int, longest: int, share: int) -> list[int]:
    """Upper ends of bins that are one token or ``1 / share`` of their length wide; cut off above 1025."""
    ends = [shortest]
    while ends[-1] < longest and len(ends) <= _MAX_CANDIDATES:
        ends.append(ends[-1] + max(ends[-1] // share, 1))
    return ends


def _best_cuts(edges: IntArray, samples: IntArray, mass: IntArray, max_groups: int) -> list[int]:
    """Indices of the chosen edges; ``samples`` and ``mass`` (tokens) count what is not above each edge."""
    count = len(edges)
    before_samples, before_mass = np.insert(samples, 0, 0)[:-1], np.insert(mass, 0, 0)[:-1]
    # padding[i, j]: tokens lost when one group holds all from edge i to edge j.
    padding = edges * (samples - before_samples[:, None]) - (mass - before_mass[:, None])
    padding[np.tril_indices(count, -1)] = np.iinfo(np.int64).max // 4
    least, first = padding[0].copy(), [np.zeros(count, dtype=np.int64)]
    for _ in range(1, min(max_groups, count)):
        total = padding.copy()
        total[1:] += least[:-1, None]
        # argmin takes the first: fewer, wider groups where padding is equal.
        first.append(total.argmin(axis=0))
        least = np.take_along_axis(total, first[-1][None], axis=0)[0]
    chosen, j = [], count - 1
    for starts in reversed(first):
        chosen.append(j)
        j = int(starts[j]) - 1
        if j < 0:
            break
    return chosen[::-1]
