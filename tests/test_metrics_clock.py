"""How the time between two votes is divided among the ranks, by hand."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch

from lightning_dcp.records import StepTimes
from lightning_dcp.timing import RankTimes, StepClock, times_of_all


def _times(ranks: list[RankTimes], busy: list[float], seconds: float) -> StepTimes:
    sums = [sum(row) for row in zip(*(r.summands(b) for r, b in zip(ranks, busy, strict=True)), strict=True)]
    return times_of_all(sums, ranks[0], seconds, len(ranks))


def _rank(update: float, data: float, other: float, start: float) -> RankTimes:
    return RankTimes(update=update, data=data, other=other, start=start, last=2.0)


def test_who_waits_for_data_of_another_rank_waits_for_data() -> None:
    """Rank 0 reads 0.9 s longer than the others, so they stand 0.9 s in the first agreement."""
    ranks = [_rank(0.1, 1.0, 0.02, 0.001), *[_rank(0.1, 0.1, 0.02, 0.901)] * 3]
    times = _times(ranks, [2.0, 2.0, 2.0, 1.0], 2.5)
    assert times.data == pytest.approx(4 * 1.0, rel=1e-6)
    assert times.other == pytest.approx(4 * 0.02, rel=1e-6)
    assert times.update == pytest.approx(4 * 0.101, rel=1e-6)
    assert times.idle == pytest.approx(4 * 2.5 - 7)
    assert times.total == pytest.approx(4 * (0.1 + 1.0 + 0.02 + 0.001 + 2.5), rel=1e-9)


def test_who_waits_for_callbacks_of_another_rank_does_not_wait_for_data() -> None:
    """Rank 1 logs for 0.5 s; rank 0 reads 0.2 s longer meanwhile, which delays nobody."""
    times = _times([_rank(0.0, 0.3, 0.0, 0.3), _rank(0.0, 0.1, 0.5, 0.0)], [1.0, 1.0], 1.0)
    assert times.data == pytest.approx(0.4, abs=1e-3)
    assert times.other == pytest.approx(0.8, abs=1e-3)
    assert times.total == pytest.approx(2 * 1.6)


def test_ranks_that_come_together_pay_for_the_agreement_only() -> None:
    times = _times([_rank(0.2, 0.1, 0.1, 0.01)] * 2, [1.0, 1.0], 1.0)
    assert times == StepTimes(busy=2.0, idle=0.0, update=pytest.approx(0.42), data=0.2, other=0.2)  # type: ignore[arg-type]
    assert _times([_rank(0.0, 0.0, 0.0, 0.0)], [0.5], 0.4).idle == 0.0


def test_noise_of_one_rank_is_put_right_a_step_later() -> None:
    """Rank 0 was held up for 0.1 s in leaving a vote and took all ranks for as late."""
    ranks = [RankTimes(update=0.0, data=0.0, other=0.0, start=0.0, last=last) for last in (1.1, 1.0, 1.0)]
    assert _times(ranks, [0.5] * 3, 1.0).idle == pytest.approx(1.5 - 0.2)
    assert _times(ranks, [1.0] * 3, 1.0).idle == 0.0


def test_the_clock_leaves_out_what_is_no_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock: update 1 s, 2 s of callbacks, 4 s of validation, 8 s of loop, 16 s in the first agreement."""
    now, waited = [100.0], [0.0]
    monkeypatch.setattr("lightning_dcp.timing.time.perf_counter", lambda: now[0])
    clock = StepClock(torch.device("cpu"), lambda: waited[0])
    clock.arrived()
    clock.begun()
    assert astuple(clock.before_vote()) == (0.0, 0.0, 0.0, 0.0, 0.0)
    seen = []
    for validated in (True, False):
        clock.voted(7.0)
        now[0] += 1.0
        clock.updated()
        now[0] += 2.0
        waited[0] += 0.25
        if validated:
            now[0] += 4.0
            clock.resume()
        now[0] += 8.0
        waited[0] += 3.0
        clock.arrived()
        now[0] += 16.0
        clock.begun()
        now[0] += 32.0
        seen.append(astuple(clock.before_vote()))
    assert seen == [(1.0, 3.0, 5.0, 16.0, 7.0), (1.0, 3.25, 6.75, 16.0, 7.0)]
