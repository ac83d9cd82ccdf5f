"""Runs of validation, test and prediction under DCPStrategy, and what a single process of plain Lightning gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision

from lightning_dcp.cost import CostModel
from lightning_dcp.sequence_parallel import current, gather, once
from tests.fitting import (
    LAYERS,
    VOCABULARY,
    Case,
    Data,
    Module,
    Samples,
    collate_whole,
    formula_profile,
    make_strategy,
    make_trainer,
)

CASE = Case(samples=9, batch=4, masked="none", seed=3)


def limit_for(world_size: int, tokens: int) -> str:
    """A memory limit within which samples of up to ``tokens`` tokens fit on one rank."""
    cost = CostModel(formula_profile(world_size, (LAYERS,)))
    return f"{cost.bytes(1, (tokens,), 1, (LAYERS,))}B"


class Scored(Module):
    """Logs the loss in the ways that users do, with metrics of tokens, of samples and of gathered logits."""

    def __init__(self, case: Case = CASE) -> None:
        super().__init__(case)
        tokens: dict[str, Any] = {
            "num_classes": VOCABULARY,
            "ignore_index": -100,
            "average": "micro",
            "validate_args": False,
        }
        self.accuracy = MulticlassAccuracy(**tokens)
        self.both = MetricCollection(
            {"precision": MulticlassPrecision(**tokens), "recall": MulticlassAccuracy(**tokens)}
        )
        self.gathered = MulticlassAccuracy(**tokens)
        self.ranking = MulticlassAUROC(num_classes=VOCABULARY, ignore_index=-100, validate_args=False)
        self.seen = CatMetric()
        self.per_token = MeanMetric()
        self.samples = SumMetric()
        self.calls: list[tuple[int, int, tuple[int, ...], bool, int]] = []

    def logits(self, batch: Mapping[str, Any]) -> Tensor:
        logits: Tensor = self.net(batch["input_ids"], batch["position_ids"], torch.as_tensor(batch["kind"]))
        return logits

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        values_BS, mask_BS = self.values(batch)
        loss = values_BS[mask_BS].mean()  # NaN where no label is valid
        self.log("val_loss", loss, sync_dist=True)
        logits = self.logits(batch).flatten(0, 1)
        labels = batch["labels"].flatten()
        self.accuracy.update(logits, labels)
        self.log("accuracy", self.accuracy)
        self.both.update(logits, labels)
        self.log_dict(self.both)
        self.per_token.update(values_BS[mask_BS])
        self.log("per_token", self.per_token)
        with once(self.gathered, self.ranking, self.samples, self.seen):
            whole, all_labels = gather(self.logits(batch)).flatten(0, 1), gather(batch["labels"]).flatten()
            self.gathered.update(whole, all_labels)
            self.ranking.update(whole, all_labels)
            self.samples.update(float(len(batch["kind"])))
            self.seen.update(torch.as_tensor(batch["index"]))
        self.log_dict({"gathered": self.gathered, "ranking": self.ranking, "samples": self.samples})
        context = current()
        self.calls.append(
            (
                dataloader_idx,
                batch_idx,
                tuple(torch.as_tensor(batch["index"]).tolist()),
                context.is_copy,
                context.group.size,
            )
        )
        return loss

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.found = sorted(int(i) for i in self.seen.compute().reshape(-1))
        self.seen.reset()

    on_test_epoch_end = on_validation_epoch_end


class Numbered(Samples):
    """Samples that carry their index."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "index": index}


def numbered(case: Case, size: int) -> Numbered:
    return Numbered(replace(case, samples=size))


class EvaluatedData(Data):
    """Datasets of the given sizes for every stage."""

    def __init__(self, case: Case = CASE, sizes: Sequence[int] = (9,), **kwargs: Any) -> None:
        super().__init__(case, **kwargs)
        self.datasets = [numbered(case, size) for size in sizes]

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.val_dataset = self.datasets[0]

    def val_dataloader(self) -> Any:
        loaders = [self.evaluation_loader(dataset) for dataset in self.datasets]
        return loaders[0] if len(loaders) == 1 else loaders

    test_dataloader = predict_dataloader = val_dataloader


def dcp_trainer(case: Case, world_size: int, tokens: int | None = None, **kwargs: Any) -> pl.Trainer:
    """A trainer under DCPStrategy; with ``tokens`` longer samples need more than one rank."""
    limit = {} if tokens is None else {"memory_limit": limit_for(world_size, tokens)}
    strategy = make_strategy(replace(case, world_size=world_size), **limit)
    return make_trainer(strategy, case, devices=world_size, **kwargs)


def collate_numbered(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {**collate_whole(rows), "index": torch.tensor([row["index"] for row in rows])}


def single(module: pl.LightningModule, datasets: Sequence[Any], stage: str = "validate") -> list[dict[str, Any]]:
    """Plain Lightning in one process, each dataset as one batch."""
    loaders = [DataLoader(dataset, batch_size=len(dataset), collate_fn=collate_numbered) for dataset in datasets]
    trainer = make_trainer("auto", CASE, devices=1)
    found: list[dict[str, Any]] = getattr(trainer, stage)(module, loaders, verbose=False)
    return found


def assert_same_scores(got: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert abs(mine[key] - value) <= 1e-5 * max(1.0, abs(value)), f"{key}: {mine[key]} instead of {value}"
