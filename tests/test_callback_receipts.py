"""Receipts of epochs and of resumed runs, the counters that schedules use, and the time that is left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dcp.callback import DCPCallback
from lightning_dcp.callback.timeleft import Limits, TimeLeft
from lightning_dcp.cost import CostModel
from lightning_dcp.metrics import EpochLedger, Forecast, Receipt
from tests.fitting import LAYERS, Case, Data, Module, Samples, formula_profile, make_strategy, make_trainer
from tests.metrics_tools import Layout
from tests.pool import Pool

CASE = Case(world_size=2, samples=22, batch=4, steps=-1, masked="none", seed=3)


def _ids(*ids: int) -> Any:
    return np.asarray(ids, dtype=np.int64)


def test_a_ledger_finds_what_is_missing_and_what_came_twice() -> None:
    """Sample 4 stands twice in the epoch's order; 0 and 1 were trained before."""
    ledger = EpochLedger(2, 8, _ids(2, 3, 4, 4, 5), (2, 1))
    ledger.add(_ids(2, 4))
    ledger.add(_ids(4, 3))
    open_one = ledger.receipt()
    assert (open_one.planned, open_one.before, open_one.trained, open_one.remaining) == (7, 2, 4, 1)
    assert not open_one.complete
    assert str(open_one) == (
        "epoch 2: 6 of 7 samples trained exactly once, 2 of them before this run resumed, 1 remain, 1 dropped, as they "
        "make up no whole step, 0 refused"
    )
    ledger.add(_ids(5))
    assert ledger.receipt(3, Path("x.json")).complete
    assert str(ledger.receipt(3, Path("x.json"))).endswith("3 refused (listed in x.json)")
    ledger.add(_ids(3, 7))
    twice = ledger.receipt()
    assert (twice.trained, twice.repeated, twice.remaining, twice.complete) == (5, 2, 0, False)
    assert "2 trained TOO OFTEN" in str(twice)


class Watch(pl.Callback):
    """The strategy's counters and the callback's after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        keys = ("dcp/consumed_samples", "dcp/consumed_tokens", "dcp/seconds_left")
        logged = (float(trainer.callback_metrics[key]) for key in keys)
        self.seen.append((*logged, strategy.consumed_samples, strategy.consumed_tokens))


def _fit(folder: str, resume: str | None, **kwargs: Any) -> dict[str, Any]:
    dcp, watch = DCPCallback(), Watch()
    limit = kwargs.pop("limit", None)
    # On one rank each, so that no pair shares what is too long for one.
    settings: dict[str, Any] = {"memory_limit": limit, "sp_sizes": (1,)} if limit else {}
    trainer = make_trainer(
        make_strategy(CASE, planner=Layout(), **settings),
        CASE,
        devices=2,
        default_root_dir=folder,
        enable_checkpointing=True,
        callbacks=[dcp, watch, ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)],
        **kwargs,
    )
    trainer.fit(Module(CASE), datamodule=Data(CASE, too_long="leave_out"), ckpt_path=resume)
    plans = [[i for m in record.plan.micro_batches for i in m.sample_ids] for record in dcp.records]
    return {"receipts": dcp.receipts, "seen": watch.seen, "plans": plans, "keys": [sorted(m) for m in dcp.metrics]}


def _runs(folder: str, limit: str) -> list[dict[str, Any]]:
    return [
        _fit(folder, None, max_steps=8, max_epochs=-1),
        _fit(folder, f"{folder}/step=4.ckpt", max_epochs=2),
        _fit(f"{folder}/limited", None, max_epochs=1, limit=limit),
    ]


FITTING = 30
"""Most tokens of a sample that fits the third run."""


def _needed(tokens: int) -> int:
    """Least bytes of one sample on one rank."""
    cost = CostModel(formula_profile(2, (LAYERS,)))
    return min(cost.bytes(1, (tokens,), 1, (r,)) for r in range(LAYERS + 1))


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[dict[str, Any]]], Path]:
    folder = tmp_path_factory.mktemp("receipts")
    return pool.run(_runs, 2, str(folder), f"{_needed(FITTING)}B", timeout=120.0), folder


@pytest.mark.feature("Metrics", "a receipt of each epoch", "`DCPCallback.receipts`")
def test_receipts_of_epochs_and_of_a_resumed_run(runs: tuple[list[list[dict[str, Any]]], Path]) -> None:
    for (first, resumed, _), _rank in zip(runs[0], range(2), strict=True):
        # Six steps an epoch, the last one of two samples; eight steps in all.
        whole, cut = first["receipts"]
        assert (whole.epoch, whole.planned, whole.trained, whole.complete) == (0, 22, 22, True)
        assert (cut.epoch, cut.planned, cut.trained, cut.remaining, cut.complete) == (1, 22, 8, 14, False)
        before, rest, last = resumed["receipts"]
        assert before == Receipt(
            epoch=0, planned=22, before=16, trained=0, repeated=0, remaining=6, refused=0, refused_file=None
        )
        assert (rest.planned, rest.before, rest.trained, rest.complete) == (22, 16, 6, True)
        assert (last.epoch, last.before, last.trained, last.complete) == (1, 0, 22, True)


def test_refused_samples_are_counted_and_named(runs: tuple[list[list[dict[str, Any]]], Path]) -> None:
    results, folder = runs
    lengths = Samples(CASE).lengths
    refused = np.flatnonzero(lengths > FITTING).tolist()
    assert refused
    for _, _, limited in results:
        (receipt,) = limited["receipts"]
        assert (receipt.planned, receipt.trained, receipt.refused) == (
            22 - len(refused),
            22 - len(refused),
            len(refused),
        )
        assert receipt.complete
        assert receipt.refused_file == folder / "limited" / "left_out_samples.json"
        assert [row["index"] for row in json.loads(receipt.refused_file.read_text())["left_out"]] == refused


@pytest.mark.feature("Metrics", "`consumed_samples`, `consumed_tokens`", "also after a resume")
def test_counters_of_samples_and_tokens(runs: tuple[list[list[dict[str, Any]]], Path]) -> None:
    """Lightning-AI/pytorch-lightning#21491: equal to the truth, logged, saved and restored."""
    lengths = Samples(CASE).lengths
    for first, resumed, _ in runs[0]:
        for run, known in ((first, []), (resumed, first["plans"][:4])):
            trained = [i for ids in known for i in ids]
            for ids, seen in zip(run["plans"], run["seen"], strict=True):
                trained += ids
                truth = (len(trained), int(lengths[trained].sum()))
                assert seen[:2] == truth
                assert seen[3:] == truth


def test_time_left_ends_at_nothing(runs: tuple[list[list[dict[str, Any]]], Path]) -> None:
    for first, resumed, _ in runs[0]:
        for run in (first, resumed):
            left = [seen[2] for seen in run["seen"]]
            assert all(value > 0 for value in left[:-1])
            assert left[-1] == 0
            assert len({tuple(keys) for keys in run["keys"]}) == 1


TOKENS = _ids(8, 16, 32, 64, 8, 16, 32, 64)


def _left(sync: int = 0) -> tuple[TimeLeft, Any]:
    """Four samples of eight are left after two steps of two, which took twice as long as predicted."""
    profile = replace(formula_profile(2, (LAYERS,)), sync_time=sync)
    cost = CostModel(profile)
    left = TimeLeft(Forecast(cost, TOKENS, 2), TOKENS)
    left.begin_epoch(np.arange(8), 0)

    def seconds(*ids: int) -> float:
        return float(cost.useful_time(TOKENS[list(ids)]).sum()) / 2e9

    left.add(_ids(0, 1), 100.0)  # the first step warms up
    left.add(_ids(2, 3), 2 * (seconds(2, 3) + sync / 1e9))
    return left, seconds


def test_time_left_is_predicted_work_times_the_ratio_so_far() -> None:
    for sync in (0, 10**7):
        left, seconds = _left(sync)
        rest, all_of_it, step = seconds(4, 5, 6, 7), seconds(*range(8)), sync / 1e9
        expected = {
            Limits(epochs=0, batches=4, done=2): 2 * (rest + 2 * step),
            Limits(epochs=2, batches=4, done=2): 2 * (rest + 2 * step + 2 * (all_of_it + 4 * step)),
            Limits(epochs=2, batches=4, done=2, steps=1): 2 * (rest / 2 + step),
            Limits(batches=4, done=2, steps=5): 2 * (rest + 3 * all_of_it / 4 + 5 * step),
            # Without a number of batches the epoch is as long as its samples.
            Limits(epochs=1): 2 * (rest + 2 * step + all_of_it + 4 * step),
            # limit_train_batches=3: one more step, and three in the next epoch.
            Limits(epochs=1, batches=3, done=2): 2 * (rest / 2 + step + 3 * (all_of_it / 4 + step)),
            Limits(epochs=0, batches=2, done=2): 0.0,
            Limits(steps=0, batches=4, done=2): 0.0,
            Limits(epochs=2, batches=4, done=2, seconds=1e-9): 1e-9,
            Limits(seconds=5.0): 5.0,
        }
        for limits, value in expected.items():
            assert left.seconds(limits) == pytest.approx(value), limits
        assert left.seconds(Limits(batches=4, done=2)) is None


def test_time_left_of_a_resumed_epoch() -> None:
    left, _ = _left()
    left.begin_epoch(_ids(6, 7), before=6)
    whole = left.seconds(Limits(epochs=1, batches=4, done=3))
    only = left.seconds(Limits(epochs=0, batches=4, done=3))
    cost = CostModel(formula_profile(2, (LAYERS,)))
    assert whole is not None
    assert only is not None
    assert only == pytest.approx(2 * float(cost.useful_time(_ids(32, 64)).sum()) / 2e9)
    assert whole - only == pytest.approx(2 * float(cost.useful_time(TOKENS).sum()) / 2e9)


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"window": 2.5}, {"peak_flops": 0}, {"peak_flops": float("inf")}]
)
def test_arguments_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; allowed are"):
        DCPCallback(**wrong)
