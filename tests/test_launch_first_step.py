"""The first step of a fit is reduced like every other, in every mode, and the ranks draw one order of the samples."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dcp.data.module import DCPDataModule
from tests.fitting import (
    Case,
    Module,
    Result,
    Samples,
    assert_same_updates,
    fit_dcp,
    fit_single,
    make_strategy,
    make_trainer,
    weights_of,
)
from tests.pool import Pool

FIRST = Case(world_size=2, samples=16, batch=8, steps=1, seed=21, masked="equal")

MODES = {
    "mean": FIRST,
    "sum": replace(FIRST, returns="sum"),
    "count": replace(FIRST, returns="dict"),
    "by sample": replace(FIRST, returns="loss_sum", weighting="sample"),
    "clipped": replace(FIRST, clip=0.1),
    "an empty rank": replace(FIRST, empty_rank=True),
    "checked first": replace(FIRST, self_check=True),
    "bf16-mixed": replace(FIRST, precision="bf16-mixed"),
    "bf16-true": replace(FIRST, precision="bf16-true"),
}


def _first_steps() -> dict[str, Result]:
    return {name: fit_dcp(case) for name, case in MODES.items()}


def test_the_first_step_is_reduced_in_every_mode(pool: Pool) -> None:
    """Covers Lightning-AI/pytorch-lightning#21251: in one mode the first iteration's gradients stayed local."""
    ranks = pool.run(_first_steps, 2, timeout=150.0)
    for name, case in MODES.items():
        results = [rank[name] for rank in ranks]
        for key, weight in results[0].weights.items():
            assert torch.equal(weight, results[1].weights[key]), f"{name}: ranks differ in {key}"
        moved = max(float((w - results[0].start[k]).abs().max()) for k, w in results[0].weights.items())
        assert moved > 1e-3, f"{name}: nothing was trained"
        if case.precision == "32-true":
            assert_same_updates(results[0], fit_single(replace(case, returns="mean"), results[0].plans))


class _Unseeded(DCPDataModule):
    def setup(self, stage: str | None = None) -> None:
        self.train_dataset = Samples(FIRST)


class _Drawn(Module):
    """Starts from weights that each rank draws for itself."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        rank = torch.distributed.get_rank()
        torch.manual_seed(1000 + rank)
        random.seed(rank)
        np.random.seed(rank)
        for part in self.net.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                part.reset_parameters()


def _without_a_seed() -> tuple[list[int], dict[str, Tensor], dict[str, Tensor]]:
    mine: list[int] = []

    class Seen(_Drawn):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            plan = self.trainer.strategy.plan  # type: ignore[attr-defined]
            for m in plan.of_rank(self.trainer.global_rank):
                if m.first_rank == self.trainer.global_rank:  # a wider group trains its samples once
                    mine.extend(m.sample_ids)

    module = Seen(FIRST)
    start = weights_of(module)
    trainer = make_trainer(make_strategy(FIRST), FIRST, devices=2, max_steps=-1, max_epochs=1)
    trainer.fit(module, datamodule=_Unseeded(global_batch_size=5))
    return mine, start, weights_of(module)


def test_without_seed_everything_the_ranks_share_one_order(pool: Pool) -> None:
    """Covers NVlabs/LongLive#71: ranks with seeds of their own overlapped and left samples out."""
    (one, start, weights), (other, start_there, weights_there) = pool.run(_without_a_seed, 2, timeout=60.0)
    assert not torch.equal(start["net.embedding.weight"], start_there["net.embedding.weight"])
    assert sorted(one + other) == list(range(16))
    for name, weight in weights.items():
        assert torch.equal(weight, weights_there[name]), name
