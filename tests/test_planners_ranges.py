"""Largest sizes among neighbours, and micro-batches of neighbours against single questions."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_dcp.cost import INFEASIBLE
from lightning_dcp.planners.assembly import settings_within, usable_sp_sizes
from lightning_dcp.planners.padded.samples import Samples
from lightning_dcp.planners.padded.sources import Windows, for_bounds, for_plans
from lightning_dcp.planners.ranges import RangeMax
from tests.planning_tools import COST_2D, request


@pytest.mark.parametrize("count", [1, 2, 3, 8, 37])
def test_every_range(count: int) -> None:
    shapes = np.random.default_rng(count).integers(1, 50, (count, 2))
    ranges = RangeMax(shapes)
    starts, ends = (edge.ravel() for edge in np.triu_indices(count))
    ends = ends + 1
    expected = np.stack([shapes[a:b].max(axis=0) for a, b in zip(starts, ends, strict=True)])
    assert ranges.between(starts, ends).tolist() == expected.tolist()
    for width in range(1, count + 1):
        whole = expected[ends - starts == width]
        assert ranges.windows(0, count - width + 1, width).tolist() == whole.tolist()
        assert ranges.over(np.arange(count - width + 1), width)[0].tolist() == whole.tolist()
        assert ranges.windows(1, count - width + 1, width).tolist() == whole[1:].tolist()


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 900}, {"max_batch_size": 5}])
def test_windows_cost_what_single_questions_say(limits: dict[str, int]) -> None:
    rng = np.random.default_rng(2)
    sizes = np.stack([rng.integers(1, 30, 40), rng.choice([4, 9, 32], 40)], axis=-1)
    asked = request([(int(a), int(b)) for a, b in sizes], cost=COST_2D, **limits)
    samples = Samples.build(asked)
    source = for_plans(asked, samples, for_bounds(asked, samples, usable_sp_sizes(asked)))
    assert isinstance(source, Windows)
    batch_sizes = np.asarray([1, 2, 3, 7, 24, 38])
    for p in usable_sp_sizes(asked):
        rows, _ = source.rows(p, batch_sizes, slice(2, 35))
        for row, b in enumerate(batch_sizes.tolist()):
            for column, start in enumerate(range(2, 35)):
                expected = INFEASIBLE
                if start + b <= 40:
                    largest = samples.shapes[start : start + b].max(axis=0)
                    expected = int(settings_within(asked, p, np.asarray(b), largest).nanoseconds)
                    single = source.times(p, np.asarray([b]), np.asarray([start]))
                    assert single.tolist() == [expected]
                assert rows[row, column] == expected
    assert source.rows(1, np.asarray([39]), slice(5, 9))[0].tolist() == [[INFEASIBLE] * 4]
