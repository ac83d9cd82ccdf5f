"""Questions about many batch sizes of the same samples: equal to asking for each, and a floor under all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.cost import CostModel, RecomputePolicy
from lightning_dcp.interpolation import MAX_TOKENS
from lightning_dcp.profile import Profile
from tests.synthetic import analytic_profile
from tests.test_cost import noisy_profiles


@settings(max_examples=150, deadline=None)
@given(measured=noisy_profiles(), data=st.data())
def test_lines_answer_as_the_cost_model_does(measured: Profile, data: st.DataObject) -> None:
    cost = CostModel(measured)
    tokens = np.asarray(data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=5)), dtype=np.int64)
    limit = data.draw(st.integers(0, 3000))
    policies: list[RecomputePolicy] = ["auto", "none", "full"]
    policy = data.draw(st.sampled_from(policies))
    sizes = np.asarray(sorted(data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=5))), dtype=np.int64)
    for p in cost.sp_sizes:
        lines = cost.lines(p, tokens)
        times, plain = lines.times(sizes, limit, policy)
        assert (times == cost.settings(p, sizes[:, None], tokens, limit, policy).nanoseconds).all()
        assert (plain == cost.settings(p, sizes[:, None], tokens, 2**62, "none").nanoseconds).all()
        assert (lines.part(slice(1, None)).times(sizes, limit, policy)[0] == times[:, 1:]).all()


@settings(max_examples=150, deadline=None)
@given(measured=noisy_profiles(), data=st.data())
def test_no_batch_size_is_below_the_plain_line(measured: Profile, data: st.DataObject) -> None:
    cost = CostModel(measured)
    tokens = np.asarray(data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=5)), dtype=np.int64)
    limit = data.draw(st.integers(0, 3000))
    for p in cost.sp_sizes:
        first, growth = cost.lines(p, tokens).plain_line()
        for b in (*range(1, 20), 50, 1000):
            asked = cost.settings(p, np.asarray(b), tokens, limit).nanoseconds
            # Beyond 2**50 ns predictions stay constant.
            assert ((first + growth * (b - 1) <= asked) | (asked >= 2**50)).all()


def test_the_plain_line_is_met_where_nothing_is_recomputed() -> None:
    cost = CostModel(analytic_profile((1, 2), (4,)))
    tokens = np.asarray([60, 700], dtype=np.int64)
    first, growth = cost.lines(2, tokens).plain_line()
    for b in (1, 2, 5, 8):
        asked = cost.settings(2, np.asarray(b), tokens, 2**60).nanoseconds
        assert first + growth * (b - 1) == pytest.approx(asked, rel=1e-2)


def test_what_cannot_be_counted_is_refused() -> None:
    cost = CostModel(analytic_profile((1,), (4,)))
    for wrong in (-1, MAX_TOKENS + 1):
        with pytest.raises(ValueError, match="tokens; allowed are 0 to"):
            cost.lines(1, np.asarray([5, wrong]))
    with pytest.raises(ValueError, match="size 2 was not profiled"):
        cost.lines(2, np.asarray([5]))
    lines = cost.lines(1, np.asarray([5]))
    for wrong in (0, MAX_TOKENS + 1):
        with pytest.raises(ValueError, match="batch sizes .* allowed are 1 to"):
            lines.times(np.asarray([3, wrong]), 2**40)
