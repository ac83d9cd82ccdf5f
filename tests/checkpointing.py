"""A model with everything that makes a checkpoint hard, and short runs that save and resume it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dcp.plan import IterationPlan
from tests.fitting import Case, Data, Module, SingleProcess, make_strategy, make_trainer, weights_of

CASE = Case(world_size=2, samples=20, batch=8, steps=6, seed=3, lr=0.2)
"""Three steps an epoch, the last one shorter; two epochs."""


class Rich(Module):
    """Tied and frozen weights, a buffer, a head that some steps leave out, two groups, a schedule."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.position.weight.requires_grad_(False)
        self.net.heads[0].weight = self.net.embedding.weight
        self.register_buffer("table", torch.arange(3.0))

    def configure_optimizers(self) -> Any:
        plain = [p for p in self.parameters() if p.dim() < 2]
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": self.case.lr / 2}]
        optimizer = self.optimizer(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        # No Adam: it turns rounding noise into whole steps where the true gradient is zero.
        return torch.optim.SGD(groups, lr=self.case.lr, momentum=0.9)


class RichAdam(Rich):
    """With two kinds of state for each element and a count for each group."""

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.case.lr / 10)


class RichSingle(Rich, SingleProcess):
    """The same in plain Lightning, on whole steps."""


class Configured(Rich):
    """With hyperparameters that the checkpoint keeps."""

    def __init__(self, lr: float = 0.1, seed: int = 3) -> None:
        super().__init__(replace(CASE, lr=lr, seed=seed))
        self.save_hyperparameters("lr", "seed")


class ConfiguredSingle(Configured, SingleProcess):
    """The same in plain Lightning, on whole steps."""


class ConfiguredData(Data):
    """For a command line, which builds it from plain values."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(replace(CASE, seed=seed))


class Plans(pl.Callback):
    """The plans of the steps that were trained."""

    def __init__(self) -> None:
        self.plans: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.plans.append(trainer.strategy.plan.to_json())  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a run ends with."""

    weights: dict[str, Tensor]
    plans: list[str]
    rates: list[float]
    extra: Any = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A short run: how many ranks, up to which step, from which checkpoint."""

    case: Case = CASE
    steps: int = CASE.steps
    resume: str | None = None
    save: str | None = None
    module: type[Module] = Rich
    callbacks: tuple[Any, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)


def train(run: Run) -> Ended:
    """Train as a run says and save at its end; called by every rank of the pool."""
    module = run.module(run.case)
    plans = Plans()
    trainer = make_trainer(
        make_strategy(run.case, **run.strategy),
        run.case,
        devices=run.case.world_size,
        max_steps=run.steps,
        callbacks=[plans, *run.callbacks],
        **run.trainer,
    )
    trainer.fit(module, datamodule=Data(run.case), ckpt_path=run.resume)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return Ended(weights=weights_of(module), plans=plans.plans, rates=rates)


def keeper(folder: Path | str, **kwargs: Any) -> ModelCheckpoint:
    """A ModelCheckpoint that keeps every step."""
    settings: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1}
    return ModelCheckpoint(dirpath=folder, **{**settings, **kwargs})


def sample_ids(plans: Sequence[str]) -> list[list[int]]:
    """Samples of each step, ascending."""
    return [sorted(i for m in IterationPlan.from_json(text).micro_batches for i in m.sample_ids) for text in plans]


def read(path: Path | str) -> dict[str, Any]:
    """A checkpoint, in the way that executes nothing of it."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def tensors_of(content: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its place."""
    items: dict[str, Any] = {}
    if isinstance(content, dict):
        items = {str(key): value for key, value in content.items()}
    elif isinstance(content, list | tuple):
        items = {str(index): value for index, value in enumerate(content)}
    elif isinstance(content, Tensor):
        return {prefix: content}
    return {k: v for key, value in items.items() for k, v in tensors_of(value, f"{prefix}/{key}").items()}


def resume_and_listen(run: Run) -> tuple[str, list[list[int]]]:
    """Warnings and errors that name the checkpoint, and the samples that were trained."""
    ids: list[list[int]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ids = sample_ids(train(run).plans)
        except Exception as error:
            return f"{type(error).__name__}: {error}", ids
    return "\n".join(str(w.message) for w in caught if "checkpoint" in str(w.message)), ids
