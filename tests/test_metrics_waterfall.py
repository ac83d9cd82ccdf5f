"""Where the time went: by hand from the cost model, and with sleeps whose length the test knows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_dcp.agreement import Agreement
from lightning_dcp.callback import DCPCallback
from lightning_dcp.cost import CostModel
from lightning_dcp.metrics import PARTS, Columns, Waterfall, busy_shares
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.records import StepTimes
from tests.fitting import Case, Data, Module, Samples, make_strategy, make_trainer
from tests.metrics_tools import Layout
from tests.pool import Pool
from tests.synthetic import analytic_cost


def _row(**changes: Any) -> MicroBatch:
    values: dict[str, Any] = {
        "sample_ids": (0, 1), "shapes": ((40,), (100,)), "padded_shape": (128,), "first_rank": 0, "sp_size": 1,
        "recompute": (), "nanoseconds": 1, "bytes": 1,
    }  # fmt: skip
    return MicroBatch(**values | changes)


def _columns(**values: Any) -> Columns:
    return Columns.of(IterationPlan(**values))


def _by_hand(m: MicroBatch, cost: CostModel) -> list[float]:
    b, length, p = m.batch_size, m.padded_shape, m.sp_size
    whole, plain = (p * cost.nanoseconds(b, length, p, r) for r in (m.recompute, ()))
    alone = cost.nanoseconds(b, length, 1, ())
    samples = sum(cost.nanoseconds(b, shape, 1, ()) for shape in m.shapes) / b
    base = min(alone, plain)
    return [base * samples / alone, base - base * samples / alone, whole - plain, plain - base]


def test_busy_time_is_divided_by_the_cost_model() -> None:
    cost = analytic_cost()
    rows = [
        _row(),
        _row(sample_ids=(2,), shapes=((4000,),), padded_shape=(4000,), sp_size=4, recompute=(3,)),
        _row(sample_ids=(3, 4), sp_size=2, recompute=(1,)),
        _row(sample_ids=(5,), shapes=((7,),), padded_shape=(7,), first_rank=3),
    ]
    expected = np.sum([_by_hand(m, cost) for m in rows], axis=0)
    shares = busy_shares(_columns(world_size=4, micro_batches=tuple(rows)), cost)
    assert list(shares) == list(PARTS[:4])
    assert list(shares.values()) == pytest.approx(list(expected / expected.sum()), rel=1e-9)
    assert min(shares.values()) > 0.001
    alone = busy_shares(_columns(world_size=4, micro_batches=tuple(rows[-1:])), cost)
    assert alone == {"useful": 1.0, "padding": 0.0, "recompute": 0.0, "sequence_parallel": 0.0}
    assert set(busy_shares(_columns(world_size=4, micro_batches=()), cost).values()) == {0.0}


def test_waterfall_adds_up() -> None:
    waterfall = Waterfall()
    assert set(waterfall.shares().values()) == {0.0}
    busy = {"useful": 0.5, "padding": 0.25, "recompute": 0.25, "sequence_parallel": 0.0}
    first = waterfall.add(StepTimes(busy=4.0, idle=2.0, update=1.0, data=0.5, other=0.5), busy)
    assert list(first.values()) == [0.25, 0.125, 0.125, 0.0, 0.25, 0.125, 0.0625, 0.0625]
    waterfall.add(StepTimes(busy=8.0), {"useful": 1.0, "padding": 0.0, "recompute": 0.0, "sequence_parallel": 0.0})
    assert waterfall.seconds()["useful"] == 10.0
    assert waterfall.shares()["useful"] == 10.0 / 16.0
    assert sum(waterfall.shares().values()) == pytest.approx(1.0)


@dataclass
class Sleeps:
    """Seconds to sleep in the coming step."""

    data: float = 0.0
    update: float = 0.0
    micro_batch: float = 0.0


class SlowSamples(Samples):
    def __init__(self, case: Case, sleeps: Sleeps) -> None:
        super().__init__(case)
        self.sleeps = sleeps

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.sleeps.data)
        return super().__getitem__(index)


class SlowData(Data):
    def __init__(self, case: Case, sleeps: Sleeps) -> None:
        super().__init__(case)
        self.sleeps = sleeps

    def setup(self, stage: str | None = None) -> None:
        self.train_dataset = SlowSamples(self.case, self.sleeps)


class SlowSGD(torch.optim.SGD):
    sleeps: Sleeps

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.sleeps.update)
        return super().step(closure)


class SlowModule(Module):
    """Sleeps in the optimizer and, on rank 0, in training_step and after the step."""

    def __init__(self, case: Case, sleeps: Sleeps) -> None:
        super().__init__(case)
        self.sleeps = sleeps

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        time.sleep(self.sleeps.micro_batch)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = SlowSGD(self.parameters(), lr=self.case.lr)
        optimizer.sleeps = self.sleeps
        return optimizer


NAP = 0.3
STEPS = ("warm-up", "calm", "data", "update", "other", "idle", "calm")


class Director(pl.Callback):
    """Says, at the end of a step, where the next one sleeps."""

    def __init__(self, sleeps: Sleeps) -> None:
        self.sleeps = sleeps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        coming = STEPS[trainer.global_step] if trainer.global_step < len(STEPS) else ""
        first = trainer.global_rank == 0
        after = STEPS[trainer.global_step + 1] if trainer.global_step + 1 < len(STEPS) else ""
        self.sleeps.data = NAP / 4 if coming == "data" and first else 0.0
        # The update belongs to the time up to the next vote, and so does what callbacks do here.
        self.sleeps.update = NAP if after == "update" else 0.0
        self.sleeps.micro_batch = NAP / 2 if coming == "idle" and first else 0.0
        if coming == "other" and first:
            time.sleep(NAP)


def _fit_slow(world_size: int) -> tuple[list[StepTimes], list[float], dict[str, float], list[dict[str, float]]]:
    """Times of the steps, and this rank's own wall-clock between the votes."""
    votes: list[float] = []
    original = Agreement.end

    def end(*args: Any) -> Any:
        totals = original(*args)
        votes.append(time.perf_counter())
        return totals

    case = Case(world_size=world_size, samples=56, batch=8, steps=len(STEPS), masked="none")
    sleeps, dcp = Sleeps(), DCPCallback()
    # Four samples of a step, in two micro-batches, on each of two ranks; the others have nothing to do.
    layout = Layout(sp_size=1)
    trainer = make_trainer(
        make_strategy(case, planner=layout), case, devices=world_size, callbacks=[dcp, Director(sleeps)]
    )
    Agreement.end = end  # type: ignore[assignment, method-assign]
    try:
        trainer.fit(SlowModule(case, sleeps), datamodule=SlowData(case, sleeps))
    finally:
        Agreement.end = original  # type: ignore[method-assign]
    return [r.times for r in dcp.records], votes, dcp.waterfall(), dcp.metrics


@pytest.mark.feature("Metrics", "where the time of all ranks went", "`DCPCallback.waterfall()`")
@pytest.mark.parametrize("world_size", [2, 4])
def test_sleeps_show_where_they_are(pool: Pool, world_size: int) -> None:
    """The parts add up to W times the wall-clock that the test measured, and each sleep is in its own part."""
    ranks = pool.run(_fit_slow, world_size, world_size, timeout=120.0)
    walls = sum(votes[-1] - votes[0] for _, votes, _, _ in ranks)
    # A rank takes the others for as late as itself in the last step; the mean of all has no such noise.
    assert np.mean([sum(t.total for t in times[1:]) for times, *_ in ranks]) == pytest.approx(walls, rel=0.01)
    for times, _, shares, metrics in ranks:
        assert sum(t.total for t in times[1:]) == pytest.approx(walls, rel=0.1)
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)
        for step, (name, part) in enumerate(zip(STEPS, times, strict=True)):
            logged = {key: metrics[step][f"time_{key}"] for key in PARTS}
            assert sum(logged.values()) == pytest.approx(1.0, abs=1e-9)
            if name in ("data", "update", "other"):
                # All ranks wait for the one that sleeps, or sleep too.
                assert getattr(part, name) >= 0.8 * world_size * NAP
                assert logged[name] == pytest.approx(getattr(part, name) / part.total)
            if name == "idle":
                naps = part.busy - (times[1].busy + times[-1].busy) / 2
                assert part.idle >= 0.8 * (world_size - 1) * naps
                assert naps >= 0.8 * NAP
        calm = np.mean(
            [[getattr(times[i], name) for name in ("data", "update", "other", "idle")] for i in (1, 6)], 0
        )
        for step, index in ((2, 0), (3, 1), (4, 2), (5, 3)):
            found = [getattr(times[step], part) for part in ("data", "update", "other", "idle")]
            assert np.argmax(np.asarray(found) - calm) == index
