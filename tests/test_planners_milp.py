"""Bounds and plans against the optimum of an integer program (SciPy's HiGHS) over all subsets on all groups."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from lightning_dcp.cost import CostModel
from lightning_dcp.plan import Shape
from lightning_dcp.planners import Balanced, PlanRequest, lower_bound
from lightning_dcp.planners.bound import padded_lower_bound
from lightning_dcp.topology import World
from tests.planning_tools import COST, COST_2D, MiB, request
from tests.synthetic import analytic_profile

STEEP = CostModel(analytic_profile((1, 2, 3, 4), (12,), shapes=((16,), (256,), (4096,)), batch_sizes=(1, 4)))


class Columns:
    """Every set of samples on every group that it fits, with the time that it takes there; no planner's code.

    Attributes:
        sets: samples of each column.
        blocks: its group.
        times: its nanoseconds.
    """

    def __init__(self, asked: PlanRequest) -> None:
        self.sets: list[tuple[int, ...]] = []
        self.blocks: list[tuple[int, int]] = []
        self.times: list[int] = []
        count = len(asked.shapes)
        for size in range(1, count + 1):
            for members in combinations(range(count), size):
                for p in asked.world.sp_sizes:
                    time = _time(asked, members, p)
                    if time is not None:
                        blocks = asked.world.blocks_of(p)
                        self.sets += [members] * len(blocks)
                        self.blocks += blocks
                        self.times += [time] * len(blocks)

    def incidence(self, rows: list[tuple[int, ...]], count: int) -> coo_array:
        """One column for each set and group, and an empty one for the makespan."""
        column = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        row = np.concatenate([np.asarray(row) for row in rows])
        return coo_array((np.ones(len(row)), (row, column)), shape=(count, len(rows) + 1))


def _time(asked: PlanRequest, members: tuple[int, ...], sp_size: int) -> int | None:
    """Nanoseconds with the fewest recomputed layers, padded to multiples of the group's size; ``None`` if refused."""
    limits, shapes = asked.limits, asked.shapes[list(members)]
    first, *rest = shapes.max(axis=0).tolist()
    padded = (-(-first // sp_size) * sp_size, *rest)
    tokens = int(np.prod(padded))
    refused = (
        len(members) > (limits.max_batch_size or len(members)),
        limits.max_tokens is not None and len(members) * tokens // sp_size > limits.max_tokens,
        limits.exact_shapes and bool((shapes != np.asarray(padded)).any()),
    )
    if any(refused):
        return None
    size = np.asarray(len(members))
    found = asked.cost.settings(sp_size, size, np.asarray(tokens), limits.memory_bytes, limits.recompute)
    return int(found.nanoseconds) if int(found.nanoseconds) < 2**50 else None


def optimum(asked: PlanRequest) -> int:
    """Least makespan of all plans: each sample in one of the chosen sets, no rank busy for longer than the makespan."""
    columns, world_size, count = Columns(asked), asked.world.world_size, len(asked.shapes)
    scale = max(columns.times)
    ranks = [tuple(range(first, first + size)) for first, size in columns.blocks]
    busy = columns.incidence(ranks, world_size).toarray()
    busy[:, :-1] *= np.asarray(columns.times) / scale
    busy[:, -1] = -1.0
    once = columns.incidence(columns.sets, count)
    width = len(columns.times)
    # Halves within halves look alike: the first sample may be taken to run on the first group of its size.
    alike = (world_size, asked.world.sp_sizes) in ((1, (1,)), (2, (1, 2)), (4, (1, 2, 4)))
    placed = zip(columns.sets, columns.blocks, strict=True)
    upper = [0.0 if alike and 0 in members and first > 0 else 1.0 for members, (first, _) in placed]
    found = milp(
        c=np.append(np.zeros(width), 1.0),
        integrality=np.append(np.ones(width), 0),
        bounds=Bounds(0.0, np.append(upper, np.inf)),
        constraints=[LinearConstraint(once, 1.0, 1.0), LinearConstraint(busy, -np.inf, 0.0)],
        options={"mip_rel_gap": 1e-6},
    )
    assert found.status == 0, found.message
    chosen = np.flatnonzero(found.x[:-1] > 0.5)
    loads: NDArray[np.int64] = np.zeros(world_size, dtype=np.int64)
    for k in chosen.tolist():
        loads[list(ranks[k])] += columns.times[k]
    # The sum of whole nanoseconds of the chosen sets is the makespan of a plan, so no bound may be above it.
    assert sorted(i for k in chosen.tolist() for i in columns.sets[k]) == list(range(count))
    return int(loads.max())


def random_request(seed: int) -> PlanRequest:
    """One or two axes, roomy or tight memory, any limit; up to 8 samples on up to 4 ranks."""
    rng = random.Random(seed)
    world_size = rng.choice([1, 2, 3, 4, 4])
    count = rng.randint(2, 8 if seed % 3 else 6)
    shapes: list[Shape]
    if seed % 5 == 4:
        cost, shapes = COST_2D, [(rng.randint(1, 30), rng.choice([4, 9, 32])) for _ in range(count)]
        need = max(cost.bytes(1, s, 1, (1, 2)) for s in shapes)
    else:
        cost = rng.choice([COST, STEEP])
        median = rng.choice([40, 300, 1500])
        shapes = [(max(int(rng.lognormvariate(np.log(median), 0.9)), 1),) for _ in range(count)]
        need = max(cost.bytes(1, s, 1, (cost.num_layers[0] - 1,)) for s in shapes)
    asked = request(
        shapes,
        world_size,
        cost=cost,
        memory=need + rng.choice([need // 4, need, 2 * need, 300 * MiB]),
        max_batch_size=rng.choice([None, None, 3]),
        max_tokens=rng.choice([None, None, 6000]),
        exact_shapes=rng.random() < 0.1,
    )
    sizes = rng.choice([(1, 2, 4), (1, 2, 4), (1, 2, 3, 4)])
    return replace(asked, world=World.build(world_size, [p for p in sizes if p <= world_size]))


@pytest.mark.parametrize("part", range(4))
def test_bounds_and_plans_against_the_optimum(part: int) -> None:
    ratios = []
    for seed in range(30 * part, 30 * part + 30):
        asked = random_request(seed)
        plan, best = Balanced().plan(asked), optimum(asked)
        bounds = lower_bound(asked), plan.lower_bound, padded_lower_bound(asked)
        assert min(bounds) == bounds[0]
        # The program stops within a millionth of its optimum.
        assert max(bounds) <= best <= plan.makespan * (1 + 1e-5), f"seed {seed}"
        ratios.append(plan.makespan / best)
    assert max(ratios) <= 1.5
    assert np.mean(ratios) <= 1.05
