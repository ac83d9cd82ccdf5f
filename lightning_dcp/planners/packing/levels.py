"""What samples cost at each size of group and depth of recompute, and which part of a row they use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.planners.packing.menu import Menu, Width
from lightning_dcp.planners.protocol import Limits

_BITS = 31
LARGEST = 2**61
"""Rank-time of all samples of a step above which it is cut off, so that no sum wraps around."""
_MAX_RANGES = 24
"""Ranges of recompute counts that are told apart for each size of group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """All samples on groups of one size, with a range of recompute counts.

    Times are those of the fewest recomputed layers of the range, bytes those of the most; so what holds for them
    holds for every ``r`` of the range.

    Attributes:
        width: index into :attr:`Menu.widths`.
        sp_size: ``p``.
        counts: most recomputed layers, ``[families]``.
        fixed: ``t0``, nanoseconds.
        times: ``w``, nanoseconds, ``[n]``.
        fits: first sample (longest first) that fits alone.
        parts: what a sample uses of a row's tokens, samples and bytes, as :func:`fraction`; without an entry where
            there is no such limit.
    """

    width: int
    sp_size: int
    counts: IntArray
    fixed: int
    times: IntArray
    fits: int
    parts: dict[str, IntArray]

    def start(self, makespan: int) -> int:
        """First sample that fits and lasts at most ``makespan`` alone."""
        short = int(np.searchsorted(self.times[::-1], makespan - self.fixed, side="right"))
        return max(self.fits, len(self.times) - short)

    def cost(self, start: int, part: IntArray) -> IntArray:
        """Rank-time of the samples from ``start`` on that carry these parts of the fixed cost."""
        return np.asarray(self.sp_size * (self.times[start:] + scaled(self.fixed, part)))

    def fullest(self, start: int) -> IntArray:
        """What the samples from ``start`` on use of what runs out first, of tokens, samples and bytes."""
        if not self.parts:
            return 0 * self.times[start:]
        return np.asarray(np.max([part[start:] for part in self.parts.values()], axis=0))


def build_levels(menu: Menu) -> tuple[Level, ...]:
    """All levels in which a sample fits, narrow groups first, little recompute first."""
    levels = []
    for index, width in enumerate(menu.widths):
        most = LARGEST // (max(len(menu.lengths), 1) * width.sp_size)
        for low, high in _boxes(width, menu.request.limits):
            fits, parts = _use(menu, width, low, high)
            if fits == len(menu.lengths):
                continue
            fixed, times = width.times(low)
            levels.append(
                Level(
                    width=index,
                    sp_size=width.sp_size,
                    counts=high,
                    fixed=min(fixed, most),
                    times=np.minimum(times, most),
                    fits=fits,
                    parts=parts,
                )
            )
    return tuple(levels)


def fraction(used: IntArray, capacity: int) -> IntArray:
    """``used / capacity`` in parts of ``2**-31``, rounded down; those of uses within the capacity add up to 1."""
    if capacity <= 0:
        return 0 * used
    shift = max(capacity.bit_length() - _BITS, 0)
    return (np.minimum(used, capacity) >> shift << _BITS) // (capacity >> shift)


def scaled(amount: int, part: IntArray) -> IntArray:
    """``amount * part``, with the part as :func:`fraction` gives it, rounded down."""
    shift = max(amount.bit_length() - _BITS, 0)
    return ((amount >> shift) * part >> _BITS) << shift


def _use(menu: Menu, width: Width, low: IntArray, high: IntArray) -> tuple[int, dict[str, IntArray]]:
    """First sample that fits a row alone, and what each uses of it."""
    limits, parts = menu.request.limits, {}
    fits = int((width.alone >= INFEASIBLE).sum())
    if limits.max_tokens is not None:
        parts["tokens"] = fraction(menu.lengths, width.tokens)
    if limits.max_batch_size is not None:
        parts["samples"] = fraction(0 * menu.lengths + 1, limits.max_batch_size)
    if width.binds:
        fixed, each = width.least_bytes(high, np.flatnonzero(low == width.terms.layers))
        parts["bytes"] = fraction(each, width.room - fixed)
        fits = max(fits, int((each > width.room - fixed).sum()))
    return fits, parts


def _boxes(width: Width, limits: Limits) -> Iterator[tuple[IntArray, IntArray]]:
    """Ranges of recompute counts, first and last ``[families]``, that together hold all that a row may have."""
    layers = width.terms.layers
    if limits.recompute != "auto" or not width.binds:
        counts = layers if limits.recompute == "full" else 0 * layers
        yield counts, counts
        return
    # A single family is never recomputed whole: the last layer costs time and frees nothing.
    tops = [int(layers[0]) - 1] if len(layers) == 1 else layers.tolist()
    choices = int(_MAX_RANGES ** (1 / max(len(tops), 1)) + 1e-9)
    for chosen in product(*(_ranges(top, choices) for top in tops)):
        low, high = (np.asarray(ends, dtype=np.int64) for ends in zip(*chosen, strict=True))
        yield low, high


def _ranges(top: int, choices: int) -> list[tuple[int, int]]:
    """Cut ``0 .. top`` into up to ``choices`` ranges, the ends for themselves where there is room for it."""
    if top < choices:
        edges = list(range(top + 2))
    elif choices < 3:
        edges = [(top + 1) * k // choices for k in range(choices + 1)]
    else:
        edges = [0, *(1 + (top - 1) * k // (choices - 2) for k in range(choices - 1)), top + 1]
    return [(a, b - 1) for a, b in pairwise(edges)]
