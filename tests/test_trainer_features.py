"""Settings and callbacks of the Trainer do under DCPStrategy what they do on a single device."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from tests.checkpointing import CASE, Plans, sample_ids
from tests.fitting import make_strategy, make_trainer, weights_of
from tests.pool import Pool
from tests.test_checkpoint_callbacks import ScoredData, ScoredRich, ScoredSingle, assert_equal


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run leaves: weights, samples and learning rates of each step, and what its callbacks saw."""

    weights: dict[str, Tensor]
    ids: list[list[int]]
    rates: list[list[float]]
    steps: int
    extra: dict[str, Any] = field(default_factory=dict)


class Rates(pl.Callback):
    """Learning rates of each step."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def fit(
    mixin: type, steps: list[list[int]] | None, callbacks: list[Any], resume: Any = None, **settings: Any
) -> Outcome:
    """Three epochs at most, under DCPStrategy or, on given steps, on a single device."""
    plans, rates = Plans(), Rates()
    settings = {"max_steps": -1, "max_epochs": 3, "num_sanity_val_steps": 0, **settings}
    if steps is None:
        module: Any = type("Module", (mixin, ScoredRich), {})(CASE)
        trainer = make_trainer(
            make_strategy(CASE), CASE, devices=2, callbacks=[plans, rates, *callbacks], **settings
        )
        trainer.fit(module, datamodule=ScoredData(CASE), ckpt_path=resume)
    else:
        module = type("Module", (mixin, ScoredSingle), {})(CASE)
        module.steps = steps
        settings["reload_dataloaders_every_n_epochs"] = 1
        trainer = make_trainer("auto", CASE, devices=1, callbacks=[rates, *callbacks], **settings)
        trainer.fit(module)
    return Outcome(
        weights=weights_of(module), ids=sample_ids(plans.plans), rates=rates.rates, steps=trainer.global_step
    )


def assert_same(ours: Outcome, single: Outcome) -> None:
    assert ours.steps == single.steps == len(ours.ids)
    assert ours.rates == [pytest.approx(rates) for rates in single.rates]
    assert_equal(ours.weights, single.weights)


class Plain:
    """Nothing of its own."""


# --- schedules -------------------------------------------------------------------------------------------------------


class Plateau:
    """Lowers the rates after the second epoch, whose score is below the first one's."""

    def configure_optimizers(self) -> Any:
        made: Any = super().configure_optimizers()  # type: ignore[misc]
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(made["optimizer"], "max", factor=0.3, patience=0)
        return {"optimizer": made["optimizer"], "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class OneCycle:
    """Over all steps of the run, which the Trainer counts; the momentum moves too."""

    def configure_optimizers(self) -> Any:
        made: Any = super().configure_optimizers()  # type: ignore[misc]
        steps = self.trainer.estimated_stepping_batches  # type: ignore[attr-defined]
        schedule = torch.optim.lr_scheduler.OneCycleLR(made["optimizer"], max_lr=[0.3, 0.1], total_steps=steps)
        return {"optimizer": made["optimizer"], "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByEpoch:
    """Halves the rates after each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()["optimizer"]  # type: ignore[misc]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


SCHEDULES = (Plateau, OneCycle, ByEpoch)


def _fit_schedules() -> list[Outcome]:
    return [fit(mixin, None, []) for mixin in SCHEDULES]


@pytest.mark.feature("Trainer", "`ReduceLROnPlateau`", "with `monitor`")
@pytest.mark.feature("Trainer", "`OneCycleLR` over `estimated_stepping_batches`", "with `global_batch_size`")
@pytest.mark.feature("Trainer", "schedules per epoch")
def test_schedules(pool: Pool) -> None:
    for mixin, outcome in zip(SCHEDULES, pool.run(_fit_schedules, 2, timeout=170.0)[0], strict=True):
        single = fit(mixin, outcome.ids, [])
        assert_same(outcome, single)
        assert outcome.rates[0] != outcome.rates[-1], "a schedule that never moved"


# --- clipping --------------------------------------------------------------------------------------------------------

CLIPS = (None, 0, 0.0, 0.05)


def _fit_clips() -> list[Outcome]:
    return [fit(Plain, None, [], gradient_clip_val=clip, max_epochs=1) for clip in CLIPS]


@pytest.mark.feature("Trainer", "`gradient_clip_val` by norm", "`None` and 0 do not clip")
def test_no_clipping_by_none_and_zero(pool: Pool) -> None:
    """huggingface/transformers#9168: an engine that is told nothing clips at 1.0."""
    everyone = pool.run(_fit_clips, 2, timeout=170.0)
    for clip, outcome, other in zip(CLIPS, *everyone, strict=True):
        assert_same(outcome, fit(Plain, outcome.ids, [], gradient_clip_val=clip, max_epochs=1))
        assert all(torch.equal(outcome.weights[name], value) for name, value in other.weights.items())
    with pytest.raises(AssertionError, match="allowed"):
        assert_equal(everyone[0][0].weights, everyone[0][-1].weights)


# --- the first step --------------------------------------------------------------------------------------------------

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def _first_steps() -> list[tuple[dict[str, Tensor], list[list[int]]]]:
    """One step in each precision: whole weights of this rank, and the step's samples."""
    found = []
    for precision in PRECISIONS:
        outcome = fit(Plain, None, [], precision=precision, max_steps=1, max_epochs=-1)
        found.append((outcome.weights, outcome.ids))
    return found


def test_gradients_are_reduced_in_the_first_step(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#21251: all ranks have the same weights after one step, in every mode."""
    everyone = pool.run(_first_steps, 2, timeout=120.0)
    for index, precision in enumerate(PRECISIONS):
        weights, ids = everyone[0][index]
        for other, _ in (rank[index] for rank in everyone[1:]):
            assert all(torch.equal(weights[name], value) for name, value in other.items()), precision
        single = fit(Plain, ids, [], max_steps=1, max_epochs=-1)
        if precision == "32-true":
            assert_equal(weights, single.weights)
        else:
            moved = weights["net.layers.0.query.weight"].float() - single.weights["net.layers.0.query.weight"]
            assert float(moved.abs().max()) < 0.01


# --- callbacks -------------------------------------------------------------------------------------------------------


def _quiet(folder: Path, steps: list[list[int]] | None) -> Outcome:
    """With all that looks on and changes no number."""
    seen: list[str] = []
    timer, summary = Timer(timedelta(hours=1)), ModelSummary(max_depth=2)
    logger = CSVLogger(folder, name="", version="")
    callbacks = [
        timer,
        summary,
        TQDMProgressBar(),
        LearningRateMonitor(),
        LambdaCallback(on_train_start=lambda *_: seen.append("start"), on_fit_end=lambda *_: seen.append("end")),
    ]
    outcome = fit(
        Plain,
        steps,
        callbacks,
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=True,
        enable_model_summary=True,
        profiler="simple",
        detect_anomaly=True,
        deterministic=True,
    )
    torch.use_deterministic_algorithms(False)
    assert seen == ["start", "end"]
    assert (timer.time_elapsed("train") or 0) > 0
    return outcome


@pytest.mark.feature("Callbacks", "`LearningRateMonitor`")
@pytest.mark.feature("Callbacks", "`Timer`")
@pytest.mark.feature("Callbacks", "`ModelSummary`")
@pytest.mark.feature("Callbacks", "`TQDMProgressBar`")
@pytest.mark.feature("Callbacks", "`LambdaCallback`")
@pytest.mark.feature("Trainer", "`profiler`")
@pytest.mark.feature("Trainer", "`detect_anomaly`, `deterministic`")
def test_what_looks_on_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    outcome = pool.run(_quiet, 2, tmp_path / "ours", None, timeout=170.0)[0]
    assert_same(outcome, fit(Plain, outcome.ids, []))
    with next((tmp_path / "ours").rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    for group in (0, 1):
        (name,) = (key for key in rows[0] if key.startswith("lr-") and key.endswith(f"pg{group + 1}"))
        logged = {int(row["step"]): float(row[name]) for row in rows if row[name]}
        # Lightning's monitor stands at the step that is running.
        assert [logged[step] for step in range(9)] == pytest.approx([rates[group] for rates in outcome.rates])


def _stop(folder: Path, steps: list[list[int]] | None) -> Outcome:
    saver = ModelCheckpoint(folder, filename="{epoch}-{val:.2f}", monitor="val", save_top_k=-1)
    stopper = EarlyStopping("val", mode="max", patience=0)
    return fit(Plain, steps, [stopper, saver], enable_checkpointing=True)


@pytest.mark.feature("Callbacks", "`EarlyStopping`", "every rank stops after the same step")
@pytest.mark.feature("Callbacks", "`ModelCheckpoint`", "metrics in `filename`")
def test_early_stopping_and_names_with_a_metric(pool: Pool, tmp_path: Path) -> None:
    ours, other = pool.run(_stop, 2, tmp_path / "ours", None, timeout=120.0)
    single = _stop(tmp_path / "single", ours.ids)
    assert ours.steps == other.steps == 6, "the second of three epochs is the last"
    assert_same(ours, single)
    names = [sorted(path.name for path in (tmp_path / kind).iterdir()) for kind in ("ours", "single")]
    assert names[0] == names[1] == ["epoch=0-val=5.00.ckpt", "epoch=1-val=3.00.ckpt"]


def _prune(steps: list[list[int]] | None) -> Outcome:
    pruning = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
    return fit(Plain, steps, [pruning])


@pytest.mark.feature("Callbacks", "`ModelPruning`")
def test_pruning(pool: Pool) -> None:
    ours = pool.run(_prune, 2, None, timeout=120.0)[0]
    single = _prune(ours.ids)
    assert ours.weights.keys() == single.weights.keys()
    assert_same(ours, single)
    zeros = [sum(int((w == 0).sum()) for w in weights.values()) for weights in (ours.weights, single.weights)]
    assert zeros[0] == zeros[1] > 1000


# --- an exception ----------------------------------------------------------------------------------------------------


class Raises:
    """On every rank, in the middle of a step."""

    armed = True

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        if self.armed and self.trainer.global_step == 4:  # type: ignore[attr-defined]
            raise ValueError("an error of the user's code")
        return loss


class RaisesNot(Raises):
    armed = False


def _raise(folder: Path) -> str:
    try:
        fit(Raises, None, [OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.feature("Callbacks", "`OnExceptionCheckpoint`", "where all ranks have the exception")
def test_saving_after_an_exception(pool: Pool, tmp_path: Path) -> None:
    """The file is that of the last whole step, and the rest is trained from it."""
    whole = pool.run(fit, 2, RaisesNot, None, [], timeout=120.0)[0]
    for text in pool.run(_raise, 2, tmp_path, timeout=120.0):
        assert "an error of the user's code" in text
    (file,) = tmp_path.iterdir()
    resumed = pool.run(fit, 2, RaisesNot, None, [], file, timeout=120.0)[0]
    assert resumed.ids == whole.ids[4:]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


# --- other ways to start ---------------------------------------------------------------------------------------------


class Lazy:
    """Makes its layers when the strategy asks for them."""

    made = 0

    def configure_model(self) -> None:
        if not self.made:
            self.made += 1
            self.extra = torch.nn.Linear(2, 2)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0 * self.extra.weight.sum()  # type: ignore[misc]


def _bare() -> Outcome:
    module = ScoredRich(CASE)
    plans = Plans()
    trainer = pl.Trainer(
        barebones=True,
        accelerator="cpu",
        devices=2,
        strategy=make_strategy(CASE),
        max_epochs=1,
        callbacks=[plans],
    )
    trainer.fit(module, datamodule=ScoredData(CASE))
    return Outcome(weights=weights_of(module), ids=sample_ids(plans.plans), rates=[], steps=trainer.global_step)


def _other_starts() -> tuple[Outcome, Outcome]:
    return _bare(), fit(Lazy, None, [], max_epochs=1)


@pytest.mark.feature("Trainer", "`barebones=True`")
@pytest.mark.feature("Trainer", "`configure_model`")
def test_barebones_and_configure_model(pool: Pool) -> None:
    bare, lazy = pool.run(_other_starts, 2, timeout=120.0)[0]
    plain = fit(Plain, bare.ids, [], max_epochs=1)
    assert bare.ids == lazy.ids
    assert bare.steps == 3
    assert_equal(bare.weights, plain.weights)
    assert_equal(lazy.weights, plain.weights)
