"""The settings of ``bucket`` are those of the whole window: every group opens batches, however large they are."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_dcp.cost import CostModel
from lightning_dcp.planners import Limits, PlanRequest
from lightning_dcp.planners.grouped import Bucket
from lightning_dcp.planners.grouped.groups import Groups
from lightning_dcp.planners.grouped.tuning import best_buckets
from lightning_dcp.profile import Measurement, Profile
from lightning_dcp.topology import World
from lightning_dcp.virtual import profile
from tests.planning_tools import check


def _timed(*rows: tuple[int, int, int], constant_time: int = 0) -> CostModel:
    """A cost model without memory, of measurements ``(batch_size, tokens, nanoseconds)`` on one rank."""
    return CostModel(
        Profile(
            identity={},
            num_layers=(1,),
            static_bytes=0,
            measurements=tuple(
                Measurement(
                    batch_size=batch_size,
                    shape=(tokens,),
                    sp_size=1,
                    forward=(time,),
                    backward=(0,),
                    recompute=(time,),
                    activation_bytes=(1,),
                    input_bytes=(1,),
                    constant_time=constant_time,
                    constant_bytes=0,
                )
                for batch_size, tokens, time in rows
            ),
            sync_time=0,
        )
    )


def _asked(lengths: np.ndarray, world_size: int, cost: CostModel) -> PlanRequest:
    return PlanRequest(
        sample_ids=np.arange(len(lengths)),
        shapes=lengths[:, None],
        cost=cost,
        world=World.build(world_size, [p for p in cost.sp_sizes if p <= world_size], 8),
        limits=Limits(memory_bytes=int(80e9)),
    )


@pytest.mark.parametrize(("low", "high"), [(16, 64), (100, 300)])
def test_short_samples_on_many_ranks_are_planned(low: int, high: int) -> None:
    """No batch of theirs opens among the first samples: one holds most of its group."""
    lengths = np.random.default_rng(1).integers(low, high, 512 * 128)
    asked = _asked(lengths, 128, CostModel(profile("h200-transformer-1d", 128)))
    plan = Bucket(certify=False).plan(asked)
    check(plan, asked, drawn=True)
    assert plan.num_samples > 128


def test_a_group_whose_batches_open_late_counts_as_much_as_its_samples() -> None:
    """Lengths 10 come last in the window, and their batches cost so much that only small targets are good."""
    cost = _timed((1, 10, 10), (20_000, 10, 400_000_000), (1, 20, 10), (20_000, 20, 100_000))
    lengths = np.repeat([20, 10], [17_000, 17_000])
    asked = _asked(lengths, 1, cost)
    groups = Groups.build(asked, (1,), [10, 20], 64)
    found = best_buckets(asked, groups, (1,), False)
    assert found.cost[1] >= 17_000 * 25, "the batches judged must be those of both groups"
    assert found.batch_sizes[0] == 1


@pytest.mark.parametrize("last", [False, True])
def test_single_samples_may_take_no_time(last: bool) -> None:
    """What is measured for short samples or one sample may be rounded to no time."""
    asked = _asked(np.full(50, 1), 2, _timed((1, 1000, 500), (50, 1000, 25_000)))
    plan = Bucket(window=50 if not last else 51).plan(asked)
    check(plan, asked, drawn=True)
