"""Validation inside a fit: where plain Lightning would validate, with its values, and without a trace in training."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.evaluating import CASE, EvaluatedData, assert_same_scores, dcp_trainer, limit_for
from tests.fitting import (
    Case,
    Data,
    Module,
    Samples,
    SingleProcess,
    collate_whole,
    make_strategy,
    make_trainer,
    weights_of,
)
from tests.pool import Pool

FIT = Case(world_size=2, samples=12, batch=4, steps=6, dropout=0.1, masked="prompts")

SETTINGS: dict[str, dict[str, Any]] = {
    "int": {"val_check_interval": 2, "num_sanity_val_steps": 0},
    "float": {"val_check_interval": 1 / 3, "num_sanity_val_steps": 1},
    "epochs": {"check_val_every_n_epoch": 2, "limit_val_batches": 0.5},
    "limit": {"limit_val_batches": 1, "num_sanity_val_steps": 0},
    "overfit": {"overfit_batches": 1},
    "fast": {"fast_dev_run": 2},
}


class Watched(Module):
    """Trains, and says which samples each validation has seen."""

    def __init__(self, case: Case = FIT) -> None:
        super().__init__(case)
        self.runs: list[tuple[int, bool, list[int]]] = []
        self.draws: list[float] = []
        self.sizes_used: set[int] = set()

    def on_validation_epoch_start(self) -> None:
        self.runs.append((self.trainer.global_step, self.trainer.sanity_checking, []))
        torch.rand(1)  # nothing that training draws may come after it

    def on_train_batch_end(self, *args: Any) -> None:
        self.draws.append(float(torch.rand(())))

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        from lightning_dcp.sequence_parallel import current

        torch.rand(3)
        values_BS, mask_BS = self.values(batch)
        loss = values_BS[mask_BS].mean()
        self.log("val_loss", loss, sync_dist=True, add_dataloader_idx=False)
        self.log("alone", loss)
        self.sizes_used.add(current().group.size)
        if not current().is_copy and current().group.rank == 0:
            self.runs[-1][2].extend(torch.as_tensor(batch["index"]).tolist())
        return loss

    test_step = validation_step


def _weights(validated: bool) -> dict[str, Tensor]:
    module = Watched()
    module.on_validation_epoch_start = lambda: module.runs.append((0, False, []))  # type: ignore[method-assign]
    data = EvaluatedData(FIT, (5,), eval_batch_size=2)
    limits: dict[str, Any] = {"val_check_interval": 1} if validated else {"limit_val_batches": 0}
    trainer = dcp_trainer(FIT, 2, 20, **limits)
    trainer.fit(module, datamodule=data)
    assert bool(module.runs) == validated
    return {**weights_of(module), "draws": torch.tensor(module.draws)}


def _schedules() -> Any:
    found = {}
    for name, setting in SETTINGS.items():
        module = Watched()
        trainer = dcp_trainer(FIT, 2, None, **setting)
        trainer.fit(module, datamodule=EvaluatedData(FIT, (6,), eval_batch_size=1))
        found[name] = (module.runs, trainer.global_step)
    return _weights(True), _weights(False), found


class Scheduled(SingleProcess):
    """Says after which steps plain Lightning validates."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.validations: set[tuple[int, bool]] = set()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validations.add((self.trainer.global_step, self.trainer.sanity_checking))


def _plain_schedule(setting: dict[str, Any]) -> list[tuple[int, bool]]:
    """Steps behind which a single device validates, and whether it is the sanity check, under plain Lightning."""
    samples, module = Samples(FIT), Scheduled(FIT)
    rows = [samples[i] for i in range(len(samples))]
    steps: Any = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    train: DataLoader[Any] = DataLoader(steps, batch_size=None, collate_fn=collate_whole)
    val: DataLoader[Any] = DataLoader(rows[:6], batch_size=1, collate_fn=collate_whole)  # type: ignore[arg-type]
    make_trainer("auto", FIT, devices=1, **setting).fit(module, train, val)
    return sorted(module.validations)


@pytest.mark.feature(
    "Trainer", "`val_check_interval`, `limit_val_batches`, sanity check, `overfit_batches`, `fast_dev_run`"
)
def test_validation_comes_in_time_and_leaves_no_trace(pool: Pool) -> None:
    results = pool.run(_schedules, 2, timeout=180.0)
    for with_validation, without, _ in results:
        assert all(torch.equal(with_validation[name], without[name]) for name in without)
    runs = {name: [r for _, _, found in results for r in found[name][0]] for name in SETTINGS}
    steps = {name: sorted({(at, sanity) for at, sanity, _ in found}) for name, found in runs.items()}
    assert steps == {name: _plain_schedule(setting) for name, setting in SETTINGS.items()}
    # Three steps an epoch; an int counts steps, a float parts of an epoch.
    assert steps["int"] == [(2, False), (5, False)]
    assert steps["float"] == [(0, True), *((step, False) for step in range(1, 7))]
    assert steps["epochs"] == [(0, True), (6, False)]
    assert steps["limit"] == [(3, False), (6, False)]
    assert steps["fast"] == [(2, False)]
    assert {step for step, sanity in steps["overfit"] if not sanity} == set(range(1, 7))
    seen = {
        name: {tuple(sorted(i for at, s, ids in found if (at, s) == key for i in ids)) for key in steps[name]}
        for name, found in runs.items()
    }
    assert seen["int"] == {tuple(range(6))}
    assert seen["float"] == {(0, 1), tuple(range(6))}
    assert seen["epochs"] == {(0, 1)}, "half of three items of each rank is one"
    assert seen["limit"] == {(0, 1)}
    assert seen["overfit"] == {(0, 1)}
    assert seen["fast"] == {(0, 1, 2, 3)}


class SilentData(Data):
    """Has nothing to validate."""


class WithoutStep(Module):
    """Has no validation_step."""


def _monitored(folder: str) -> Any:
    module = Watched()
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, filename="{step}")
    alone = ModelCheckpoint(f"{folder}/alone", monitor="alone", save_top_k=2, filename="{step}-{alone:.9f}")
    strategy = make_strategy(replace(FIT, world_size=2), memory_limit=limit_for(2, 20))
    trainer = make_trainer(
        strategy, FIT, devices=2, callbacks=[best, alone], enable_checkpointing=True, val_check_interval=1
    )
    data = EvaluatedData(FIT, (5,), eval_batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=data)
        assert module.sizes_used == {1, 2}
        assert alone.best_model_score == best.best_model_score
        kept = sorted(alone.best_k_models)
        scored = trainer.test(datamodule=data, ckpt_path="best", verbose=False)
        make_trainer(make_strategy(replace(FIT, world_size=2)), FIT, devices=2, max_steps=1).fit(
            WithoutStep(FIT), datamodule=SilentData(FIT)
        )
    texts = [str(w.message) for w in caught]
    assert module.sizes_used == {1, 2}
    return best.best_model_path, float(best.best_model_score or 0), scored, texts, kept


@pytest.mark.feature("Trainer", '`test(ckpt_path="best")`')
def test_the_best_checkpoint_is_the_same_everywhere_and_scores_as_it_did(pool: Pool, tmp_path: Any) -> None:
    """Lightning-AI/pytorch-lightning#19045: the same decision on all ranks; #20272: no false warnings.

    Also by a value that is logged without ``sync_dist``: shards and copies would give each rank another one.
    """
    results = pool.run(_monitored, 2, str(tmp_path), timeout=120.0)
    assert len({(path, score) for path, score, *_ in results}) == 1
    for path, score, scored, texts, kept in results:
        assert kept == sorted(str(file) for file in (tmp_path / "alone").iterdir())
        assert len(kept) == 2
        assert path
        assert scored[0]["val_loss"] == pytest.approx(score, rel=1e-5)
        assert not [t for t in texts if "DistributedSampler" in t or "Skipping val loop" in t]
    single = Watched(FIT)
    single.load_state_dict(torch.load(results[0][0], weights_only=False)["state_dict"])
    from tests.evaluating import numbered
    from tests.evaluating import single as plain

    expected = plain(single, [numbered(FIT, 5)])
    assert_same_scores(results[0][2], expected)


def test_what_is_missing_for_a_validation_is_said(tmp_path: Any) -> None:
    from lightning_dcp.evaluation.datamodule import warn_of_validation

    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    for module, dataset, words in (
        (WithoutStep(CASE), [1], "has no validation_step"),
        (Watched(CASE), None, "has no val_dataset"),
        (Watched(CASE), [1], None),
        (SingleProcess(CASE), None, None),
    ):
        data = SilentData(CASE)
        data.val_dataset = dataset
        trainer.datamodule = data  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_validation(trainer, module)
        texts = [str(w.message) for w in caught]
        assert [words in text for text in texts] == [True] if words else not texts


class Padded(Watched):
    """Its values depend on the length that a sample is padded to, or divided to."""

    def values(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        values_BS, mask_BS = super().values(batch)
        self.lengths = {*getattr(self, "lengths", ()), batch["input_ids"].shape[1]}
        return values_BS * (1 + 0.1 * batch["input_ids"].shape[1]), mask_BS


def _sensitive() -> Any:
    module = Padded()
    # Of the samples some need two ranks and could be halved, and two neighbours would fit together.
    checked = replace(FIT, world_size=2, self_check=True, seed=5, masked="none")
    strategy = make_strategy(checked, memory_limit=limit_for(2, 20), planner="balanced")
    trainer = make_trainer(strategy, checked, devices=2, max_steps=1, val_check_interval=1, num_sanity_val_steps=0)
    data = EvaluatedData(checked, (8,), eval_batch_size=4, too_long="leave_out")
    trainer.fit(module, datamodule=data)
    inside = float(trainer.callback_metrics["val_loss"])
    module.lengths = set()
    (after,) = trainer.validate(module, datamodule=data, verbose=False)
    return inside, after["val_loss"], module.lengths


def test_what_the_self_check_switched_off_stays_off_after_the_fit(pool: Pool) -> None:
    for inside, after, lengths in pool.run(_sensitive, 2, timeout=120.0):
        assert after == pytest.approx(inside, rel=1e-6)
        assert len(lengths) > 1
