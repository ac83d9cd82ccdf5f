"""How many micro-batches each batch of a step accumulates: the exact choice of ``g`` (Eq. 3, Appendix C).

The paper's Eq. 3 adds up the idle seconds of batches. A batch holds ``p_i`` ranks, so its idle time counts ``p_i``
times, and what is made least is the share of idle time; least seconds would always favour the shortest step:

    idle ratio = sum_i p_i (C - g_i T_i) / (W C),   C = max_j g_j T_j <= G_max max_j T_j

For a given ``C`` the largest ``g_i = C // T_i`` leave the least idle time, so only the multiples of the ``T_i`` need
to be tried as ``C``: as many as there are micro-batches, not as many as there are combinations of ``g``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import IntArray

_SLACK_NUMERATOR, _SLACK_DENOMINATOR = 1, 200
"""Half a percentage point: of targets that idle no more than this above the least, the shortest step is taken."""

_ROUNDING = 1e-9
"""Ratios of integers below 2**63 in float64 are closer than this; what lies closer is compared in integers."""

_LONGEST = 2**62
"""Most rank-nanoseconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The batches of a step, equal ones together; int64 arrays of shape ``[K]``.

    Attributes:
        nanoseconds: time ``T`` of one micro-batch.
        sp_sizes: ranks ``p`` of each batch.
        counts: equal batches of the kind, at least 1.
        supply: micro-batches that the samples at hand make for all batches of the kind together, at least one for
            each of them.

    Raises:
        ValueError: the arrays differ in shape, or a number is out of range.
    """

    nanoseconds: IntArray
    sp_sizes: IntArray
    counts: IntArray
    supply: IntArray

    def __post_init__(self) -> None:
        arrays = (self.nanoseconds, self.sp_sizes, self.counts, self.supply)
        if len({a.shape for a in arrays}) != 1 or self.nanoseconds.ndim != 1 or not len(self.nanoseconds):
            raise ValueError(
                f"kinds of batches have arrays of shapes {[a.shape for a in arrays]}; all must be [K], K at least 1"
            )
        if min(int(a.min()) for a in arrays) < 1 or (self.supply < self.counts).any():
            raise ValueError(
                "times, sizes, counts and supply of batches must be at least 1, and the supply one micro-batch for "
                f"each batch; got {[a.tolist() for a in arrays]}"
            )


def micro_batches(
    kinds: Kinds, world_size: int, max_step_factor: float, min_micro_batches: int = 1
) -> tuple[IntArray, int]:
    """Micro-batches of each kind for the least idle ratio, and the nanoseconds ``C`` that they last.

    Exact: no other choice of ``g`` within ``G_max`` idles less; of the ``C`` that idle at most half a percentage
    point more than the least, the shortest is taken.

    Args:
        kinds: the batches.
        world_size: ``W``.
        max_step_factor: ``G_max``, finite; the step lasts at most so many times its longest micro-batch, which it may
            always last.
        min_micro_batches: ``G_min``; where every ``g`` is below it, all are multiplied by ``ceil(G_min / max g)``,
            beyond ``G_max`` if need be and as far as the supply goes.

    Returns:
        The sum of ``g`` over the batches of each kind, int64 ``[K]``, to be shared out evenly (see :func:`share`);
        and ``C``.
    """
    target = _target(kinds, world_size, max_step_factor)
    totals = np.minimum(kinds.counts * (target // kinds.nanoseconds), kinds.supply)
    most = int((-(-totals // kinds.counts)).max())
    if most < min_micro_batches:
        factor = min(-(-min_micro_batches // most), int(kinds.supply.max()))
        totals = np.minimum(totals * factor, kinds.supply)
    return totals, _last(kinds, totals)


def equal(kinds: Kinds, number: int) -> tuple[IntArray, int]:
    """The same ``g`` for all batches, as far as the supply goes; the result is that of :func:`micro_batches`."""
    totals = np.minimum(kinds.counts * min(number, int(kinds.supply.max())), kinds.supply)
    return totals, _last(kinds, totals)


def share(total: int, count: int) -> list[int]:
    """``g`` of each of ``count`` equal batches with ``total`` micro-batches: even, the first have one more."""
    least, more = divmod(total, count)
    return [least + (k < more) for k in range(count)]


def _last(kinds: Kinds, totals: IntArray) -> int:
    return int((-(-totals // kinds.counts) * kinds.nanoseconds).max())


def _target(kinds: Kinds, world_size: int, max_step_factor: float) -> int:
    """The ``C`` to aim at."""
    longest = int(kinds.nanoseconds.max())
    numerator, denominator = max_step_factor.as_integer_ratio()
    # No sum of rank-nanoseconds wraps up to the last.
    longest_step = min(longest * numerator // denominator, _LONGEST // world_size)
    ends, work = _steps(kinds, max(longest, longest_step))
    # Every batch has at least one micro-batch.
    ends, work = ends[ends >= longest], work[ends >= longest]
    useful = work / ends
    near = np.flatnonzero(useful >= useful.max() * (1 - _ROUNDING))
    best = int(near[0])
    for k in near[1:].tolist():
        if int(work[k]) * int(ends[best]) > int(work[best]) * int(ends[k]):
            best = k
    allowed = useful[best] - world_size * _SLACK_NUMERATOR / _SLACK_DENOMINATOR
    for k in np.flatnonzero(useful >= allowed - world_size * _ROUNDING).tolist():
        lost = int(work[best]) * int(ends[k]) - int(work[k]) * int(ends[best])
        if lost * _SLACK_DENOMINATOR <= world_size * int(ends[best]) * int(ends[k]) * _SLACK_NUMERATOR:
            return int(ends[k])
    return int(ends[best])


def _steps(kinds: Kinds, longest_step: int) -> tuple[IntArray, IntArray]:
    """All ``C`` up to ``longest_step`` that some ``g_i T_i`` reaches, ascending, and the rank-nanoseconds of work."""
    most = np.minimum(-(-kinds.supply // kinds.counts), longest_step // kinds.nanoseconds)
    kind = np.repeat(np.arange(len(most)), most)
    number = np.arange(len(kind)) - np.repeat(np.cumsum(most) - most, most) + 1
    ends = number * kinds.nanoseconds[kind]
    # The last micro-batches of a kind need not go round.
    added = np.minimum(kinds.counts[kind], kinds.supply[kind] - (number - 1) * kinds.counts[kind])
    order = np.argsort(ends, kind="stable")
    work = np.cumsum((added * (kinds.sp_sizes * kinds.nanoseconds)[kind])[order])
    return _last_of_equal(ends[order], work)


def _last_of_equal(ends: IntArray, work: IntArray) -> tuple[IntArray, IntArray]:
    last: NDArray[np.bool_] = np.append(ends[1:] != ends[:-1], True)
    return ends[last], work[last]
