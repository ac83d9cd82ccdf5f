"""The padded plan of given samples: bounds, pours, local search, and the best of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.padded.bounds import Bounds
from lightning_dcp.planners.padded.least import NEVER
from lightning_dcp.planners.padded.lookup import Lookup
from lightning_dcp.planners.padded.menus import again, build, singles_of
from lightning_dcp.planners.padded.moves import Improver
from lightning_dcp.planners.padded.pour import Item, Pour, ranges_of
from lightning_dcp.planners.padded.prices import Cuts, cut
from lightning_dcp.planners.padded.runs import Runs
from lightning_dcp.planners.padded.schedule import Schedule
from lightning_dcp.planners.padded.sources import Windows
from lightning_dcp.planners.protocol import PlanRequest

_COARSE, _FINE = 512, 1024
"""The target is first raised by one part in 512, and not searched more finely than to one in 1024."""
_CLOSE = 128
"""What is within one part in 128 of the bound is not poured again."""
_MARGIN = 1024
"""Divided by the number of samples: percent by which wide groups may be dearer and are asked for all the same."""


def plan_padded(request: PlanRequest, max_moves: int) -> IterationPlan:
    """Plan one step without packing; see :class:`~lightning_dcp.planners.balanced.Balanced`.

    Raises:
        InfeasibleError: a sample fits no allowed setting.
        ValueError: world and profile have no size in common.
    """
    if not len(request.shapes):
        return IterationPlan(world_size=request.world.world_size, micro_batches=())
    bounds = Bounds.build(request, _MARGIN // len(request.shapes))
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
        self._cuts = priced if self._costs_as_much(priced) else self._cut(self._shortest())
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
        """The best pour of cuts within the bound and, where that is not close to it, of cuts within the result."""
        span, items = self._descend(self._cuts)
        if span - self.bound > self.bound // _CLOSE:
            again = self._descend(self._cut(span))
            span, items = min((span, items), again, key=lambda pair: pair[0])
        return span, items

    def _shortest(self) -> int:
        """A makespan within which every sample ends alone."""
        fastest = np.stack([menu.times[0] for menu in self._menus]).min(axis=0)
        return max(self.bound, int(fastest.max()))

    def _cut(self, makespan: int) -> Cuts:
        unknown = np.full(len(self._kinds), NEVER, dtype=np.int64)
        return cut(self._samples, self._menus, self._kinds, unknown, makespan)

    def _descend(self, cuts: Cuts) -> tuple[int, list[Item]]:
        """The least target that a pour meets, by bisection, and the items."""
        pour, ranges = Pour.build(self._world, self._lookup, cuts), ranges_of(cuts)
        low, step = self.bound, max(self.bound // _COARSE, 1)
        high, best = low + step, None
        while best is None or high - low > max(self.bound // _FINE, 1):
            target = high if best is None else (low + high) // 2
            filled = pour.fill(ranges, target)
            if not filled.rest:
                high, best = filled.makespan, filled.items
            else:
                low = target
                if best is None:
                    step = max(2 * step, filled.rest // self._world.world_size)
                    high = low + step
        return high, [Item(*item) for item in best]

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
