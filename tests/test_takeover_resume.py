"""A loader that was taken over, saved in the middle of an epoch: the same samples to come, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.checkpointing import keeper, read
from tests.fitting import Case, Result, Samples, assert_same_updates
from tests.pool import Pool
from tests.takeover_tools import CASE, Masking, NoLengths, Taken, fit_alone, fit_taken, ids_of
from tests.test_takeover_fit import Buckets

TWO_EPOCHS: dict[str, Any] = {"max_epochs": 2, "max_steps": -1, "enable_checkpointing": True}


class Scheduled(Taken):
    """Its schedule asks for the number of steps, and so for the loader, before there is a profile."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.case.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.case.lr, total_steps=steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Stateful(NoLengths):
    """As torchdata's: it has a state, here one that a callback would change."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(samples)
        self.mark = 0
        self.loaded: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.mark += 1
        return super().__getitem__(index)

    def state_dict(self) -> dict[str, Any]:
        return {"mark": self.mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state["mark"])
        self.mark = state["mark"]


def _loader(kind: str, case: Case, ranks_at_first: int) -> DataLoader[Any]:
    samples = Samples(case)
    size = CASE.batch // ranks_at_first
    if kind == "shuffled":
        return DataLoader(Stateful(samples), batch_size=size, shuffle=True, collate_fn=Masking())
    if kind == "batches":
        return DataLoader(samples, batch_sampler=Buckets(samples.lengths), collate_fn=Masking())
    weights = WeightedRandomSampler([1.0, 4.0] * 10, 22, generator=torch.Generator().manual_seed(3))
    return DataLoader(samples, batch_size=size, sampler=weights, collate_fn=Masking(), num_workers=1)


def _run(kind: str, case: Case, folder: str, resume: str | None = None) -> tuple[Result, list[int]]:
    loader = _loader(kind, case, ranks_at_first=2)
    result = fit_taken(case, loader, Scheduled, callbacks=[keeper(folder)], ckpt_path=resume, **TWO_EPOCHS)
    return result, getattr(loader.dataset, "loaded", [])


@pytest.mark.feature("Checkpoints", "resume within an epoch of a plain `DataLoader`", "on any number of ranks")
@pytest.mark.feature("Data", "datasets with `state_dict` and `load_state_dict`")
@pytest.mark.parametrize("kind", ["shuffled", "batches", "mixture"])
def test_the_rest_is_trained_on_the_same_and_on_other_numbers_of_ranks(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    """Lightning-AI/pytorch-lightning#20550, meta-pytorch/torchft#292: no state is dropped, no sample lost."""
    whole = pool.run(_run, 2, kind, CASE, str(tmp_path), timeout=120.0)[0][0]
    steps = ids_of(whole.plans)
    assert len(steps) == (12 if kind == "batches" else 6)
    half = len(steps) // 2
    if kind == "shuffled":
        assert sorted(i for step in steps[:half] for i in step) == list(range(20))
        assert_same_updates(whole, _alone_scheduled(steps))
        state = read(tmp_path / "step=1.ckpt")["lightning_dcp"]["loader"]
        assert state["dataset"]["mark"] > 0
    for ranks, stop in ((2, 1), (1, half), (4, half + 1)):
        case = replace(CASE, world_size=ranks)
        path = str(tmp_path / f"step={stop}.ckpt")
        rest, loaded = pool.run(_run, ranks, kind, case, str(tmp_path / "again"), path, timeout=120.0)[0]
        assert ids_of(rest.plans) == steps[stop:], (ranks, stop)
        if kind == "shuffled":
            assert loaded
            assert loaded[-1] == read(path)["lightning_dcp"]["loader"]["dataset"]["mark"]
        if ranks == 2:
            assert all(torch.equal(rest.weights[n], whole.weights[n]) for n in whole.weights)
        else:
            assert_same_updates(replace(rest, start=whole.start), whole, tolerance=2e-4)


def _alone_scheduled(steps: list[list[int]]) -> Result:
    return fit_alone(CASE, Samples(CASE), steps, Scheduled, max_epochs=1, max_steps=-1)


def test_another_batch_size_is_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    pool.run(_save, 1, str(tmp_path))
    with pytest.raises(AssertionError, match="samples_per_rank = 4, this run has 2"):
        pool.run(_save, 1, str(tmp_path), str(tmp_path / "step=1.ckpt"))


def _save(folder: str, resume: str | None = None) -> None:
    case = replace(CASE, world_size=1, steps=2 if resume else 1)
    loader = DataLoader(NoLengths(Samples(case)), batch_size=2 if resume else 4, collate_fn=Masking())
    fit_taken(case, loader, callbacks=[keeper(folder)], ckpt_path=resume, enable_checkpointing=True)
