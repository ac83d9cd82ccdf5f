"""Callbacks that save or average weights do under DCPStrategy what they do on a single device."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader

from tests.checkpointing import CASE, Plans, Rich, RichSingle, read, sample_ids
from tests.fitting import (
    Data,
    Result,
    Samples,
    assert_same_updates,
    collate_whole,
    make_strategy,
    make_trainer,
    weights_of,
)
from tests.pool import Pool

EPOCHS = 3
SCORES = [5.0, 3.0, 4.0]
"""What validation finds after each epoch."""


class Scored(pl.LightningModule):
    """A metric of training and one of validation, the same wherever it runs."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("train", float(-self.trainer.global_step))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", SCORES[self.trainer.current_epoch])

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("weight", dict(self.named_parameters())["net.heads.1.weight"].float().sum())

    def val_dataloader(self) -> Any:
        return DataLoader(torch.arange(4.0), batch_size=1)  # type: ignore[arg-type]

    test_dataloader = val_dataloader


class ScoredData(Data):
    """With the loaders of evaluation."""

    val_dataloader = test_dataloader = Scored.val_dataloader


class ScoredRich(Scored, Rich):
    pass


class ScoredSingle(Scored, RichSingle):
    """Takes the steps of another run, epoch by epoch."""

    steps: list[list[int]]

    def train_dataloader(self) -> Any:
        samples, epoch = Samples(CASE), self.trainer.current_epoch
        steps = [[samples[i] for i in ids] for ids in self.steps[3 * epoch : 3 * epoch + 3]]
        return DataLoader(steps, batch_size=None, collate_fn=collate_whole)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run leaves."""

    weights: dict[str, Tensor]
    ids: list[list[int]]
    best: list[str]
    rates: list[float]
    tested: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


def savers(folder: Path) -> list[pl.Callback]:
    """One for each way to choose when to save and what to keep."""
    ways: dict[str, dict[str, Any]] = {
        "best": {"monitor": "val", "save_top_k": 1, "save_last": True},
        "two-best": {"monitor": "val", "mode": "max", "save_top_k": 2, "save_last": "link"},
        "steps": {"every_n_train_steps": 2, "save_top_k": -1},
        "train": {"monitor": "train", "save_top_k": 1, "every_n_train_steps": 1},
        "epoch": {"save_on_train_epoch_end": True, "every_n_epochs": 2, "save_top_k": -1},
        "time": {"train_time_interval": timedelta(0), "save_top_k": -1},
        "weights": {"save_weights_only": True, "every_n_epochs": 1, "save_last": "link"},
    }
    return [ModelCheckpoint(folder / name, filename="{epoch}-{step}", **way) for name, way in ways.items()]


def fit(
    folder: Path, kind: str, steps: list[list[int]] | None, resume: str | None = None, **kwargs: Any
) -> Outcome:
    """Three epochs, under DCPStrategy or, on given steps, on a single device."""
    callbacks: list[Any] = {"savers": savers, "ema": _ema, "swa": _swa, "none": _nothing}[kind](folder)
    settings = {"max_steps": -1, "max_epochs": EPOCHS, "num_sanity_val_steps": 0, **kwargs}
    plans = Plans()
    if steps is None:
        module: Any = ScoredRich(CASE)
        trainer = make_trainer(
            make_strategy(CASE),
            CASE,
            devices=2,
            callbacks=[plans, *callbacks],
            enable_checkpointing=bool(callbacks),
            **settings,
        )
        trainer.fit(module, datamodule=ScoredData(CASE), ckpt_path=resume)
    else:
        module = ScoredSingle(CASE)
        module.steps = steps
        trainer = make_trainer(
            "auto",
            CASE,
            devices=1,
            callbacks=callbacks,
            enable_checkpointing=bool(callbacks),
            reload_dataloaders_every_n_epochs=1,
            **settings,
        )
        trainer.fit(module, ckpt_path=resume)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    best = [
        os.path.relpath(c.best_model_path or folder, folder) for c in callbacks if isinstance(c, ModelCheckpoint)
    ]
    outcome = Outcome(weights=weights_of(module), ids=sample_ids(plans.plans), best=best, rates=rates)
    if kind == "savers":
        outcome = replace(outcome, tested=trainer.test(module, ckpt_path="best", verbose=False)[0]["weight"])
    return outcome


def _nothing(folder: Path) -> list[pl.Callback]:
    return []


def _ema(folder: Path) -> list[pl.Callback]:
    saver = ModelCheckpoint(folder / "ema", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    return [EMAWeightAveraging(decay=0.7), saver]


def _swa(folder: Path) -> list[pl.Callback]:
    saver = ModelCheckpoint(folder / "swa", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    return [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1), saver]


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    start = weights_of(RichSingle(CASE))
    names = start.keys()
    got, expected = ({n: weights[n] for n in names} for weights in (ours, theirs))
    assert_same_updates(
        Result(start=start, weights=got, losses=[], plans=[]),
        Result(start=start, weights=expected, losses=[], plans=[]),
    )


def files(folder: Path) -> dict[str, str | None]:
    """Every file below a folder, and where it leads if it is a link."""
    found = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return {str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else None for p in found}


@pytest.mark.feature(
    "Callbacks",
    "`ModelCheckpoint`",
    "`monitor` min and max, `save_top_k`, `every_n_epochs`, `every_n_train_steps`, `train_time_interval`, "
    '`save_on_train_epoch_end`, `save_last` true and `"link"`, `save_weights_only`: the same files as on '
    "one device",
)
@pytest.mark.feature("Trainer", '`test(ckpt_path="best")`')
def test_model_checkpoint_in_every_mode(pool: Pool, tmp_path: Path) -> None:
    """The same files under the same names, with the weights of the same steps; the best one is the one tested."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    outcome = pool.run(fit, 2, ours, "savers", None, timeout=120.0)[0]
    single = fit(theirs, "savers", outcome.ids)
    assert outcome.best == single.best
    assert files(ours) == files(theirs)
    assert len(files(ours)) == 22
    assert {name for name, target in files(ours).items() if target} == {"two-best/last.ckpt", "weights/last.ckpt"}
    for name in files(theirs):
        ours_content, theirs_content = read(ours / name), read(theirs / name)
        assert_equal(ours_content["state_dict"], theirs_content["state_dict"])
        kept = theirs_content.keys() - {"hyper_parameters"}
        assert kept <= ours_content.keys() | {"LightningDataModule"}
        assert ("optimizer_states" in ours_content) == ("weights" not in name)
    weights = read(ours / "best" / "epoch=1-step=6.ckpt")["state_dict"]
    assert outcome.tested == pytest.approx(float(weights["net.heads.1.weight"].sum()), rel=1e-5)
    assert outcome.tested == pytest.approx(single.tested, rel=1e-3)
    assert outcome.tested != pytest.approx(float(outcome.weights["net.heads.1.weight"].sum()), rel=1e-3)


@pytest.mark.feature("Callbacks", "`EMAWeightAveraging`")
@pytest.mark.feature("Callbacks", "`StochasticWeightAveraging`", "without batch norm")
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averaged_weights(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Averages, their checkpoints and a run that resumes with them."""
    ours = tmp_path / "ours"
    outcome = pool.run(fit, 2, ours, kind, None, timeout=120.0)[0]
    single = fit(tmp_path / "theirs", kind, outcome.ids)
    assert_equal(outcome.weights, single.weights)
    plain = fit(tmp_path / "none", "none", outcome.ids)
    with pytest.raises(AssertionError, match="allowed"):
        assert_equal(outcome.weights, plain.weights)
    assert outcome.rates == pytest.approx(single.rates)
    for step in (4, 7):
        path = ours / kind / f"step={step}.ckpt"
        if kind == "ema":
            content, expected = read(path), read(tmp_path / "theirs" / kind / f"step={step}.ckpt")
            for key in ("state_dict", "current_model_state"):
                assert_equal(content[key], expected[key])
        resumed = pool.run(fit, 2, tmp_path / "again", kind, None, str(path), timeout=120.0)[0]
        assert resumed.ids == outcome.ids[step:]
        assert all(torch.equal(resumed.weights[n], value) for n, value in outcome.weights.items())


@pytest.mark.feature("Callbacks", "`EMAWeightAveraging`")
def test_averages_of_bf16_weights(pool: Pool, tmp_path: Path) -> None:
    """The average and the float32 masters of the current weights each come back."""
    whole = pool.run(fit, 2, tmp_path / "a", "ema", None, precision="bf16-mixed", timeout=120.0)[0]
    path = tmp_path / "a" / "ema" / "step=4.ckpt"
    content = read(path)
    current, average = content["current_model_state"], content["state_dict"]
    name = "net.heads.1.weight"
    assert current[name].dtype == average[name].dtype == torch.float32
    assert not torch.equal(current[name].bfloat16().float(), current[name])
    assert not torch.equal(current[name], average[name])
    resumed = pool.run(fit, 2, tmp_path / "b", "ema", None, str(path), precision="bf16-mixed", timeout=120.0)[0]
    assert all(torch.equal(resumed.weights[n], value) for n, value in whole.weights.items())


def _fit_async(folder: Path) -> Outcome:
    return fit(folder, "ema", None, plugins=[AsyncCheckpointIO()])


@pytest.mark.feature(
    "Checkpoints", "`AsyncCheckpointIO`", "`ModelCheckpoint` removes an old file before the new one is on the disk"
)
def test_a_plugin_that_writes_in_the_background(pool: Pool, tmp_path: Path) -> None:
    pool.run(_fit_async, 2, tmp_path / "async", timeout=120.0)
    pool.run(fit, 2, tmp_path / "plain", "ema", None, timeout=120.0)
    for name in files(tmp_path / "plain"):
        got, expected = read(tmp_path / "async" / name), read(tmp_path / "plain" / name)
        for key, value in expected["state_dict"].items():
            assert torch.equal(got["state_dict"][key], value)
