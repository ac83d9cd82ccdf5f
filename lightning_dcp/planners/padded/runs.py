"""Micro-batches of neighbours with the times that a plan of them will have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.plan import IterationPlan, loads_of
from lightning_dcp.planners.assembly import Placement, assemble, raise_micro_batches, settings_within
from lightning_dcp.planners.padded.pour import Item
from lightning_dcp.planners.padded.samples import Samples
from lightning_dcp.planners.protocol import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Items that hold each sample once, timed as they are padded and with the layers that must be recomputed.

    Attributes:
        request: the request.
        samples: its samples.
        items: micro-batches by their first sample.
        makespan: busy nanoseconds of the busiest rank; :data:`INFEASIBLE` where a micro-batch does not fit.
    """

    request: PlanRequest
    samples: Samples
    items: tuple[Item, ...]
    makespan: int

    @classmethod
    def build(cls, request: PlanRequest, samples: Samples, items: Iterable[Item]) -> Runs:
        """Ask the cost model for all items at once."""
        sorted_items = tuple(sorted(items))
        columns = np.asarray(sorted_items, dtype=np.int64)
        times = _nanoseconds(request, samples, columns)
        loads = loads_of(request.world.world_size, columns[:, 2], columns[:, 3], times)
        makespan = int(loads.max()) if int(times.max()) < INFEASIBLE else INFEASIBLE
        return cls(request=request, samples=samples, items=sorted_items, makespan=makespan)

    def plan(self, lower_bound: int) -> IterationPlan:
        """The plan, longest samples first."""
        order, request = self.samples.order.tolist(), self.request
        placements = [
            Placement(tuple(order[item.start : item.start + item.batch_size]), item.first_rank, item.sp_size)
            for item in self.items
        ]
        if request.limits.min_micro_batches > 1:
            minimum = request.limits.min_micro_batches
            placements = raise_micro_batches(placements, request.world.world_size, minimum)
        return assemble(request, placements, lower_bound)


def _nanoseconds(request: PlanRequest, samples: Samples, columns: IntArray) -> IntArray:
    """Times of items given as rows ``(start, b, first rank, p, ...)``, shape ``[m]``."""
    largest = np.maximum.reduceat(samples.shapes, columns[:, 0], axis=0)
    times = np.zeros(len(columns), dtype=np.int64)
    for p in np.unique(columns[:, 3]).tolist():
        rows = np.flatnonzero(columns[:, 3] == p)
        times[rows] = settings_within(request, p, columns[rows, 1], largest[rows]).nanoseconds
    return times
