"""Profile, self-check, planner and steps together, with nothing given: what a user's first run does."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from lightning_dcp.callback import DCPCallback
from lightning_dcp.strategy import DCPStrategy
from tests.fitting import Case, Data, Module, Result, assert_same_updates, fit_single, make_trainer, weights_of
from tests.pool import Pool

CASE = Case(world_size=4, samples=32, batch=16, steps=4, seed=11, masked="none")


class Checked(Module):
    """Can validate too."""

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        values_BS, mask_BS = self.values(batch)
        self.log("val_loss", values_BS[mask_BS].mean(), sync_dist=True, batch_size=len(values_BS))


class CheckedData(Data):
    """Validates on the training samples."""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.val_dataset = self.train_dataset


def _whole(case: Case) -> tuple[Result, dict[str, Any]]:
    module = Checked(case)
    start = weights_of(module)
    callback = DCPCallback()
    strategy = DCPStrategy(memory_limit="160KB", length_groups=3)
    trainer = make_trainer(strategy, case, devices=case.world_size, callbacks=[callback], limit_val_batches=0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=CheckedData(case))
    plans = [record.plan for record in callback.records]
    facts = {
        "warnings": [str(w.message) for w in seen],
        "sizes": sorted({m.sp_size for plan in plans for m in plan.micro_batches}),
        "gaps": [plan.gap for plan in plans],
        "bytes": max(m.bytes for plan in plans for m in plan.micro_batches),
        "profile": strategy.profile.to_json(),
        "groups": strategy.groups.num_created,
        "spans": [len(record.spans) for record in callback.records],
        "mine": [len(plan.of_rank(trainer.global_rank)) for plan in plans],
        "timeline": callback.timeline(),
        "threads": threading.active_count(),
        "patched": F.scaled_dot_product_attention.__module__,
    }
    result = Result(
        start=start, weights=weights_of(module), losses=module.losses, plans=[plan.to_json() for plan in plans]
    )
    return result, facts


def test_measured_checked_planned_and_equal_to_one_process(pool: Pool) -> None:
    results = pool.run(_whole, 4, CASE, timeout=150.0)
    expected = fit_single(CASE, results[0][0].plans)
    for result, facts in results:
        assert_same_updates(result, expected)
        assert result.plans == results[0][0].plans
        assert facts["profile"] == results[0][1]["profile"]
        assert all(0.0 <= gap < 5.0 for gap in facts["gaps"])
        assert facts["bytes"] <= 160_000
        assert max(facts["sizes"]) > 1, "the limit is wide enough for p = 1, so nothing is shared"
        assert facts["spans"] == facts["mine"]
        assert len(facts["timeline"]) == 4
        assert not [w for w in facts["warnings"] if "self-check" in w.lower()]
        assert "lightning_dcp" not in str(facts["patched"])


def _twice() -> list[Any]:
    """Fit, validate, fit on: the same module and data, a new trainer as users do it in a notebook."""
    case = replace(CASE, world_size=2, steps=2)
    module, data = Checked(case), CheckedData(case)
    seen: list[Any] = []
    for _ in range(2):
        trainer = make_trainer(DCPStrategy(self_check=False, length_groups=2), case, devices=2)
        trainer.fit(module, datamodule=data)
        seen.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))
    seen.append(trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"])
    trainer.fit_loop.max_epochs = None
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, datamodule=data)
    seen.append(trainer.global_step)
    return seen


@pytest.mark.feature("Trainer", "`fit`, `validate` and `fit` again with one Trainer")
def test_fit_validate_and_fit_again(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#21903: a second fit measures anew and trains."""
    for first, second, validated, steps in pool.run(_twice, 2, timeout=150.0):
        assert first[0] == second[0] == 2
        assert second[1] < first[1], "the second fit did not go on from the first"
        assert validated == pytest.approx(second[1], rel=1e-5)
        assert steps == 4


class _Norms(pl.Callback):
    """Length of each step's update."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.before: dict[str, torch.Tensor] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.before = weights_of(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        after = weights_of(pl_module)
        moved = torch.stack([(after[n] - w).square().sum() for n, w in self.before.items()]).sum().sqrt()
        self.norms.append(float(moved))


def _clipped(clip: float) -> list[float]:
    from tests.fitting import make_strategy

    case = replace(CASE, world_size=2, clip=clip, lr=1.0, batch=8)
    norms = _Norms()
    trainer = make_trainer(make_strategy(case), case, devices=2, callbacks=[norms])
    trainer.fit(Module(case), datamodule=Data(case))
    return norms.norms


@pytest.mark.feature("Trainer", "`gradient_clip_val` by norm", "of the whole gradient, over all ranks")
@pytest.mark.parametrize("clip", [0.1, 1e6])
def test_clipping_happens_once_after_all_micro_batches(pool: Pool, clip: float) -> None:
    """simchowitzlabpublic/nano-world-model#22, huggingface/transformers#9168."""
    for norms in pool.run(_clipped, 2, clip, timeout=60.0):
        if clip < 1:
            assert norms == pytest.approx([clip] * CASE.steps, rel=1e-3)
        else:
            assert min(norms) > 0.1
