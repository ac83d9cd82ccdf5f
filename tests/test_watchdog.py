"""A rank that raises, hangs or dies in a micro-batch: the others end soon, with its reason or its place."""

from __future__ import annotations

import io
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.protocol import PlanRequest
from tests.fitting import Case, Data, Module, make_strategy, make_trainer
from tests.pool import Pool, RemoteError
from tests.test_loop import Script

CASE = Case(world_size=4, samples=8, batch=4, steps=2, masked="none", seed=8)


class Nested:
    """Sample 0 over all ranks, 1 over ranks 0 and 1, 2 and 3 on ranks 2 and 3 alone."""

    name, draws, lockstep = "nested", False, False

    def plan(self, request: PlanRequest) -> IterationPlan:
        blocks = ((0, 4), (0, 2), (2, 1), (3, 1))
        rows = [
            MicroBatch(
                sample_ids=(i,),
                shapes=(shape,),
                padded_shape=(-(-shape[0] // size) * size,),
                first_rank=first,
                sp_size=size,
                nanoseconds=1,
                bytes=1,
            )
            for i, shape, (first, size) in zip(request.ids, request.sizes, blocks, strict=True)
        ]
        return IterationPlan(world_size=4, micro_batches=tuple(rows))


class Failing(Module):
    """Fails in one way on rank 1, in the second step, in a micro-batch on so many ranks."""

    def __init__(self, case: Case, kind: str, sp_size: int) -> None:
        super().__init__(case)
        self.kind, self.sp_size = kind, sp_size
        self.held: Any = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        from lightning_dcp.sequence_parallel import current

        rank, size = self.trainer.global_rank, current().group.size
        self.struck = rank == 1 and size == self.sp_size and self.global_step == 1
        if self.struck and self.kind == "forward":
            self.net.get_submodule("layers.1.mlp").register_forward_pre_hook(_fail)
        if self.struck and self.kind == "hang":
            dist.distributed_c10d._get_default_store().wait(["go on"], timedelta(seconds=60))
        if self.struck and self.kind == "memory":
            raise torch.OutOfMemoryError("out of memory")
        if self.struck and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = super().training_step(batch, batch_idx)
        self.held = loss  # a graph that user code keeps must keep no connection open
        if self.struck and self.kind == "backward":
            loss.register_hook(_fail)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and self.kind == "between":
            _fail()

    def on_after_backward(self) -> None:
        if self.struck and self.kind == "hook":
            _fail()


def _fail(*_args: Any) -> None:
    raise ArithmeticError("user code broke")


def _fit(kind: str, sp_size: int) -> tuple[str, str]:
    """Type and text of what this rank raised."""
    module = Failing(CASE, kind, sp_size)
    strategy = make_strategy(CASE, planner=Nested(), timeout=timedelta(seconds=300))
    trainer = make_trainer(strategy, CASE, devices=4)
    try:
        trainer.fit(module, datamodule=Data(CASE))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(("kind", "sp_size"), [("forward", 4), ("backward", 2), ("hook", 4), ("memory", 2)])
def test_an_error_inside_a_group_ends_all_ranks_at_once(pool: Pool, kind: str, sp_size: int) -> None:
    """Lightning-AI/pytorch-lightning#20404, verl-project/verl#6176: the peers are in an exchange, others in the vote.

    The limit of the process groups is far above that of the test, so nobody got out by waiting; and the world is whole
    afterwards, else the pool's own barrier would fail.
    """
    answers = pool.run(_fit, 4, kind, sp_size, timeout=60.0)
    reason = ("OutOfMemoryError", "out of memory") if kind == "memory" else ("ArithmeticError", "user code broke")
    assert answers[1] == reason
    for name, text in (answers[0], answers[2], answers[3]):
        assert name == "StepError"
        assert text.startswith("rank 1: training_step failed on samples")
        assert ": ".join(reason) in text
        assert "rank 0:" not in text


class _FailingAlone(Module):
    """A hook of the backward fails, on the rank that has no sample."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.trainer.global_rank == 1:
            _fail()


def _fit_empty() -> tuple[str, str]:
    case = Case(world_size=2, samples=2, batch=2, steps=1, masked="none")
    trainer = make_trainer(make_strategy(case, planner=Script((2, 0), samples=2)), case, devices=2)
    try:
        trainer.fit(_FailingAlone(case), datamodule=Data(case))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_error_on_a_rank_without_samples_ends_all_ranks_at_once(pool: Pool) -> None:
    waiting, failed = pool.run(_fit_empty, 2, timeout=60.0)
    assert failed == ("ArithmeticError", "user code broke")
    assert waiting[0] == "StepError"
    assert waiting[1].startswith("rank 1: training_step failed on a rank without samples")
    assert "user code broke" in waiting[1]


def _fit_stuck(kind: str, sp_size: int, limit: float) -> None:
    """Raise what the fit raises, with what the watchdog printed before."""
    module = Failing(CASE, kind, sp_size)
    trainer = make_trainer(
        make_strategy(CASE, planner=Nested(), timeout=timedelta(seconds=limit)), CASE, devices=4
    )
    sys.stderr = printed = io.StringIO()
    try:
        trainer.fit(module, datamodule=Data(CASE))
    except Exception as error:
        raise RuntimeError(f"RAISED {error} PRINTED {printed.getvalue()}") from error
    finally:
        sys.stderr = sys.__stderr__
        if trainer.global_rank == 0:
            dist.distributed_c10d._get_default_store().set("go on", "now")
    raise RuntimeError(f"NOTHING RAISED, PRINTED {printed.getvalue()}")


def _stuck(pool: Pool, kind: str, sp_size: int) -> dict[int, str]:
    """What each rank's fit raised and printed."""
    with pytest.raises(RemoteError) as caught:
        pool.run(_fit_stuck, 4, kind, sp_size, 8.0, timeout=90.0)
    return {
        rank: text.partition("RuntimeError: RAISED ")[2] or text for rank, text in caught.value.tracebacks.items()
    }


def test_a_rank_that_hangs_in_a_group_is_named(pool: Pool) -> None:
    raised, _, printed = _stuck(pool, "hang", 2)[0].partition("PRINTED")
    assert "rank 0, step 1 of epoch 0, micro-batch 2 of 2 (samples (" in raised
    assert "on ranks 0..1: in training_step or its backward for" in raised
    assert "another rank did not come in time" in raised
    assert "rank 1, step 1 of epoch 0, micro-batch 2 of 2" in raised
    assert "test_watchdog.py" in raised, "the line that rank 1 hangs in is not told"
    assert "lightning_dcp:\nrank 0, step 1 of epoch 0" in printed, "nothing was printed before the limit"
    assert "The time limit of 8 s of DCPStrategy(timeout=...)" in printed


def test_a_rank_that_dies_in_a_group_ends_all(pool: Pool) -> None:
    raised = _stuck(pool, "kill", 4)
    assert raised.pop(1) == "the worker died"
    assert sorted(raised) == [0, 2, 3]
    for text in raised.values():
        assert "step 1 of epoch 0: waiting for the others in the vote at the end of the step" in text
        assert "another rank has gone" in text


def test_an_error_between_two_steps_is_told_to_those_who_wait(pool: Pool) -> None:
    raised = _stuck(pool, "between", 1)
    assert raised.pop(1).startswith("user code broke")
    assert sorted(raised) == [0, 2, 3]
    for text in raised.values():
        assert "waiting for the others at the start of the step" in text
        assert "another rank has gone" in text
    assert any("rank 1 ended with ArithmeticError: user code broke" in text for text in raised.values())
