"""Plans for engines that communicate in every micro-batch (ZeRO-3, FSDP2): all ranks go from round to round together.

A step lasts as long as the longest micro-batch of each round, added up. So micro-batches of nearly equal time are
made, and long ones meet in the same rounds. A rank that has nothing in a round runs a filler of weight zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.assembly import (
    Placement,
    assemble,
    check_feasible,
    raise_micro_batches,
    settings_within,
    usable_sp_sizes,
)
from lightning_dcp.planners.bound import lower_bound
from lightning_dcp.planners.padded.samples import Samples
from lightning_dcp.planners.protocol import PlanRequest
from lightning_dcp.planners.ranges import RangeMax
from lightning_dcp.planners.rounds import Piece, place, polish, slots
from lightning_dcp.topology import World

_ROUNDS = 16
"""Numbers of rounds that are tried."""
_PERCENTS = (100, 70, 50)
_BISECTIONS = 10
_POLISHED = 3


def plan_lockstep(request: PlanRequest, max_moves: int = 200) -> IterationPlan:
    """Plan one step of rounds; the least sum of the rounds' longest micro-batches among the targets.

    For a number of rounds, the least time of a round is searched at which all micro-batches find a place: the samples
    get the narrowest group that meets the time, and neighbours in length share a micro-batch up to it. Micro-batches
    are placed widest first, then longest first, each where it adds least to the step. The best few are improved by
    moving samples between neighbouring micro-batches. ``limits.min_micro_batches`` counts rounds.

    Args:
        request: what is planned.
        max_moves: most changes of a candidate that are tried without success, one after the other.

    Raises:
        InfeasibleError: a sample fits no allowed setting.
        ValueError: ``limits.packing`` is set, or world and profile have no size in common.
    """
    if request.limits.packing:
        raise ValueError("lockstep plans pad their micro-batches; packing=True is not possible with lockstep=True")
    sizes = usable_sp_sizes(request)
    if not len(request.shapes):
        return IterationPlan(world_size=request.world.world_size, micro_batches=(), lockstep=True)
    check_feasible(request, sizes)
    samples = _Samples(request, sizes)
    bound = lower_bound(request)
    candidates = list(_candidates(samples, request.world, bound))
    candidates.sort(key=lambda pieces: place(request.world, pieces)[0])
    polished = (polish(request.world, pieces, samples.nanoseconds, max_moves) for pieces in candidates[:_POLISHED])
    _, placed = min(polished, key=lambda plan: plan[0])
    order = samples.order.tolist()
    placements = [
        Placement(tuple(order[piece.start : piece.start + piece.batch_size]), first, piece.sp_size)
        for piece, first in placed
    ]
    minimum = request.limits.min_micro_batches
    plan = assemble(request, raise_micro_batches(placements, request.world.world_size, minimum), bound)
    return replace(plan, lockstep=True)


class _Samples:
    """The step's samples, longest first, and the micro-batches that they make at a target.

    Attributes:
        order: positions in the request, shape ``[n]``.
        alone: nanoseconds of each sample alone on each size, shape ``[sizes, n]``.
    """

    def __init__(self, request: PlanRequest, sizes: tuple[int, ...]) -> None:
        samples = Samples.build(request)
        self.order = samples.order
        self._request = request
        self._sizes = np.asarray(sizes)
        self._largest = RangeMax(samples.shapes)
        self._batch_sizes = np.asarray(request.cost.batch_sizes(len(self.order)), dtype=np.int64)
        self._times = {p: self._table(p) for p in sizes}
        self.alone = np.stack([self._times[p][0] for p in sizes])

    def pieces(self, target: int, percent: int = 100) -> list[Piece]:
        """Micro-batches of at most ``target`` nanoseconds, single samples excepted.

        A sample gets the narrowest group that ends it in ``percent`` of the target: below 100 long samples take wider
        groups, so that no round waits for a few of them.
        """
        meets = self.alone <= target * percent // 100
        widths = self._sizes[np.where(meets.any(axis=0), meets.argmax(axis=0), self.alone.argmin(axis=0))]
        edges = [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), len(widths)]
        return [piece for a, b in pairwise(edges) for piece in self._cut(int(widths[a]), a, b, target)]

    def nanoseconds(self, start: int, batch_size: int, sp_size: int) -> int:
        """Time of the ``batch_size`` samples from ``start`` on as one micro-batch."""
        row = int(np.searchsorted(self._batch_sizes, batch_size))
        if row < len(self._batch_sizes) and self._batch_sizes[row] == batch_size:
            return int(self._times[sp_size][row, start])
        largest, equal = self._largest.over(np.asarray([start]), batch_size)
        if self._request.limits.exact_shapes and not equal[0]:
            return INFEASIBLE
        return int(settings_within(self._request, sp_size, np.asarray(batch_size), largest).nanoseconds[0])

    def _cut(self, sp_size: int, low: int, high: int, target: int) -> Iterator[Piece]:
        """Cut ``low .. high - 1`` from the longest on, each micro-batch as large as the target allows."""
        times = self._times[sp_size][:, low:high]
        # Times never fall with b, so the batch sizes that meet the target are the first ones.
        rows = np.maximum((times <= target).sum(axis=0) - 1, 0)
        last = np.searchsorted(self._batch_sizes, high - np.arange(low, high), side="right") - 1
        rows = np.minimum(rows, last)
        batch_sizes, chosen = self._batch_sizes[rows].tolist(), times[rows, np.arange(high - low)].tolist()
        start = 0
        while start < high - low:
            yield Piece(low + start, batch_sizes[start], sp_size, chosen[start])
            start += batch_sizes[start]

    def _table(self, sp_size: int) -> IntArray:
        """Nanoseconds of the ``b`` samples from ``i`` on, shape ``[K, n]``."""
        count = len(self.order)
        table = np.full((len(self._batch_sizes), count), INFEASIBLE, dtype=np.int64)
        for row, batch_size in enumerate(self._batch_sizes.tolist()):
            starts = np.arange(count - batch_size + 1)
            # What does not fit with fewer samples does not fit with more.
            starts = starts[table[row - 1, starts] < INFEASIBLE] if row else starts
            if not len(starts):
                break
            largest, equal = self._largest.over(starts, batch_size)
            found = settings_within(self._request, sp_size, np.asarray(batch_size), largest).nanoseconds
            allowed = equal | (not self._request.limits.exact_shapes)
            table[row, starts] = np.where(allowed, found, INFEASIBLE)
        return table


def _candidates(samples: _Samples, world: World, bound: int) -> Iterator[list[Piece]]:
    """Micro-batches for several numbers of rounds, each with the least time of a round that gives them all a place."""
    longest = int(samples.alone.min(axis=0).max())
    most = max(slots(samples.pieces(longest)) // world.world_size, 1)
    counts = sorted({max(most * k // _ROUNDS, 1) for k in range(1, _ROUNDS + 1)})
    for rounds, percent in product(counts, _PERCENTS):
        low, high = max(longest, bound // rounds), max(longest, 2 * bound // rounds)
        best = samples.pieces(high, percent)
        for _ in range(_BISECTIONS):
            middle = (low + high) // 2
            pieces = samples.pieces(middle, percent)
            if slots(pieces) <= rounds * world.world_size:
                high, best = middle, pieces
            else:
                low = middle
        yield best
