"""SIGKILL to any rank at any moment, and on from the last file on any number of ranks: nothing is lost or repeated."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dcp.planners.grouped import DCPIntra
from tests.checkpointing import RichSingle
from tests.fitting import Case, Result, assert_same_updates, fit_single, weights_of
from tests.killing import MOMENTS, Kill, Life, live, trained
from tests.pool import Pool, RemoteError

EPOCHS = 2
CASE = Case(world_size=2, samples=22, batch=6, seed=3, lr=0.2)
"""Four steps an epoch, the last one shorter."""
DRAWN = replace(CASE, batch=None)  # type: ignore[arg-type]
STEPS = 8

ROUNDS = int(os.environ.get("LIGHTNING_DCP_KILL_ROUNDS", "0"))
"""How often every moment comes once more, with other ranks, steps and numbers of ranks."""


class Single(RichSingle):
    """In plain Lightning, with a zero gradient for a head that no sample of a step uses: ZeRO's momentum goes on."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        nothing = torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum() * 0
        return super().training_step(batch, batch_idx) + nothing


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run with its deaths.

    Attributes:
        folder: of its checkpoints.
        case: what it trains.
        planner: ``None`` for one of fixed steps.
        worlds: numbers of ranks that a start may get.
        limit: argument of the Trainer that ends it.
    """

    folder: Path
    case: Case
    planner: Any = None
    worlds: Sequence[int] = (2,)
    limit: dict[str, int] = field(default_factory=lambda: {"max_epochs": EPOCHS})


def run(pool: Pool, job: Job, moments: Sequence[str], seed: int) -> tuple[list[Kill], dict[str, Tensor]]:
    """Start a job, kill it at each of the moments in turn, then let it end; the kills that happened and the weights."""
    rng = random.Random(seed)
    kills: list[Kill] = []
    job.folder.mkdir()
    for number, moment in enumerate([*moments, None]):
        world = rng.choice([w for w in job.worlds if w > 1 or moment != "gather"])
        kill = None
        if moment is not None:
            step = min(_steps(job) + rng.randrange(2), STEPS - 1)
            kill = Kill(rank=rng.randrange(world), step=step, moment=moment, passes=rng.randrange(2), life=number)
        case = replace(job.case, world_size=world)
        life = Life(folder=job.folder, case=case, limit=job.limit, planner=job.planner, kill=kill)
        try:
            return kills, pool.run(live, world, life, timeout=170.0, patience=0.3)[0]
        except RemoteError as error:
            if kill is None or error.tracebacks.get(kill.rank) != "the worker died":
                raise
            kills.append(kill)
    raise AssertionError("the last start ends or raises")


def _steps(job: Job) -> int:
    log = job.folder / "log"
    return len(trained(log)) if log.exists() else 0


def check(job: Job, weights: dict[str, Tensor]) -> list[list[int]]:
    """Each sample once in each epoch, and the weights of one process; gives the samples of the steps."""
    kept = trained(job.folder / "log")
    steps = [[i for m in plan.micro_batches for i in m.sample_ids] for _, plan in kept]
    for epoch in range(EPOCHS):
        seen = [i for (number, _), ids in zip(kept, steps, strict=True) if number == epoch for i in ids]
        assert sorted(seen) == list(range(job.case.samples))
    single = fit_single(replace(job.case, steps=len(kept)), [plan.to_json() for _, plan in kept], make=Single)
    start = weights_of(RichSingle(job.case))
    assert_same_updates(Result(start=start, weights=weights, losses=[], plans=[]), single)
    return [sorted(ids) for ids in steps]


def jobs(folder: Path) -> list[Job]:
    draws = DCPIntra(window=20)
    return [
        Job(folder=folder / "fixed", case=CASE),
        Job(folder=folder / "fixed on any ranks", case=CASE, worlds=(1, 2, 3, 4), limit={"max_steps": STEPS}),
        Job(folder=folder / "drawn on any ranks", case=DRAWN, planner=draws, worlds=(1, 2, 3, 4)),
        Job(folder=folder / "drawn", case=DRAWN, planner=draws),
    ]


def kill_all(pool: Pool, folder: Path, chosen: Sequence[Job], seed: int) -> list[Kill]:
    """Each moment once, in one of the jobs; all of them end as if nothing had happened."""
    moments = random.Random(seed).sample(MOMENTS, len(MOMENTS))
    kills: list[Kill] = []
    whole: dict[bool, tuple[dict[str, Tensor], list[list[int]]]] = {}
    for number, job in enumerate(chosen):
        drawn, same_ranks = job.planner is not None, len(job.worlds) == 1
        if drawn not in whole and (same_ranks or not drawn):
            reference = replace(job, folder=folder / f"{job.folder.name}, whole")
            _, weights = run(pool, reference, (), 0)
            whole[drawn] = weights, check(reference, weights)
        died, weights = run(pool, job, moments[number :: len(chosen)], seed + number)
        kills += died
        steps = check(job, weights)
        assert drawn or steps == whole[drawn][1], "other steps"
        if same_ranks:
            assert all(torch.equal(weights[name], value) for name, value in whole[drawn][0].items())
    return kills


@pytest.mark.feature(
    "Checkpoints",
    "`kill -9` of any rank at any moment",
    'with `ModelCheckpoint(save_last=True)` and `ckpt_path="last"`: each sample of the epoch once, on the same ranks '
    "bit-equal weights",
)
@pytest.mark.timeout(900)
def test_killed_at_any_moment_and_resumed_on_any_ranks(pool: Pool, tmp_path: Path) -> None:
    """Momentum, two groups and a schedule, two shuffled epochs; with fixed steps and with drawn ones."""
    assert len(kill_all(pool, tmp_path, jobs(tmp_path)[:3], 7)) >= 12


@pytest.mark.skipif(
    not ROUNDS, reason="minutes: set LIGHTNING_DCP_KILL_ROUNDS to the number of rounds of 17 kills"
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 100 + ROUNDS))
def test_many_more_kills(pool: Pool, tmp_path: Path, seed: int) -> None:
    kills = kill_all(pool, tmp_path, jobs(tmp_path), seed)
    print("\n".join(map(str, kills)))
    assert len(kills) >= 12
