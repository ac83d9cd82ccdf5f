"""Process groups: few, created when needed and once, in one order, with exactly the ranks that were asked for."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_dcp.plan import IterationPlan, PlanError
from lightning_dcp.planners.protocol import PlanRequest
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.topology import laminar_blocks
from tests.fitting import LAYERS, Case, Data, Module, make_strategy, make_trainer
from tests.pool import Pool
from tests.synthetic import random_plan


def _create_and_use() -> tuple[int, int, list[tuple[int, ...]]]:
    world_size = dist.get_world_size()
    blocks = laminar_blocks(world_size, range(1, world_size + 1), world_size)
    groups = ProcessGroups([*blocks, *blocks], timeout=timedelta(seconds=77))
    known = len(dist.distributed_c10d._world.pg_map)
    assert groups.num_created == 0
    for size in range(2, world_size + 1):
        if any(length == size for _, length in blocks):
            with pytest.raises(PlanError, match="does not exist yet|is in no group"):
                groups.of(*next(block for block in blocks if block[1] == size))
            groups.ensure([1, size])
            groups.ensure([size])
    groups.ensure()
    members = []
    for first, size in blocks:
        if not first <= dist.get_rank() < first + size:
            continue
        group = groups.of(first, size)
        assert group.size == size
        assert group.ranks[group.rank] == dist.get_rank()
        assert (group.handle is None) == (size == 1)
        ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        if group.handle is not None:
            dist.all_gather(ranks, torch.tensor([dist.get_rank()]), group=group.handle)
            members.append(tuple(int(rank) for rank in ranks))
            assert members[-1] == group.ranks
            assert group.handle._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    created, known_to_torch = groups.num_created, len(dist.distributed_c10d._world.pg_map) - known
    groups.close()
    assert (groups.num_created, len(dist.distributed_c10d._world.pg_map)) == (0, known)
    return created, known_to_torch, members


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_groups_have_the_ranks_asked_for(pool: Pool, world_size: int) -> None:
    """Covers NVIDIA/Megatron-LM#5679 (sizes that are no power of two), NVIDIA/nccl#964 and pytorch/pytorch#40400
    (few groups, doubles created once).
    """
    blocks = [block for block in laminar_blocks(world_size, range(1, world_size + 1), world_size) if block[1] > 1]
    for rank, (created, known_to_torch, members) in enumerate(pool.run(_create_and_use, world_size)):
        own = [tuple(range(first, first + size)) for first, size in blocks if first <= rank < first + size]
        assert members == own
        assert created == known_to_torch == len(own)
        assert created < 2 * world_size


def _refusals() -> list[str]:
    groups = ProcessGroups([(0, 2)])
    messages = []
    for call in (
        lambda: groups.of(1, 2),
        lambda: ProcessGroups([(1, 2)]),
        lambda: groups.of(1 - dist.get_rank(), 1),
        lambda: groups.of(0, 2),
    ):
        with pytest.raises(PlanError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_unknown_group_is_refused(pool: Pool) -> None:
    for rank, (foreign, outside, single, early) in enumerate(pool.run(_refusals, 2)):
        own = "0..0, 0..1" if rank == 0 else "0..1, 1..1"
        assert foreign == f"rank {rank} is in no group 1..2; its groups are {own}"
        assert "leaves the world of 2 ranks" in outside
        assert f"rank {rank} is in no group" in single
        assert early.startswith("group 0..1 does not exist yet; all ranks have to call ProcessGroups.ensure([2])")


def test_one_process_needs_no_torch_distributed() -> None:
    groups = ProcessGroups([(0, 1)])
    assert groups.of(0, 1).handle is None
    assert groups.num_created == 0
    with pytest.raises(RuntimeError, match="init_process_group"):
        ProcessGroups([(0, 2)])


class _Widening:
    """Groups of one rank for three steps, then wider and wider ones, then any."""

    name, draws, lockstep = "widening", False, False

    def __init__(self) -> None:
        self.steps = 0

    def plan(self, request: PlanRequest) -> IterationPlan:
        allowed = {0: [1], 1: [1, 2]}.get(self.steps // 3, [1, 2, 4])
        self.steps += 1
        return random_plan(
            random.Random(self.steps), request.ids, request.sizes, request.world.restricted(allowed), (LAYERS,)
        )


class _Counts(pl.Callback):
    """After each step: own groups, groups that torch knows, threads of the process, its resident megabytes."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads = len(list(Path("/proc/self/task").iterdir()))
        created = trainer.strategy.groups.num_created  # type: ignore[attr-defined]
        if created == 2:
            handle = trainer.strategy.groups.of(0, 4).handle  # type: ignore[attr-defined]
            assert handle._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=99)
        self.rows.append((created, len(dist.distributed_c10d._world.pg_map), threads, pages * 4096 / 1e6))


def _fit_twice() -> list[Any]:
    case = Case(world_size=4, samples=8, batch=4, steps=100, lr=0.01, masked="none")
    asked: list[tuple[int, ...]] = []
    original = dist.new_group

    def spy(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and "timeout" in kwargs:  # ours; DeepSpeed makes its own, of all ranks
            asked.append(tuple(ranks))
        return original(ranks, *args, **kwargs)

    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", spy)
        for steps in (case.steps, 9):
            counts = _Counts()
            strategy = make_strategy(case, planner=_Widening(), timeout=timedelta(seconds=99))
            trainer = make_trainer(strategy, case, devices=4, callbacks=[counts], max_steps=steps)
            trainer.fit(Module(case), datamodule=Data(case))
            seen.append((counts.rows, len(dist.distributed_c10d._world.pg_map), strategy.groups.num_created))
    return [asked, *seen]


def test_a_size_is_made_when_a_plan_first_uses_it_and_gone_after_the_fit(pool: Pool) -> None:
    """Covers pytorch/pytorch#40400 and NVIDIA/nccl#964 over a hundred changing plans, and pytorch/pytorch#130102:
    every rank asks for the same groups in the same order.
    """
    results = pool.run(_fit_twice, 4, timeout=150.0)
    for asked, (rows, left, open_groups), (rows_again, left_again, _) in results:
        assert asked == [(0, 1), (2, 3), (0, 1, 2, 3)] * 2
        created = [row[0] for row in rows]
        # A plan is drawn from the allowed sizes, so the step that first uses a size may come a little later.
        assert created[:3] == [0, 0, 0]
        assert created == sorted(created)
        assert 1 in created[3:6]
        assert created[15:] == [2] * 85
        assert [row[1] - row[0] for row in rows] == [left] * 100, "groups that are not ours were made in the steps"
        assert len({row[2] for row in rows[20:]}) == 1, "threads"
        assert rows[-1][3] - rows[20][3] < 20.0, "megabytes"
        assert open_groups == 0
        assert left_again == left, "the groups of the second fit came on top"
        assert [row[2] for row in rows_again[:3]] == [rows[0][2]] * 3
