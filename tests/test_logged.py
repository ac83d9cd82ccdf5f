"""``self.log``: what is shown at a step and for an epoch, under plans of different lengths."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from lightning_dcp.logged import weighted_logs
from lightning_dcp.sequence_parallel import current
from tests.fitting import VOCABULARY, Case, Data, Module, Samples, collate_whole, make_strategy, make_trainer
from tests.pool import Pool, RemoteError

CASE = Case(world_size=4, samples=24, batch=8, steps=-1, lr=0.0, seed=5, empty_rank=True)


class Kept(Logger):
    """Keeps what a logger is given, on every rank."""

    name, version = "kept", 0

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((dict(metrics), step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Seen(NamedTuple):
    """One micro-batch as user code saw it."""

    step: int
    items: int
    mean: float
    total: float
    first_id: int


class Logging(Module):
    """Logs in every way; remembers what it logged. At a learning rate of 0 no value depends on the plan."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.seen: list[Seen] = []
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.area = BinaryAUROC()  # keeps lists of values, which are gathered
        self.running = torch.zeros(())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        values_BS, mask_BS = self.values(batch)
        self.log_all(values_BS.detach(), mask_BS, batch)
        if self.case.returns == "dict":
            return {"loss": (values_BS * mask_BS).sum(), "count": mask_BS.sum()}
        return values_BS[mask_BS].mean()

    def log_all(self, values_BS: Tensor, mask_BS: Tensor, batch: dict[str, Any]) -> None:
        mean, total, ids = values_BS[mask_BS].mean(), (values_BS * mask_BS).sum(), current().sample_ids
        self.seen.append(Seen(self.global_step, int(mask_BS.sum()), float(mean), float(total), ids[0]))
        self.log("mean", mean, on_step=True, on_epoch=True)
        self.log("synced", mean, on_step=False, on_epoch=True, sync_dist=True)
        self.log("constant", 0.3, on_step=True, on_epoch=True)
        self.log("sum", total, on_step=True, on_epoch=True, reduce_fx="sum")
        self.log_dict({"min": mean, "max": mean}, on_step=True, on_epoch=True, reduce_fx="min")
        self.log("largest", mean, on_step=True, on_epoch=True, reduce_fx=max)
        self.log("integer", torch.tensor(ids[0]), on_step=False, on_epoch=True)
        # Of the whole micro-batch, and alike on all ranks of its group: weighted by samples.
        self.log("sample", float(sum(ids)) / len(ids), on_step=False, on_epoch=True, batch_size=len(ids))
        self.log("mean_per_sample", mean, on_step=False, on_epoch=True, batch_size=len(ids))
        self.running += 1
        self.log("running", self.running, on_step=True, on_epoch=False, reduce_fx="max")
        if 3 in ids:
            self.log("rare", 7.0, on_step=False, on_epoch=True, sync_dist=True)
        if current().group.rank == 0:
            self.area.update(torch.tensor([i / 24 for i in ids]), torch.tensor([i % 3 % 2 for i in ids]))
        self.log("area", self.area, on_step=False, on_epoch=True)
        labels_BS = batch["labels"]
        self.accuracy(labels_BS.clamp(min=0) * (labels_BS % 2), labels_BS)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)

    def on_before_backward(self, loss: Tensor) -> None:
        # Another hook in between: Lightning takes the change of the name for a new epoch.
        self.log("before_backward", 2.0, on_step=False, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", float(batch_idx), on_step=False, on_epoch=True)


def _fit(case: Case) -> dict[str, Any]:
    module, logger = Logging(case), Kept()
    trainer = make_trainer(
        make_strategy(case), case, devices=case.world_size, max_epochs=1, logger=logger, log_every_n_steps=1
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=Data(case))
    return {
        "seen": module.seen,
        "rows": logger.rows,
        "final": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "warnings": [str(w.message) for w in caught if "batch_size" in str(w.message)],
    }


def _reference(case: Case) -> dict[str, float]:
    """The same epoch in one process, from each sample alone."""
    module = Module(case)
    batches = [collate_whole([row]) for row in Samples(case).rows]
    with torch.no_grad():
        found = [module.values(batch) for batch in batches]
    values = torch.cat([v[m] for v, m in found]).double()
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    labels = labels[labels != -100]
    return {
        "mean": float(values.mean()),
        "sum": float(values.sum()),
        "sample": (case.samples - 1) / 2,
        "area": float(BinaryAUROC()(torch.arange(case.samples) / 24, torch.arange(case.samples) % 3 % 2)),
        "accuracy": float((labels * (labels % 2) == labels).double().mean()),
    }


@pytest.mark.feature("Trainer", "`self.log`", "count-weighted over micro-batches, at each step and over an epoch")
@pytest.mark.parametrize("returns", ["mean", "dict"])
def test_values_are_weighted_by_what_they_count(pool: Pool, returns: str) -> None:
    """Lightning-AI/pytorch-lightning#5680, #19779, #19106, #10349, #21859, Lightning-AI/torchmetrics#2852.

    Random plans with several sequence-parallel sizes, shards without a label, and one rank that never gets any
    micro-batch: the values of the epoch are those of one process, on every rank.
    """
    case = replace(CASE, returns=returns)
    results = pool.run(_fit, 4, case, timeout=120.0)
    expected = _reference(case)
    assert any(s.items == 0 for r in results for s in r["seen"]), "no shard was without a label"
    assert results[3]["seen"] == []
    counted = [s for r in results for s in r["seen"] if s.items]
    for result in results:
        final = result["final"]
        for key in ("mean_epoch", "synced"):
            assert final[key] == pytest.approx(expected["mean"], rel=1e-5)
        assert final["constant_epoch"] == float(torch.tensor(0.3))
        assert final["sum_epoch"] == pytest.approx(expected["sum"], rel=1e-5)
        assert final["sample"] == pytest.approx(expected["sample"])
        assert math.isfinite(final["mean_per_sample"])
        assert final["accuracy_epoch"] == pytest.approx(expected["accuracy"])
        assert final["area"] == pytest.approx(expected["area"])
        assert final["min_epoch"] == pytest.approx(min(s.mean for s in counted), rel=1e-6)
        assert final["largest_epoch"] == pytest.approx(max(s.mean for s in counted), rel=1e-6)
        assert final["rare"] == 7.0
        assert final["before_backward"] == 2.0
        mean_id = sum(s.first_id * s.items for s in counted) / sum(s.items for s in counted)
        assert final["integer"] == pytest.approx(mean_id)
        assert final["mean_epoch"] == results[0]["final"]["mean_epoch"], "the ranks differ"
        assert result["warnings"] == []
        _check_steps(result["seen"], result["rows"])


def _check_steps(seen: list[Seen], rows: list[tuple[dict[str, float], int | None]]) -> None:
    """What the logger of a rank got at each step is that of the rank's micro-batches in the step."""
    shown = [metrics for metrics, _ in rows if "loss" in metrics]
    assert len(shown) == 3
    for step, metrics in enumerate(shown):
        here = [s for s in seen if s.step == step and s.items]
        if not here:
            assert not {"mean_step", "sum_step", "constant_step", "min_step", "accuracy_step"} & metrics.keys()
            continue
        count = sum(s.items for s in here)
        assert metrics["mean_step"] == pytest.approx(sum(s.mean * s.items for s in here) / count, rel=1e-6)
        assert metrics["sum_step"] == pytest.approx(sum(s.total for s in here), rel=1e-6)
        assert metrics["min_step"] == pytest.approx(min(s.mean for s in here))
        assert metrics["largest_step"] == pytest.approx(max(s.mean for s in here))
        assert metrics["constant_step"] == float(torch.tensor(0.3))
        # A tensor that user code goes on counting in: the value is that of the call.
        last = [i for i, s in enumerate(seen, start=1) if s.step == step and s.items][-1]
        assert metrics["running"] == last
        assert 0.0 <= metrics["accuracy_step"] <= 1.0


class _Watched(Module):
    """Logs its loss without sync_dist, which callbacks and a schedule watch."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
        watched = {"scheduler": schedule, "interval": "step", "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": watched}


class _Rates(Callback):
    """What each step showed and trained with, and whether the ranks still hold the same weights."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float]] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        shown = trainer.callback_metrics
        self.steps.append((float(shown["train_loss"]), float(shown["loss"]), self.rate))


def _fit_watched(case: Case, folder: str) -> dict[str, Any]:
    rates = _Rates()
    by_step = ModelCheckpoint(
        folder, monitor="train_loss", every_n_train_steps=1, save_top_k=2, filename="s{step}"
    )
    by_epoch = ModelCheckpoint(
        folder, monitor="train_loss_epoch", save_top_k=1, filename="e{train_loss_epoch:.3f}"
    )
    stopping = EarlyStopping("train_loss_epoch", check_on_train_epoch_end=True, min_delta=10.0, patience=1)
    trainer = make_trainer(
        make_strategy(case),
        case,
        devices=case.world_size,
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[rates, by_step, by_epoch, stopping],
    )
    module = _Watched(case)
    trainer.fit(module, datamodule=Data(case))
    return {
        "steps": rates.steps,
        "best": (by_step.best_model_path, by_epoch.best_model_path, sorted(by_step.best_k_models)),
        "score": (float(by_step.best_model_score or 0), float(by_epoch.best_model_score or 0)),
        "epochs": trainer.current_epoch,
    }


@pytest.mark.feature(
    "Callbacks", "`ModelCheckpoint(monitor=...)` of a training value", "alike on all ranks, without sync_dist"
)
def test_what_is_watched_is_alike_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#19045: each rank would decide by its own value, and one never has any."""
    case = replace(CASE, lr=0.5, masked="none")
    results = pool.run(_fit_watched, 4, case, str(tmp_path), timeout=120.0)
    assert all(result == results[0] for result in results)
    steps = results[0]["steps"]
    for watched, exact, _ in steps:
        assert watched == pytest.approx(exact, rel=1e-5)
    assert steps[0][2] > steps[-1][2], "the schedule never saw a plateau, so nothing was compared"
    assert results[0]["epochs"] == 2, "the run was not stopped early"
    assert results[0]["score"][0] == pytest.approx(min(watched for watched, _, _ in steps), rel=1e-6)


class _Evaluated(Module):
    """Values of known weight, NaN where that is 0; on some ranks and batches nothing counts."""

    kind = "weights"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.held: list[tuple[float, float]] = []
        self.shown: list[float] = []

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        rank = self.trainer.global_rank
        weight = float((rank + batch_idx) % 3)
        value = math.nan if weight == 0 else 1.0 + rank + 0.1 * batch_idx
        self.held.append((value, weight))
        with weighted_logs(self.trainer, 0.0):
            self.log("nowhere", math.nan, on_step=True, on_epoch=True)
        # Outside of that the weights are what _EvaluatedData counts.
        self.log("mean", value)
        self.log("at_step", value, on_step=True, on_epoch=True, sync_dist=True)
        for reduction in ("min", "max", "sum"):
            self.log(reduction, value, on_step=True, reduce_fx=reduction, sync_dist=reduction == "min")
        self.log("constant", 1.0, sync_dist=True, batch_size=3 + rank)
        if rank == 1:
            self.log("one_rank", 5.0, sync_dist=True)
        if self.kind == "differ":
            self.log("differs", 1.0, prog_bar=rank == 1)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.log("hook", self.held[-1][0], on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        # By Lightning's own reduction, as the ranks have agreed on what was logged before.
        self.log("constant_of_hook", 1.0, sync_dist=True, batch_size=3 + self.trainer.global_rank)
        mean = self.trainer.strategy.reduce(torch.tensor(3 + self.trainer.global_rank % 2), reduce_op="mean")
        self.log("mean_of_integers", mean)


class _EvaluatedData(Data):
    """A few validation batches."""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.val_dataset = self.train_dataset
        self.counted = 0

    def loss_items(self, batch: dict[str, Any]) -> int:
        assert self.trainer is not None
        self.counted += 1
        return (self.trainer.global_rank + self.counted - 1) % 3


def _validate(kind: str) -> dict[str, Any]:
    case = Case(world_size=3, samples=12, batch=6)
    module, logger = _Evaluated(case), Kept()
    module.kind = kind
    trainer = make_trainer(make_strategy(case), case, devices=3, logger=logger)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(module, datamodule=_EvaluatedData(case, eval_batch_size=1), verbose=False)
    final = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"held": module.held, "final": final, "rows": logger.rows, "warnings": [str(w.message) for w in caught]}


def test_a_weight_of_zero_counts_in_no_reduction(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#19106, #21859: keys of some ranks, and weights that are no whole numbers."""
    results = pool.run(_validate, 3, "weights", timeout=120.0)
    held = [pair for result in results for pair in result["held"] if pair[1]]
    values = [value for value, _ in held]
    mean = sum(v * w for v, w in held) / sum(w for _, w in held)
    for result in results:
        final = result["final"]
        for key in ("mean", "at_step_epoch", "hook"):
            assert final[key] == pytest.approx(mean)
        assert final["min_epoch"] == pytest.approx(min(values))
        assert final["max_epoch"] == pytest.approx(max(values))
        assert final["sum_epoch"] == pytest.approx(sum(values))
        assert final["one_rank"] == 5.0
        assert final["constant"] == final["constant_of_hook"] == 1.0, "the mean of integer weights is rounded"
        assert final["mean_of_integers"] == pytest.approx(10 / 3)
        assert not [key for key in final if key.startswith("nowhere")]
        steps = [m for m, _ in result["rows"] if "at_step_step" in m]
        assert len(steps) == len(result["held"])
        for index, metrics in enumerate(steps):
            at_step = [r["held"][index] for r in results if r["held"][index][1]]
            expected = sum(v * w for v, w in at_step) / sum(w for _, w in at_step)
            assert metrics["at_step_step"] == pytest.approx(expected)
            assert metrics["min_step"] == pytest.approx(min(v for v, _ in at_step))
            own = result["held"][index]
            assert metrics.get("max_step") == (pytest.approx(own[0]) if own[1] else None)
            assert "nowhere_step" not in metrics
    assert any("'nowhere'" in text and "nothing counts" in text for text in results[0]["warnings"])


def test_a_key_with_different_arguments_is_named_on_all_ranks(pool: Pool) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(_validate, 3, "differ", timeout=60.0)
    assert sorted(caught.value.tracebacks) == [0, 1, 2]
    for text in caught.value.tracebacks.values():
        assert "self.log('differs') was called with different arguments" in text
        assert "rank 0 has" in text
        assert "prog_bar=True" in text
