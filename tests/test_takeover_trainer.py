"""Settings of the Trainer over a plain loader: the batches of plain Lightning, on the real engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.fitting import Case, Samples, make_strategy, make_trainer
from tests.pool import Pool
from tests.takeover_tools import CASE, Masking, NoLengths, Taken

ONE = replace(CASE, world_size=1, steps=-1)


class Indexed(NoLengths):
    """Tells its lengths, and which sample is which."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(samples)
        self.lengths = samples.lengths

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "index": index}


@dataclass(frozen=True)
class Seen:
    """What a run was: samples of each step, steps asked for, loaders made."""

    steps: list[list[int]]
    asked: float
    made: int


class Hooked(Taken):
    """Has its loader from the hook, and asks for the number of steps."""

    def __init__(self, case: Case, shuffle: bool = False) -> None:
        super().__init__(case)
        self.shuffle = shuffle
        self.made = 0
        self.asked = 0.0
        self.steps: dict[int, list[int]] = {}

    def train_dataloader(self) -> Any:
        self.made += 1
        rows = Indexed(Samples(self.case))
        return DataLoader(rows, batch_size=8, shuffle=self.shuffle, collate_fn=self.collate)

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**Masking()(rows), "index": torch.tensor([row["index"] for row in rows])}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.setdefault(self.global_step, []).extend(batch["index"].tolist())
        values_BS, mask_BS = self.values(batch)
        return values_BS[mask_BS].sum() / mask_BS.sum().clamp(min=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.asked = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


FLAGS: dict[str, dict[str, Any]] = {
    "whole epochs": {},
    "some batches": {"limit_train_batches": 2},
    "part of them": {"limit_train_batches": 0.5},
    "the same batches": {"overfit_batches": 2},
    "steps": {"max_steps": 4},
    "reloading": {"reload_dataloaders_every_n_epochs": 1},
}


def _run(strategy: Any, shuffle: bool, **flags: Any) -> Seen:
    module = Hooked(ONE, shuffle)
    make_trainer(strategy, ONE, devices=1, **{"max_epochs": 2, "max_steps": -1, **flags}).fit(module)
    return Seen([sorted(ids) for ids in module.steps.values()], module.asked, module.made)


def _all() -> tuple[dict[str, Seen], list[Seen]]:
    found = {name: _run(make_strategy(ONE, sp_sizes=[1]), False, **flags) for name, flags in FLAGS.items()}
    shuffled = [
        _run(make_strategy(ONE, sp_sizes=[1]), True, **FLAGS[name]) for name in ("reloading", "whole epochs")
    ]
    return found, shuffled


@pytest.mark.feature("Trainer", "`reload_dataloaders_every_n_epochs`")
@pytest.mark.feature("Trainer", "`overfit_batches`")
@pytest.mark.feature("Trainer", "`limit_train_batches`", "int and float")
@pytest.mark.feature("Trainer", "`max_steps`")
@pytest.mark.feature("Trainer", "`estimated_stepping_batches`", "not with a planner that draws the samples")
@pytest.mark.feature("Data", "`train_dataloader` hook of the LightningModule")
def test_steps_are_those_of_plain_lightning(pool: Pool) -> None:
    found, shuffled = pool.run(_all, 1, timeout=180.0)[0]
    for name, flags in FLAGS.items():
        plain = _run("auto", False, **flags)
        assert found[name].steps == plain.steps, name
        assert (found[name].asked, found[name].made) == (plain.asked, plain.made), name
    reloaded, once = shuffled
    assert reloaded.steps == once.steps, "a loader that is made anew stands at its epoch"
    assert once.steps[:3] != once.steps[3:]
    assert all(sorted(i for step in once.steps[k : k + 3] for i in step) == list(range(20)) for k in (0, 3))


def _distributed() -> list[list[int]]:
    rows = Indexed(Samples(CASE))
    rank = torch.distributed.get_rank()
    sampler: Any = DistributedSampler(rows, 2, rank, shuffle=True, seed=5)
    loader = DataLoader(rows, batch_size=4, sampler=sampler, collate_fn=Hooked.collate)
    module = Hooked(ONE)
    case = replace(CASE, steps=-1)
    strategy = make_strategy(case, sp_sizes=[1], planner="balanced")
    make_trainer(strategy, case, devices=2, max_epochs=2).fit(module, loader)
    kept: Any = loader.sampler
    assert kept is sampler
    assert (sampler.num_replicas, sampler.rank) == (2, rank)
    return [ids for _, ids in sorted(module.steps.items())]


@pytest.mark.feature("Data", "`DistributedSampler` of one's own", "the order that its ranks have together")
def test_a_distributed_sampler_gives_the_steps_that_its_ranks_had(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#20272: the user's sampler stays as it is, without any flag."""
    first, second = pool.run(_distributed, 2, timeout=60.0)
    got = [sorted(a + b) for a, b in zip(first, second, strict=True)]
    parts: list[Any] = [DistributedSampler(range(20), 2, r, shuffle=True, seed=5) for r in range(2)]  # type: ignore[arg-type]
    for epoch in range(2):
        rows = []
        for part in parts:
            part.set_epoch(epoch)
            rows.append(list(part))
        for step in range(3):
            wanted = sorted(i for row in rows for i in row[4 * step : 4 * step + 4])
            assert got[3 * epoch + step] == wanted
