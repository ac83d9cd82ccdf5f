"""The pool itself: a hang or an error in one rank must surface, and nothing may leak into the next call."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RemoteError


def _sum_of_ranks() -> float:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return float(value)


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def _hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_every_world_size(pool: Pool, world_size: int) -> None:
    assert pool.run(_sum_of_ranks, world_size) == [world_size * (world_size - 1) / 2] * world_size


def test_error_names_the_rank_and_the_pool_recovers(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="broken on purpose") as caught:
        pool.run(_fail_on_rank_one, 2)
    assert 1 in caught.value.tracebacks
    assert pool.run(_sum_of_ranks, 2) == [1.0, 1.0]


def test_hang_is_killed(pool: Pool) -> None:
    with pytest.raises(TimeoutError, match="gave no answer"):
        pool.run(_hang_on_rank_one, 2, timeout=2.0)
    assert pool.run(_sum_of_ranks, 2) == [1.0, 1.0]
