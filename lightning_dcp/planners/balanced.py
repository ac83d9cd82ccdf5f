"""The default planner: the least makespan for the samples of a step, with a proven distance from the optimum."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.assembly import (
    Placement,
    assemble,
    check_feasible,
    raise_micro_batches,
    usable_sp_sizes,
)
from lightning_dcp.planners.bound import Shares, lower_bound
from lightning_dcp.planners.improve import Improver
from lightning_dcp.planners.protocol import PlanRequest
from lightning_dcp.planners.schedule import Item, Schedule
from lightning_dcp.planners.tables import NEVER, Tables
from lightning_dcp.topology import World

_TARGETS = (100, 103, 108, 115, 125, 140, 170, 220)
"""Targets of the makespan in percent of the lower bound."""
_SHARES = (1, 2, 4, 8)
"""A micro-batch lasts at most one of these parts of the target: small ones balance, large ones are efficient."""
_POLISHED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """Moldable scheduling of the given samples on the laminar family of groups.

    For several targets of the makespan, a little above the lower bound: each sample gets the narrowest group that
    meets the target; the samples of one width, sorted by length, are cut into micro-batches of least total time
    by a dynamic program; wide groups are placed first, the longest micro-batch on the group that is free first.
    The best results are improved by a bounded number of moves of the busiest rank's micro-batches (elsewhere,
    in exchange, or in part). Recomputed layers are the fewest that fit each micro-batch.

    The makespan is never above that of single samples dealt longest first (``Static()``), unless
    ``limits.min_micro_batches`` asks for more micro-batches than the best plan has.

    - ``limits.max_step_factor`` is not used: the step's samples are given, so its length is no choice.
    - ``limits.packing`` is refused: this planner pads.

    Attributes:
        max_moves: most moves of the improvement for each candidate.
    """

    max_moves: int = 200
    name: str = field(default="balanced", init=False)
    draws: bool = field(default=False, init=False)
    lockstep: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.max_moves < 0:
            raise ValueError(f"max_moves={self.max_moves}; allowed are integers from 0")

    def plan(self, request: PlanRequest) -> IterationPlan:
        """Plan one optimizer step.

        Raises:
            InfeasibleError: a sample fits no allowed setting.
            ValueError: ``limits.packing`` is set, or world and profile have no size in common.
        """
        sizes = usable_sp_sizes(request)
        if not len(request.shapes):
            return assemble(request, [])
        check_feasible(request, sizes)
        options = Shares.build(request)
        bound = lower_bound(request, options)
        tables = Tables.build(request, options)
        best = self._search(request, tables, bound)
        order = tables.order.tolist()
        placements = [
            Placement(tuple(order[item.start : item.start + item.batch_size]), item.first_rank, item.sp_size)
            for item in best.items
        ]
        minimum = request.limits.min_micro_batches
        return assemble(request, raise_micro_batches(placements, request.world.world_size, minimum), bound)

    def _search(self, request: PlanRequest, tables: Tables, bound: int) -> Schedule:
        candidates = _candidates(request.world, tables, bound)
        candidates.sort(key=lambda schedule: schedule.makespan)
        improver = Improver(request=request, tables=tables)
        for schedule in candidates[:_POLISHED]:
            improver.improve(schedule, self.max_moves, bound)
        return min(candidates, key=lambda schedule: schedule.makespan)


def _candidates(world: World, tables: Tables, bound: int) -> list[Schedule]:
    found, seen = [], set()
    for widths, cap in _settings(tables, bound):
        key = (widths, cap)
        if key not in seen:
            seen.add(key)
            found.append(_construct(world, tables, widths, cap))
    return found


def _settings(tables: Tables, bound: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Widths of all samples and the longest micro-batch, for each target."""
    for percent in _TARGETS:
        target = bound * percent // 100
        for share in _SHARES:
            yield _widths(tables, target), target // share
    # Single samples on the narrowest groups they fit: what the static planner does.
    yield _widths(tables, NEVER - 1), 0


def _widths(tables: Tables, target: int) -> tuple[int, ...]:
    """Narrowest group for each sample that ends it within ``target``, else the fastest; longest sample first.

    Times never fall with the length, so the samples of one width are neighbours, or nearly so.
    """
    single = np.stack([tables.times[p][0] for p in tables.sp_sizes])
    meets = single <= target
    chosen = np.where(meets.any(axis=0), meets.argmax(axis=0), single.argmin(axis=0))
    return tuple(int(tables.sp_sizes[k]) for k in chosen)


def _construct(world: World, tables: Tables, widths: tuple[int, ...], cap: int) -> Schedule:
    """Cut the samples of each width into micro-batches and place them, wide groups first."""
    schedule = Schedule(world.world_size)
    edges = [0, *(i for i in range(1, len(widths)) if widths[i] != widths[i - 1]), len(widths)]
    runs = [(widths[a], a, b) for a, b in pairwise(edges)]
    for p in sorted({width for width, _, _ in runs}, reverse=True):
        pieces = [piece for width, a, b in runs if width == p for piece in tables.partition(p, a, b, cap)]
        pieces.sort(key=lambda piece: -piece[2])
        # Wider groups hold each block of this size whole or not at all, so its ranks are equally busy here.
        free = [(int(schedule.loads[first]), first) for first, _ in world.blocks_of(p)]
        heapq.heapify(free)
        for start, b, nanoseconds in pieces:
            load, first = free[0]
            schedule.add(Item(start, b, first, p, nanoseconds))
            heapq.heapreplace(free, (load + nanoseconds, first))
    return schedule
