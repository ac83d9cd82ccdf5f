"""Runs over plain DataLoaders under DCPStrategy, and the single process on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dcp.plan import IterationPlan
from tests.fitting import (
    Case,
    Module,
    Result,
    Samples,
    SingleProcess,
    _Plans,
    collate_whole,
    make_strategy,
    make_trainer,
    weights_of,
)

CASE = Case(world_size=2, samples=20, batch=8, steps=5, seed=4, lr=0.2)
"""Two samples on each of four ranks, or four on each of two: three steps an epoch, the last one shorter."""


class Taken(Module):
    """As a user writes it for a plain loader: positions are counted where the batch brings none."""

    def values(self, batch: Any) -> tuple[Tensor, Tensor]:
        rows = dict(batch)
        rows.setdefault("position_ids", torch.arange(rows["input_ids"].shape[1]).repeat(len(rows["input_ids"]), 1))
        return super().values(rows)


class TakenSingle(Taken, SingleProcess):
    """The same in plain Lightning, on whole steps."""


class Masking:
    """What a Hugging Face data collator does: pads, makes mask and labels, and gives a dict of tensors."""

    def __init__(self, pad_to_multiple_of: int = 1) -> None:
        self.multiple = pad_to_multiple_of

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        longest = -(-longest // self.multiple) * self.multiple
        batch = {
            "input_ids": torch.zeros(len(rows), longest, dtype=torch.long),
            "attention_mask": torch.zeros(len(rows), longest, dtype=torch.long),
            "labels": torch.full((len(rows), longest), -100),
        }
        for i, row in enumerate(rows):
            size = len(row["input_ids"])
            batch["input_ids"][i, :size] = torch.as_tensor(row["input_ids"])
            batch["attention_mask"][i, :size] = 1
            batch["labels"][i, :size] = torch.as_tensor(row["labels"])
        batch["kind"] = torch.tensor([int(row["kind"]) for row in rows])
        return batch


class NoLengths(Dataset[dict[str, Any]]):
    """Samples whose lengths nobody tells."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


class Kept(pl.Callback):
    """Batches that ``training_step`` got: their keys by step."""

    def __init__(self) -> None:
        self.epochs: list[tuple[int, list[int]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        ids = sorted(i for m in trainer.strategy.plan.micro_batches for i in m.sample_ids)  # type: ignore[attr-defined]
        self.epochs.append((batch.epoch, ids))


def fit_taken(
    case: Case, loaders: Any, make: Callable[[Case], Module] = Taken, strategy: Any = None, **kwargs: Any
) -> Result:
    """Train over a plain loader under DCPStrategy; called by every rank of the pool."""
    module, plans = make(case), _Plans()
    start = weights_of(module)
    fitting = {name: kwargs.pop(name) for name in ("ckpt_path", "datamodule") if name in kwargs}
    callbacks = [plans, *kwargs.pop("callbacks", [])]
    trainer = make_trainer(
        strategy or make_strategy(case), case, devices=case.world_size, callbacks=callbacks, **kwargs
    )
    trainer.fit(module, loaders, **fitting)
    return Result(start=start, weights=weights_of(module), losses=module.losses, plans=plans.plans)


def ids_of(plans: Sequence[str]) -> list[list[int]]:
    """Ids of each step, ascending."""
    return [sorted(i for m in IterationPlan.from_json(text).micro_batches for i in m.sample_ids) for text in plans]


def fit_alone(
    case: Case,
    dataset: Any,
    steps: Sequence[Sequence[int]],
    make: Callable[[Case], Module] = TakenSingle,
    **kwargs: Any,
) -> Result:
    """Train the samples of the same steps in one process under plain Lightning.

    Args:
        case: what is trained.
        dataset: the samples.
        steps: ids of each step; those of a sample that comes again are mapped back to the sample.
        make: the model; its loss must be the mean over a whole step.
        kwargs: of the Trainer.
    """
    module = make(case)
    start = weights_of(module)
    rows = [[dataset[i % len(dataset)] for i in ids] for ids in steps]
    loader: DataLoader[Any] = DataLoader(rows, batch_size=None, collate_fn=collate_whole)  # type: ignore[arg-type]
    make_trainer("auto", case, devices=1, **kwargs).fit(module, loader)
    return Result(start=start, weights=weights_of(module), losses=module.losses, plans=[])
