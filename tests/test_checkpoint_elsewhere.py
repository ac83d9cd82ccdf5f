"""Checkpoints in places that are no local folder, by way of fsspec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from tests.checkpointing import Ended, Run, keeper, read, sample_ids, train
from tests.pool import Pool


class Elsewhere(DirFileSystem):  # type: ignore[misc]
    """Stands for a store that all ranks reach: a folder under a protocol of its own."""

    protocol = "elsewhere"
    root = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(path=self.root, fs=LocalFileSystem(auto_mkdir=True), **options)


def _train(run: Run, root: Path) -> tuple[Ended, list[str]]:
    Elsewhere.root = str(root)
    Elsewhere.clear_instance_cache()
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    saver = keeper("elsewhere://runs", save_top_k=2, monitor="step", mode="max", save_last=True)
    run = replace(
        run,
        case=replace(run.case, world_size=dist.get_world_size()),
        callbacks=(saver,),
        trainer={"enable_checkpointing": True},
    )
    return train(run), sorted(saver.best_k_models)


@pytest.mark.feature(
    "Checkpoints",
    "other file systems of fsspec (`s3://`, ...)",
    'resume from the whole address, as `ckpt_path="last"` finds nothing there',
)
def test_saved_and_resumed_elsewhere(pool: Pool, tmp_path: Path) -> None:
    whole, kept = pool.run(_train, 2, Run(), tmp_path / "a", timeout=120.0)[0]
    assert kept == ["elsewhere://runs/step=5.ckpt", "elsewhere://runs/step=6.ckpt"]
    names = sorted(path.name for path in (tmp_path / "a" / "runs").iterdir())
    assert names == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"], "old ones are removed"
    assert read(tmp_path / "a" / "runs" / "last.ckpt")["global_step"] == 6
    pool.run(_train, 2, Run(steps=4), tmp_path / "b", timeout=120.0)
    resumed, _ = pool.run(_train, 2, Run(resume="elsewhere://runs/step=4.ckpt"), tmp_path / "b", timeout=120.0)[0]
    assert sample_ids(resumed.plans) == sample_ids(whole.plans)[4:]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


def _last_elsewhere(root: Path) -> list[list[int]]:
    _train(Run(steps=4), root)
    return sample_ids(_train(Run(resume="last"), root)[0].plans)


def test_the_last_file_elsewhere_is_not_found_by_lightning(pool: Pool, tmp_path: Path) -> None:
    """It leaves the protocol out of the name, warns, and starts anew; the documentation says so until it does not."""
    assert len(pool.run(_last_elsewhere, 1, tmp_path, timeout=120.0)[0]) == Run().steps


def _in_memory() -> tuple[Ended, Ended]:
    whole = train(Run(case=replace(Run().case, world_size=1)))
    run = replace(Run(case=replace(Run().case, world_size=1)), save="memory://runs/x.ckpt")
    train(replace(run, steps=4))
    return whole, train(replace(run, resume="memory://runs/x.ckpt"))


def test_saved_in_memory(pool: Pool) -> None:
    whole, resumed = pool.run(_in_memory, 1, timeout=120.0)[0]
    assert sample_ids(resumed.plans) == sample_ids(whole.plans)[4:]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
