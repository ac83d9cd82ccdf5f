"""Collectives of all ranks inside a micro-batch: each is refused on all ranks, with the call and what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MeanMetric

from lightning_dcp.sequence_parallel import current
from tests.fitting import Case, Data, Module, make_strategy, make_trainer
from tests.pool import Pool, RemoteError
from tests.test_execution import Fixed

CASE = Case(world_size=2, samples=4, batch=4, steps=2, masked="none", seed=8)


class _Asking(Module):
    """Asks for everything over all ranks, on the rank that has one micro-batch more."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.metric = MeanMetric(dist_sync_on_step=True)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if current().sample_ids != (0,) and self.trainer.global_rank == 0:
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            assert self.all_gather(torch.ones(3)).shape == (2, 3)  # type: ignore[union-attr]
            self.trainer.strategy.barrier()
            assert self.trainer.strategy.broadcast("x") == "x"
            assert self.trainer.strategy.reduce(torch.ones(2)).shape == (2,)
            dist.all_reduce(torch.ones(2))
            work = dist.all_reduce(torch.ones(2), async_op=True)
            assert work is not None
            work.wait()
            dist.barrier(dist.group.WORLD)
            assert dist.new_group([0, 1]) is None
            self.metric(1.0)
        return loss


def _fit_asking() -> None:
    make_trainer(make_strategy(CASE, planner=Fixed()), CASE, devices=2).fit(_Asking(CASE), datamodule=Data(CASE))


def test_collectives_of_the_world_are_named_on_all_ranks(pool: Pool) -> None:
    """verl-project/verl#6176."""
    with pytest.raises(RemoteError) as caught:
        pool.run(_fit_asking, 2, timeout=60.0)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert (
            "rank 0: samples (1,): self.log('train_loss', ..., on_step=True, on_epoch=True, sync_dist=True)"
            in text
        )
        assert "write self.log('train_loss', ..., on_step=True, on_epoch=True)" in text
        for call in ("all_gather", "a barrier", "a broadcast", "a reduction over all ranks"):
            assert f"{call} was called inside training_step" in text
        assert "torch.distributed.all_reduce (" in text
        assert "test_collectives.py:" in text, "the line of the call is not told"
        assert "torch.distributed.barrier (" in text
        assert "torch.distributed.new_group (" in text
        assert "torchmetrics/utilities/distributed.py:" in text, "dist_sync_on_step is not refused"


class _Allowed(Module):
    """Talks to the ranks of its own micro-batch, in the forward and in a hook of the backward."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        group = current().group
        if group.size > 1:
            seen = torch.ones(1)
            dist.all_reduce(seen, group=group.handle)
            assert float(seen) == group.size
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen = torch.ones(1)
        dist.all_reduce(seen)
        assert float(seen) == 2.0


def _fit_allowed() -> bool:
    functions = [dist.all_reduce, dist.barrier, dist.broadcast]
    make_trainer(make_strategy(CASE, planner=Fixed()), CASE, devices=2).fit(_Allowed(CASE), datamodule=Data(CASE))
    return functions == [dist.all_reduce, dist.barrier, dist.broadcast]


def test_a_micro_batch_may_talk_within_its_group_and_hooks_to_the_world(pool: Pool) -> None:
    assert pool.run(_fit_allowed, 2, timeout=60.0) == [True, True]
