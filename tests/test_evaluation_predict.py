"""Predictions: each sample once, with the right index, also for writers and where ranks have nothing to predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.sequence_parallel import current, gather
from tests.evaluating import CASE, EvaluatedData, Scored, collate_numbered, dcp_trainer, numbered
from tests.pool import Pool, RemoteError

SIZES = (6, 1)


class Predictor(Scored):
    """Predicts the mean logit of each sample's real tokens, and says whose it is."""

    gathers = True

    def predict_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        logits = self.logits(batch)
        mask = batch["labels"] != -100
        if self.gathers:
            logits, mask = gather(logits), gather(mask)
        self.sizes_used = {*getattr(self, "sizes_used", ()), current().group.size}
        means = (logits.mean(-1) * mask).sum(1) / mask.sum(1)
        return {"index": torch.as_tensor(batch["index"]), "mean": means}


class Writer(BasePredictionWriter):
    """Remembers what it was given."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.batches: list[tuple[int, list[int], list[int]]] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *args: Any
    ) -> None:
        self.batches.append((args[-1], list(batch_indices), prediction["index"].tolist()))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append(
            [
                [(list(ids), p["index"].tolist()) for ids, p in zip(indices, found, strict=True)]
                for indices, found in zip(batch_indices, predictions, strict=True)
            ]
        )


class Met(pl.Callback):
    """A hook in which all ranks meet."""

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.barrier("met")


def _predicted(world_size: int, tokens: int | None, plain: bool, workers: int) -> Any:
    module, writer = Predictor(), Writer("batch_and_epoch")
    trainer = dcp_trainer(CASE, world_size, tokens, callbacks=[writer, Met()])
    # The pool's processes come from a fork server, and a server for their own workers would import everything anew.
    forked: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    if plain:
        loaders = [
            DataLoader(numbered(CASE, n), batch_size=2, collate_fn=collate_numbered, **forked) for n in SIZES
        ]
        returned = trainer.predict(module, loaders)
    else:
        data = EvaluatedData(CASE, SIZES, eval_batch_size=2, **forked)
        returned = trainer.predict(module, datamodule=data)
    means = [
        {int(i): float(m) for p in per_loader for i, m in zip(p["index"], p["mean"], strict=True)}
        for per_loader in returned  # type: ignore[union-attr]
    ]
    return means, writer.batches, writer.epochs, module.sizes_used


def _check(results: Sequence[Any], sizes_used: set[int], module: Predictor) -> None:
    module.eval()
    for loader, size in enumerate(SIZES):
        found = [i for means, *_ in results for i in means[loader]]
        assert sorted(found) == list(range(size)), "every sample once, and nothing for a copy"
        for means, *_ in results:
            for i, mean in means[loader].items():
                alone = module.predict_step(collate_numbered([numbered(CASE, size)[i]]), 0)
                assert mean == pytest.approx(float(alone["mean"]), abs=1e-5)
    for means, batches, epochs, _ in results:
        assert all(indices == predicted for _, indices, predicted in batches)
        assert len(epochs) == 1
        for loader in range(len(SIZES)):
            by_batch = [(indices, predicted) for k, indices, predicted in batches if k == loader]
            assert epochs[0][loader] == by_batch
            assert [i for _, predicted in by_batch for i in predicted] == list(means[loader])
    assert {p for *_, used in results for p in used} == sizes_used


@pytest.mark.feature("Callbacks", "`BasePredictionWriter`", "by batch and by epoch, with indices")
@pytest.mark.parametrize(
    ("tokens", "plain", "workers", "used"),
    [(None, False, 0, {1}), (None, True, 2, {1}), (12, False, 2, {1, 2})],
)
def test_each_sample_is_predicted_once_with_its_index(
    pool: Pool, tokens: int | None, plain: bool, workers: int, used: set[int]
) -> None:
    """Lightning-AI/pytorch-lightning#10782, axolotl-ai-cloud/axolotl#3444, facebookresearch/ParlAI#3367."""
    results = pool.run(_predicted, 4, 4, tokens, plain, workers, timeout=40.0)
    _check(results, used, Predictor())


def _predicted_in_parts() -> str:
    module = Predictor()
    module.gathers = False
    trainer = dcp_trainer(CASE, 2, 2)
    with pytest.raises(RuntimeError, match="without gathering") as caught:
        trainer.predict(module, datamodule=EvaluatedData(CASE, (2,)))
    return str(caught.value)


def test_a_part_of_the_tokens_is_no_prediction(pool: Pool) -> None:
    for text in pool.run(_predicted_in_parts, 2):
        assert "sequence_parallel.gather(output, dim=1)" in text
        assert "sp_sizes=[1]" in text


class _Broken(Scored):
    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        if self.trainer.global_rank == 1:
            raise torch.OutOfMemoryError("no memory left on rank 1")
        return super().validation_step(batch, batch_idx, dataloader_idx)


def _fails() -> None:
    dcp_trainer(CASE, 2).validate(_Broken(), datamodule=EvaluatedData(CASE, (4,)), verbose=False)


def test_an_error_of_one_rank_ends_all(pool: Pool) -> None:
    """huggingface/transformers#46809: memory that runs out in validation is said as it is, and nobody hangs."""
    with pytest.raises(RemoteError) as caught:
        pool.run(_fails, 2, timeout=90.0, patience=40.0)  # rank 0 may first collect workers of an earlier test
    assert "OutOfMemoryError: no memory left on rank 1" in caught.value.tracebacks[1]
    assert "rank 1 ended with OutOfMemoryError: no memory left on rank 1" in caught.value.tracebacks[0]
