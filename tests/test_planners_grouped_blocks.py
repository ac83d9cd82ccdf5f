"""Ranks are handed out as disjoint blocks of the world, and wide blocks stay free as long as they can."""

from __future__ import annotations

import random

import pytest

from lightning_dcp.planners.grouped.blocks import FreeBlocks
from lightning_dcp.topology import World

SIZES = (1, 2, 3, 4, 6, 8, 12)


@pytest.mark.parametrize("world_size", [*range(1, 9), 12, 24])
def test_blocks_are_disjoint_and_of_the_world_until_no_rank_is_left(world_size: int) -> None:
    world = World.build(world_size, [p for p in SIZES if p <= world_size], min(8, world_size))
    rng = random.Random(world_size)
    for _ in range(20):
        free, taken = FreeBlocks(world), set[int]()
        while free.ranks:
            possible = [p for p in world.sp_sizes if free.has(p)]
            p = rng.choice(possible)
            first = free.take(p)
            ranks = set(range(first, first + p))
            assert (first, p) in world.blocks
            assert not taken & ranks
            taken |= ranks
            assert free.ranks == world_size - len(taken)
            wanted = {size for start, size in world.blocks if not taken & set(range(start, start + size))}
            assert {size for size in world.sp_sizes if free.has(size)} == wanted
        assert taken == set(range(world_size))


def test_small_groups_leave_wide_ones_whole() -> None:
    world = World.build(16, (1, 2, 4, 8, 16), 8)
    free = FreeBlocks(world)
    for p in (1, 2, 1, 4):
        assert free.take(p) < 8
    assert free.take(8) == 8
    assert free.ranks == 0


@pytest.mark.parametrize("per_node", [8, 16])
def test_any_order_of_powers_of_two_that_add_up_fits_when_it_falls(per_node: int) -> None:
    world = World.build(16, (1, 2, 4, 8, 16), per_node)
    free = FreeBlocks(world)
    assert [free.take(p) for p in (8, 4, 2, 1, 1)] == [0, 8, 12, 14, 15]


def test_a_size_that_is_not_free_is_refused() -> None:
    free = FreeBlocks(World.build(4, (1, 2, 4)))
    free.take(2)
    assert not free.has(4)
    with pytest.raises(ValueError, match="no block of 4 ranks is free"):
        free.take(4)


def test_sizes_that_crowd_each_other_out() -> None:
    # Sizes 1, 2, 3 on four ranks: {0-2}, {3}; the only pair lies inside the three.
    free = FreeBlocks(World.build(4, (1, 2, 3)))
    assert free.take(1) == 3
    assert free.take(2) == 0
    assert not free.has(3)
    assert free.take(1) == 2
