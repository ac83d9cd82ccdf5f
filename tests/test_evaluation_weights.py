"""What values of an evaluation count: in hooks before the step, weighted by sample, by a profile that was kept."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_dcp.sequence_parallel import current, loss_sum
from tests.evaluating import (
    CASE,
    EvaluatedData,
    Numbered,
    Scored,
    assert_same_scores,
    collate_numbered,
    dcp_trainer,
    limit_for,
    numbered,
    single,
)
from tests.fitting import LAYERS, Case, Module, formula_profile, make_strategy, make_trainer
from tests.pool import Pool

BY_SAMPLE = replace(CASE, weighting="sample", masked="prompts", seed=9)


class Started(Module):
    """Logs in the hooks around a step, where the batch is known and the step has not run."""

    def on_validation_batch_start(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log("before", batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.values(batch)  # what ran on shards must have exchanged them
        self._log("inside", batch)

    def on_validation_batch_end(self, outputs: Any, batch: dict[str, Any], *args: Any) -> None:
        self._log("behind", batch)

    def _log(self, name: str, batch: dict[str, Any]) -> None:
        valid = batch["labels"][batch["labels"] != -100].double()
        self.log(f"{name}_mean", valid.mean(), sync_dist=True)
        self.log(f"{name}_sum", valid.sum(), sync_dist=True, reduce_fx="sum")
        self.log(f"{name}_max", valid.max() if len(valid) else torch.nan, sync_dist=True, reduce_fx="max")


def _started(tokens: int | None, size: int) -> Any:
    trainer = dcp_trainer(CASE, 4, tokens)
    return trainer.validate(
        Started(CASE), datamodule=EvaluatedData(CASE, (size,), eval_batch_size=2), verbose=False
    )


@pytest.mark.parametrize("tokens", [None, 12])
def test_values_of_all_hooks_count_alike(pool: Pool, tokens: int | None) -> None:
    """A copy counts nothing in any hook, and a shard its own labels."""
    for size in (1, 5):
        expected = single(Started(CASE), [numbered(CASE, size)])
        for got in pool.run(_started, 4, tokens, size):
            assert_same_scores(got, expected)


class BySample(Module):
    """Logs the mean over samples of the mean over their labels."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.sizes: set[int] = set()

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        found = loss_sum(*self.values(batch))
        self.sizes.add(current().group.size)
        self.log("by_sample", found["loss"] / found["count"], sync_dist=True)


class OneLabel(Module):
    """Logs the mean label of batches that have one for each sample."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        labels_B = batch["labels"]
        self.log("label", labels_B[labels_B != -100].double().mean(), sync_dist=True)


def collate_one(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {"labels": torch.tensor([-100 if row["index"] == 2 else row["index"] for row in rows])}


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Numbered) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


def _by_sample() -> Any:
    found = []
    for tokens in (None, 12):
        module = BySample(BY_SAMPLE)
        data = EvaluatedData(BY_SAMPLE, (9,), eval_batch_size=2)
        got = dcp_trainer(BY_SAMPLE, 4, tokens).validate(module, datamodule=data, verbose=False)
        found.append((got[0]["by_sample"], sorted(module.sizes)))
    rows = numbered(BY_SAMPLE, 9)
    whole: Any = [collate_numbered([rows[i] for i in ids]) for ids in ((0, 1, 2), (3, 4), (5, 6, 7, 8))]
    for loader in (
        DataLoader(rows, batch_size=2, collate_fn=collate_numbered),
        DataLoader(Stream(rows), batch_size=2, collate_fn=collate_numbered),
        DataLoader(whole, batch_size=None),
    ):
        got = dcp_trainer(BY_SAMPLE, 4).validate(BySample(BY_SAMPLE), loader, verbose=False)
        found.append((got[0]["by_sample"], [1]))
    one = DataLoader(rows, batch_size=2, collate_fn=collate_one)
    return found, dcp_trainer(BY_SAMPLE, 4).validate(OneLabel(BY_SAMPLE), one, verbose=False)


def test_values_weighted_by_sample(pool: Pool) -> None:
    """Labels of tokens and labels of samples; some samples have none that counts."""
    module = BySample(BY_SAMPLE)
    means = []
    for row in numbered(BY_SAMPLE, 9):  # type: ignore[attr-defined]
        values_BS, mask_BS = module.values(collate_numbered([row]))
        means += [float(values_BS[mask_BS].detach().mean())] if bool(mask_BS.any()) else []
    assert 1 < len(means) < 9
    results = pool.run(_by_sample, 4, timeout=120.0)
    for found, one in results:
        for value, _ in found:
            assert value == pytest.approx(sum(means) / len(means), rel=1e-5)
        assert one[0]["label"] == pytest.approx((sum(range(9)) - 2) / 8)
        assert found[0][1] == [1]
    assert {p for found, _ in results for p in found[1][1]} > {1}


def _with_file(file: str) -> Any:
    strategy = make_strategy(replace(CASE, world_size=4), profile=file, memory_limit=limit_for(4, 12))
    module = Scored(CASE)
    trainer = make_trainer(strategy, CASE, devices=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = trainer.validate(module, datamodule=EvaluatedData(CASE, (9,), eval_batch_size=2), verbose=False)
    return got, {p for *_, p in module.calls}, [str(w.message) for w in caught if file in str(w.message)]


@pytest.mark.parametrize("kind", ["kept", "missing", "damaged", "binary"])
def test_a_kept_profile_decides_about_groups(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Without a fit before; a file that cannot be used is said, and no rank waits for the one that read it."""
    file = tmp_path / "profile.json"
    if kind == "kept":
        file.write_text(formula_profile(4, (LAYERS,)).to_json())
    elif kind != "missing":
        file.write_bytes(b"\xff\xfe\x00" if kind == "binary" else b"{")
    expected = single(Scored(CASE), [numbered(CASE, 9)])
    results = pool.run(_with_file, 4, str(file))
    for got, _, _ in results:
        assert_same_scores(got, expected)
    used = {p for _, sizes, _ in results for p in sizes}
    assert (max(used) > 1) == (kind == "kept")
    assert bool(results[0][2]) == (kind in ("damaged", "binary"))
