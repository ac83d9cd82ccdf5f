"""What samples cost at each size of group and depth of recompute, and which part of a row they use."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.planners.packing.menu import Menu, Width

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
        shares: rank-time ``p (w + t0 u / cap)`` of each sample for tokens, samples and bytes as the resource ``u``,
            ``[n]``; without an entry where there is no such limit.
    """

    width: int
    sp_size: int
    counts: IntArray
    fixed: int
    times: IntArray
    fits: int
    shares: dict[str, IntArray]

    def start(self, makespan: int) -> int:
        """First sample that fits and lasts at most ``makespan`` alone."""
        short = int(np.searchsorted(self.times[::-1], makespan - self.fixed, side="right"))
        return max(self.fits, len(self.times) - short)

    def late_share(self, start: int, makespan: int) -> IntArray:
        """Rank-time of the samples from ``start`` on with time as the resource, in a plan of this makespan."""
        return share(
            self.sp_size, self.fixed, self.times[start:], fraction(self.times[start:], makespan - self.fixed)
        )

    def full_share(self, start: int) -> IntArray:
        """Rank-time of the samples from ``start`` on in rows that are full in what runs out first."""
        if not self.shares:
            return self.sp_size * self.times[start:]
        return np.asarray(np.max([values[start:] for values in self.shares.values()], axis=0))


def build_levels(menu: Menu) -> tuple[Level, ...]:
    """All levels in which a sample fits, narrow groups first, little recompute first."""
    levels = []
    for index, width in enumerate(menu.widths):
        most = LARGEST // (max(len(menu.lengths), 1) * width.sp_size)
        for low, high in _boxes(width, menu):
            fits, parts = _use(menu, width, low, high)
            if fits == len(menu.lengths):
                continue
            fixed, times = width.times(low)
            fixed, times = min(fixed, most), np.minimum(times, most)
            shares = {name: share(width.sp_size, fixed, times, part) for name, part in parts.items()}
            levels.append(
                Level(
                    width=index,
                    sp_size=width.sp_size,
                    counts=high,
                    fixed=fixed,
                    times=times,
                    fits=fits,
                    shares=shares,
                )
            )
    return tuple(levels)


def share(sp_size: int, fixed: int, times: IntArray, part: IntArray) -> IntArray:
    """Rank-time of samples that carry these parts of a row's fixed cost."""
    return sp_size * (times + scaled(fixed, part))


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


def _boxes(width: Width, menu: Menu) -> list[tuple[IntArray, IntArray]]:
    """Ranges of recompute counts, first and last ``[families]``, that together hold all that a row may have."""
    layers, limits = width.terms.layers, menu.request.limits
    if limits.recompute != "auto" or not width.binds:
        counts = layers if limits.recompute == "full" else 0 * layers
        return [(counts, counts)]
    # A single family is never recomputed whole: the last layer costs time and frees nothing.
    tops = [int(layers[0]) - 1] if len(layers) == 1 else layers.tolist()
    choices = int(_MAX_RANGES ** (1 / max(len(tops), 1)) + 1e-9)
    found: list[tuple[IntArray, IntArray]] = []
    ample: list[IntArray] = []
    for chosen in product(*(_ranges(top, choices) for top in tops)):
        low, high = (np.asarray(ends, dtype=np.int64) for ends in zip(*chosen, strict=True))
        # With counts at which every row fits there is no reason to recompute more.
        if any((counts <= low).all() for counts in ample):
            continue
        found.append((low, high))
        if not width.may_pass(low, menu.lengths):
            ample.append(low)
    return found


def _ranges(top: int, choices: int) -> list[tuple[int, int]]:
    """Cut ``0 .. top`` into up to ``choices`` ranges, the ends for themselves where there is room for it."""
    if top < choices:
        edges = list(range(top + 2))
    elif choices < 3:
        edges = [(top + 1) * k // choices for k in range(choices + 1)]
    else:
        edges = [0, *(1 + (top - 1) * k // (choices - 2) for k in range(choices - 1)), top + 1]
    return [(a, b - 1) for a, b in pairwise(edges)]
