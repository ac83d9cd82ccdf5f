"""A key named ``loss`` of the user's own, and the one axis of all loggers."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers.logger import Logger

from lightning_dcp.callback import DCPCallback
from tests.fitting import Case, Data, Module, make_strategy, make_trainer
from tests.metrics_tools import Layout
from tests.pool import Pool

CASE = Case(world_size=2, samples=16, batch=4, steps=4, masked="none", seed=2)


class Memory(Logger):
    """Keeps what every logger gets."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Logging(Module):
    """Logs a ``loss`` of its own in one of the ways in which users do."""

    def __init__(self, case: Case, way: str) -> None:
        super().__init__(case)
        self.way = way

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.way == "epoch":
            self.log("loss", loss.detach() * 0 + 7.0, on_step=False, on_epoch=True)
        if self.way == "step":
            self.log("loss", loss.detach() * 0 + 7.0, prog_bar=True)
        if self.way == "both":
            self.log("loss", loss.detach() * 0 + 7.0, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.way == "hook":
            self.log("loss", 7.0, on_epoch=True, on_step=True)


WAYS = ("none", "epoch", "step", "both", "hook")


def _fits() -> dict[str, Any]:
    found = {}
    for way in WAYS:
        memory, dcp, module = Memory(), DCPCallback(), Logging(CASE, way)
        shown: list[set[str]] = []

        class Bar(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
                shown.append(set(trainer.progress_bar_metrics))  # noqa: B023

        trainer = make_trainer(
            make_strategy(CASE, planner=Layout()),
            CASE,
            devices=2,
            logger=memory,
            log_every_n_steps=1,
            callbacks=[dcp, Bar(), LearningRateMonitor("step")],
            max_epochs=1,
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.fit(module, datamodule=Data(CASE))
        found[way] = {
            "rows": memory.rows,
            "losses": module.losses,
            "end": float(trainer.callback_metrics["loss"]),
            "bar": set(trainer.progress_bar_metrics) | shown[-1],
            "warnings": [str(w.message) for w in seen if "'loss' is logged by" in str(w.message)],
        }
    return found


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> list[dict[str, Any]]:
    return pool.run(_fits, 2, timeout=120.0)


@pytest.mark.feature("Metrics", "a `loss` of your own", "the exact one is `dcp/loss`")
def test_a_loss_of_the_users_own_keeps_its_name(ranks: list[dict[str, Any]]) -> None:
    fits = ranks[0]
    for way in WAYS:
        exact = [row["dcp/loss"] for _, row in fits[way]["rows"] if "dcp/loss" in row and "dcp/padding" in row]
        assert exact[: CASE.steps] == pytest.approx(fits[way]["losses"], rel=1e-6)
        assert len(fits[way]["warnings"]) == (way != "none")
    steps = {way: [row["loss"] for _, row in fits[way]["rows"] if "loss" in row] for way in WAYS}
    assert steps["none"][: CASE.steps] == pytest.approx(fits["none"]["losses"], rel=1e-6)
    assert steps["epoch"] == [7.0], "once, at the end of the epoch"
    assert set(steps["step"]) == {7.0}
    assert steps["both"] == [], "Lightning appends _step and _epoch"
    for way in ("both", "hook"):
        both = [row for _, row in fits[way]["rows"] if "loss_step" in row or "loss_epoch" in row]
        assert {row.get("loss_step", 7.0) for row in both} == {row.get("loss_epoch", 7.0) for row in both} == {7.0}
    assert all(fits[way]["end"] == 7.0 for way in WAYS if way != "none")


def test_the_progress_bar_shows_one_loss_of_each_kind(ranks: list[dict[str, Any]]) -> None:
    fits = ranks[0]
    assert {"loss", "dcp/tokens_per_second"} <= fits["none"]["bar"]
    assert "dcp/loss" not in fits["none"]["bar"]
    assert {"loss", "dcp/loss"} <= fits["step"]["bar"]
    assert "loss" not in fits["epoch"]["bar"]
    assert "dcp/loss" in fits["epoch"]["bar"]


@pytest.mark.feature("Callbacks", "`LearningRateMonitor`")
def test_steps_of_the_logger_do_not_go_back(ranks: list[dict[str, Any]]) -> None:
    """Lightning-AI/pytorch-lightning#5405: one axis for our keys, the user's and LearningRateMonitor's."""
    for way in WAYS:
        rows = ranks[0][way]["rows"]
        steps = [step for step, _ in rows]
        assert steps == sorted(steps)
        ours = [step for step, row in rows if "dcp/padding" in row]
        assert ours[: CASE.steps] == list(range(CASE.steps))
        assert {step for step, row in rows if "lr-SGD" in row} == set(range(CASE.steps))
