"""What a planner is asked for is checked where it is said: limits, sample ids and shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lightning_dcp.planners import Limits, PlanRequest
from lightning_dcp.topology import World
from tests.planning_tools import COST


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"memory_bytes": 80e9}, r"memory_bytes=80000000000.0; allowed are integers"),
        ({"memory_bytes": None}, "memory_bytes=None; allowed are integers"),
        ({"max_batch_size": 0}, "max_batch_size=0; allowed are integers from 1, or None"),
        ({"max_batch_size": -1}, "max_batch_size=-1; allowed are integers from 1, or None"),
        ({"max_tokens": -5}, "max_tokens=-5; allowed are integers from 1, or None"),
        ({"min_micro_batches": 0}, "min_micro_batches=0; allowed are integers from 1"),
        ({"min_micro_batches": 1.5}, "min_micro_batches=1.5; allowed are integers from 1"),
        ({"max_step_factor": math.nan}, "max_step_factor=nan; allowed are finite numbers from 1, or None"),
        ({"max_step_factor": math.inf}, "max_step_factor=inf; allowed are finite numbers from 1, or None"),
        ({"max_step_factor": 0.9}, "max_step_factor=0.9; allowed are finite numbers from 1, or None"),
        ({"max_step_factor": "2"}, "max_step_factor='2'; allowed are finite numbers from 1, or None"),
        ({"recompute": "foo"}, r"recompute='foo'; allowed are \('auto', 'none', 'full'\)"),
        ({"packing": 1}, "packing=1; allowed are True and False"),
        ({"exact_shapes": None}, "exact_shapes=None; allowed are True and False"),
    ],
)
def test_limits_out_of_range_are_refused(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Limits(**{"memory_bytes": 1, **limits})


def test_limits_at_the_edge_of_their_ranges_are_allowed() -> None:
    for memory in (-1, 0, 2**62):
        limits = Limits(
            memory_bytes=memory, max_batch_size=1, max_tokens=1, min_micro_batches=2**62, max_step_factor=1
        )
        assert limits.memory_bytes == memory
    assert Limits(memory_bytes=1, max_step_factor=1e300).max_step_factor == 1e300


@pytest.mark.parametrize("shapes", [[(5, 4), (0, 4), (7, -1)], np.asarray([[5, 4], [0, 4], [7, -1]])])
def test_a_sample_without_tokens_is_named(shapes: Any) -> None:
    with pytest.raises(ValueError, match=r"sample 12 has shape \(0, 4\); every size must be at least 1"):
        PlanRequest(
            sample_ids=[11, 12, 13],
            shapes=shapes,
            cost=COST,
            world=World.build(2, [1, 2]),
            limits=Limits(memory_bytes=1),
        )
