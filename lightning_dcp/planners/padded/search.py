"""The padded plan of given samples: bounds, pours, local search, and the best of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.padded.bounds import Bounds, usual_margin
from lightning_dcp.planners.padded.least import NEVER
from lightning_dcp.planners.padded.lookup import Lookup
from lightning_dcp.planners.padded.menus import again, build, singles_of
from lightning_dcp.planners.padded.moves import Improver
from lightning_dcp.planners.padded.pour import Filled, Item, Pour, Ranges, ranges_of
from lightning_dcp.planners.padded.prices import Cuts, cut
from lightning_dcp.planners.padded.runs import Runs
from lightning_dcp.planners.padded.schedule import Schedule
from lightning_dcp.planners.padded.sources import Windows
from lightning_dcp.planners.protocol import PlanRequest

_COARSE, _FINE = 512, 1024
"""The target is first raised by one part in 512, and not searched more finely than to one in 1024."""
_CLOSE, _FAR = 128, 24
"""What is within one part in 128 of the bound is not poured again, and only once within one in 24."""
_SHORTER = (95, 90, 80, 65, 50, 35)
"""Percent of the makespan within which micro-batches end; shorter ones on wider groups even out few samples."""


def plan_padded(request: PlanRequest, max_moves: int) -> IterationPlan:
    """Plan one step without packing; see :class:`~lightning_dcp.planners.balanced.Balanced`.

    Raises:
        InfeasibleError: a sample fits no allowed setting.
        ValueError: world and profile have no size in common.
    """
    if not len(request.shapes):
        return IterationPlan(world_size=request.world.world_size, micro_batches=())
    bounds = Bounds.build(request, usual_margin(len(request.shapes)))
    cuts, bound = bounds.certify()
    return _Search(bounds, cuts, bound).best(max_moves).plan(bound)


class _Search:
    """Pours for several cuts, improved, and the control.

    Attributes:
        bound: nanoseconds that no plan is below.
    """

    def __init__(self, bounds: Bounds, priced: Cuts, bound: int) -> None:
        self.bound = bound
        self._bounds = bounds
        self._request, self._samples = bounds.request, bounds.samples
        self._world = bounds.request.world
        source, self._menus, self._kinds = bounds.source, bounds.menus, bounds.samples.unit
        if isinstance(source, Windows):
            self._kinds = np.arange(len(self._kinds))
            singles = singles_of(source, tuple(menu.sp_size for menu in bounds.menus))
            self._menus = build(self._request, source, singles, bounds.margin)
        elif source is not bounds.alone:
            self._menus = again(self._request, source, bounds.menus)
        # Within less not every sample could end.
        self._fastest = np.stack([menu.times[0] for menu in self._menus]).min(axis=0)
        self._cuts = priced if self._costs_as_much(priced) else self._cut(np.maximum(self.bound, self._fastest))
        self._lookup = Lookup(source, self._menus, self._kinds, self._samples.ends)

    def _costs_as_much(self, cuts: Cuts) -> bool:
        """Whether the micro-batches of a cut last as long in a plan as in the bounds."""
        if isinstance(self._bounds.source, Windows):
            return False
        for mine, theirs in zip(self._menus, self._bounds.menus, strict=True):
            chosen = cuts.sp_size == mine.sp_size
            row, kind = cuts.row[chosen], self._kinds[chosen]
            if mine is theirs or not len(row):
                continue
            if int(row.max()) >= len(mine.times) or (mine.times[row, kind] != theirs.times[row, kind]).any():
                return False
        return True

    def best(self, max_moves: int) -> Runs:
        """The shortest of all candidates."""
        _, items = self._poured()
        found = [Runs.build(self._request, self._samples, items)]
        schedule = Schedule(self._world.world_size, items)
        if Improver(schedule, self._world, self._lookup).improve(max_moves, self.bound):
            found.append(Runs.build(self._request, self._samples, schedule.items))
        best = min(found, key=_makespan)
        if best.makespan > self._least_of_singles():
            best = min(best, Runs.build(self._request, self._samples, self._singles()), key=_makespan)
        return best

    def _poured(self) -> tuple[int, list[Item]]:
        """The best pour: of the cut within the bound, and where that is not close to it, of cuts within other times."""
        best = self._descend(Pour.build(self._world, self._lookup, self._cuts), ranges_of(self._cuts))
        for percent, far in ((100, _CLOSE), *((percent, _FAR) for percent in _SHORTER)):
            if best[0] - self.bound > self.bound // far:
                cuts = self._cut(np.maximum(best[0] * percent // 100, self._fastest))
                pour, ranges = Pour.build(self._world, self._lookup, cuts), ranges_of(cuts)
                better = pour.fill(ranges, best[0] - max(best[0] // _FINE, 1))
                if not better.rest:
                    best = self._descend(pour, ranges, better)
        return best

    def _cut(self, makespan: int | IntArray) -> Cuts:
        unknown = np.full(len(self._kinds), NEVER, dtype=np.int64)
        return cut(self._samples, self._menus, self._kinds, unknown, makespan)

    def _descend(self, pour: Pour, ranges: Ranges, known: Filled | None = None) -> tuple[int, list[Item]]:
        """The least target that a pour meets, by bisection below a known one, and the items."""
        low = self.bound
        if known is None:
            low, known = self._raise(pour, ranges)
        while known.makespan - low > max(self.bound // _FINE, 1):
            target = (low + known.makespan) // 2
            filled = pour.fill(ranges, target)
            if filled.rest:
                low = target
            else:
                known = filled
        return known.makespan, [Item(*item) for item in known.items]

    def _raise(self, pour: Pour, ranges: Ranges) -> tuple[int, Filled]:
        """The last target that a pour does not meet, and what it comes to at the first that it does."""
        low, step = self.bound, max(self.bound // _COARSE, 1)
        while True:
            filled = pour.fill(ranges, low + step)
            if not filled.rest:
                return low, filled
            low += step
            step = max(2 * step, filled.rest // self._world.world_size)

    def _narrowest(self) -> list[tuple[int, int]]:
        """Time of each sample alone on the narrowest group that it fits, and that group's size."""
        times = np.stack([menu.times[0] for menu in self._menus])
        chosen = (times < NEVER).argmax(axis=0)[self._kinds]
        alone = times[chosen, self._kinds].tolist()
        return [(t, self._menus[k].sp_size) for t, k in zip(alone, chosen.tolist(), strict=True)]

    def _least_of_singles(self) -> int:
        """At most the makespan of :meth:`_singles`."""
        return sum(t * p for t, p in self._narrowest()) // self._world.world_size

    def _singles(self) -> Iterator[Item]:
        """Single samples on the narrowest groups they fit, longest first: what the static planner does."""
        alone, loads = self._narrowest(), [0] * self._world.world_size
        for p in sorted({p for _, p in alone}, reverse=True):
            free = [(loads[first], first) for first, _ in self._world.blocks_of(p)]
            heapq.heapify(free)
            order = sorted((i for i, (_, size) in enumerate(alone) if size == p), key=lambda i: -alone[i][0])
            for i in order:
                load, first = free[0]
                heapq.heapreplace(free, (load + alone[i][0], first))
                yield Item(i, 1, first, p, alone[i][0])
            for load, first in free:
                loads[first : first + p] = [load] * p


def _makespan(runs: Runs) -> int:
    return runs.makespan
