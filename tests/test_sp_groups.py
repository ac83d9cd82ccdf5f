"""Process groups: few, created once in one order, with exactly the ranks that were asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dcp.plan import PlanError
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.topology import laminar_blocks
from tests.pool import Pool


def _create_and_use() -> tuple[int, int, list[tuple[int, ...]]]:
    world_size = dist.get_world_size()
    blocks = laminar_blocks(world_size, range(1, world_size + 1), world_size)
    groups = ProcessGroups([*blocks, *blocks])
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
    return groups.num_created, len(dist.distributed_c10d._world.pg_map) - 1, members


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


def _all_ranks_create_all(bound: bool) -> list[tuple[int, ...]]:
    asked: list[tuple[int, ...]] = []
    original = dist.new_group

    def spy(ranks: list[int], **kwargs: object) -> object:
        asked.append(tuple(ranks))
        assert kwargs["use_local_synchronization"] is not bound
        # gloo cannot be bound to a device: where it pretends to be, only what was asked for counts.
        return dist.group.WORLD if bound else original(ranks, **kwargs)  # type: ignore[arg-type]

    if bound:
        dist.group.WORLD.bound_device_id = torch.device("cpu", 0)  # type: ignore[union-attr]
    dist.new_group = spy  # type: ignore[assignment]
    try:
        ProcessGroups(laminar_blocks(4, (1, 2, 4), 4))
    finally:
        dist.new_group = original
    return asked


@pytest.mark.parametrize("bound", [False, True])
def test_every_rank_asks_for_all_groups_in_one_order(pool: Pool, bound: bool) -> None:
    """Covers pytorch/pytorch#130102: creation by members alone hangs where the backend needs every rank."""
    asked = pool.run(_all_ranks_create_all, 4, bound)
    assert asked == [[(0, 1, 2, 3), (0, 1), (2, 3)]] * 4


def _refusals() -> list[str]:
    groups = ProcessGroups([(0, 2)])
    messages = []
    for call in (
        lambda: groups.of(1, 2),
        lambda: ProcessGroups([(1, 2)]),
        lambda: groups.of(1 - dist.get_rank(), 1),
    ):
        with pytest.raises(PlanError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_unknown_group_is_refused(pool: Pool) -> None:
    for rank, (foreign, outside, single) in enumerate(pool.run(_refusals, 2)):
        own = "0..0, 0..1" if rank == 0 else "0..1, 1..1"
        assert foreign == f"rank {rank} is in no group 1..2; its groups are {own}"
        assert "leaves the world of 2 ranks" in outside
        assert f"rank {rank} is in no group" in single


def test_one_process_needs_no_torch_distributed() -> None:
    groups = ProcessGroups([(0, 1)])
    assert groups.of(0, 1).handle is None
    assert groups.num_created == 0
    with pytest.raises(RuntimeError, match="init_process_group"):
        ProcessGroups([(0, 2)])
