"""Legal sequence-parallel sizes and the laminar family of groups."""

from __future__ import annotations

import pytest

from lightning_dcp.topology import Block, World, laminar_blocks, legal_sp_sizes, nested_sizes

WORLDS = (1, 2, 3, 5, 6, 7, 8, 12, 24)


def ranks(block: Block) -> set[int]:
    return set(range(block[0], block[0] + block[1]))


def maximal(blocks: tuple[Block, ...]) -> list[Block]:
    return [a for a in blocks if not any(ranks(a) < ranks(b) for b in blocks)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (1, 2, 3, 6, 12), (1, 3), (1, 2, 3, 4, 5, 7)])
def test_groups_are_exact_laminar_and_partition_the_world(world_size: int, sizes: tuple[int, ...]) -> None:
    """NVIDIA/Megatron-LM#5679: on 6 ranks the last block had size 2 and was filed under size 4."""
    fitting = [p for p in sizes if p <= world_size]
    world = World.build(world_size, fitting)
    assert world.sp_sizes[0] == 1
    assert set(world.sp_sizes) <= set(fitting)
    for p in world.sp_sizes:
        groups = world.blocks_of(p)
        assert all(size == p and first + size <= world_size for first, size in groups)
        assert len(set().union(*map(ranks, groups))) == p * len(groups), "groups of one size share a rank"
    for a in world.blocks:
        for b in world.blocks:
            both = ranks(a) & ranks(b)
            assert not both or both in (ranks(a), ranks(b)), f"{a} and {b} overlap"
    assert sum(size for _, size in maximal(world.blocks)) == world_size
    assert [first for first, _ in world.blocks_of(1)] == list(range(world_size))
    assert len(set(world.blocks)) == len(world.blocks) <= 2 * world_size - 1


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16, 64])
def test_powers_of_two_give_aligned_blocks_and_at_most_two_w_minus_one(world_size: int) -> None:
    """NVIDIA/nccl#964: each group costs device memory, so the family must stay small."""
    sizes = [p for p in (1, 2, 4, 8, 16, 32, 64) if p <= world_size]
    blocks = World.build(world_size, sizes).blocks
    assert len(blocks) == 2 * world_size - 1
    assert all(first % size == 0 for first, size in blocks)


def test_six_ranks_by_hand() -> None:
    assert laminar_blocks(6, (1, 2, 4), 6) == (
        *((0, 4),),
        *((0, 2), (2, 2), (4, 2)),
        *((rank, 1) for rank in range(6)),
    )


def test_groups_up_to_the_node_stay_inside_it() -> None:
    world = World.build(24, (1, 2, 4, 8, 16, 24), ranks_per_node=8)
    for first, size in world.blocks:
        if size <= 8:
            assert first // 8 == (first + size - 1) // 8
        else:
            assert first % 8 == 0
            assert size % 8 == 0
    assert world.blocks_of(24) == ((0, 24),)
    assert world.blocks_of(16) == ((0, 16),)
    assert len(world.blocks_of(8)) == 3


def test_nodes_of_six_and_a_partial_last_node() -> None:
    world = World.build(14, (1, 4, 12), ranks_per_node=6)
    assert world.blocks_of(12) == ((0, 12),)
    assert world.blocks_of(4) == ((0, 4), (6, 4))
    # 8 ranks are no whole number of nodes of 6, so such a group cannot exist.
    assert World.build(14, (1, 8), ranks_per_node=6).sp_sizes == (1,)


def test_more_ranks_per_node_than_ranks_is_one_node() -> None:
    assert World.build(2, (1, 2), ranks_per_node=8) == World.build(2, (1, 2))


@pytest.mark.parametrize(
    ("world_size", "sizes", "per_node"), [(4, (0,), 4), (4, (8,), 4), (4, (-1,), 4), (0, (), 1), (4, (2,), 0)]
)
def test_impossible_worlds_are_refused(world_size: int, sizes: tuple[int, ...], per_node: int) -> None:
    with pytest.raises(ValueError, match="do not fit a world"):
        laminar_blocks(world_size, sizes, per_node)
    with pytest.raises(ValueError, match="do not fit a world"):
        World.build(world_size, sizes, ranks_per_node=per_node)


@pytest.mark.parametrize(
    ("world_size", "heads", "kv_heads", "legal"),
    [
        (16, 40, 8, (1, 2, 4, 8)),
        (4, 7, None, (1,)),
        (7, 7, None, (1, 7)),
        (8, 20, None, (1, 2, 4, 5)),
        (8, 8, 1, (1, 2, 4, 8)),
        (8, 8, 2, (1, 2, 4, 8)),
        (12, 12, 3, (1, 3, 6, 12)),
        (4, 64, 64, (1, 2, 4)),
        (1, 5, 5, (1,)),
    ],
)
def test_legal_sizes(world_size: int, heads: int, kv_heads: int | None, legal: tuple[int, ...]) -> None:
    """verl-project/verl#1226 (40 and 8 heads on 16 ranks), deepspeedai/DeepSpeed#6392 (7 heads, 20 heads)."""
    assert legal_sp_sizes(world_size, heads, kv_heads) == legal


@pytest.mark.parametrize("counts", [(0, 8, 8), (4, 0, None), (4, 8, 0)])
def test_counts_below_one_are_refused(counts: tuple[int, int, int | None]) -> None:
    with pytest.raises(ValueError, match="each must be at least 1"):
        legal_sp_sizes(*counts)


@pytest.mark.parametrize(
    ("sizes", "nested"),
    [
        ((1, 2, 3, 4, 6, 8, 12), (1, 2, 4, 8)),
        ((1, 2, 3, 4), (1, 2, 4)),
        ((3, 9, 2), (1, 3, 9)),
        ((5, 7), (1, 5)),
        ((), (1,)),
        (range(1, 49), (1, 2, 4, 8, 16, 32)),
        ((2, 6, 3, 18), (1, 2, 6, 18)),
    ],
)
def test_nested_sizes_divide_one_another(sizes: tuple[int, ...], nested: tuple[int, ...]) -> None:
    assert nested_sizes(sizes) == nested


def test_nested_sizes_keep_all_groups_of_a_size() -> None:
    world = World.build(4, nested_sizes((1, 2, 3, 4)))
    assert len(world.blocks_of(2)) == 2
    assert len(World.build(4, (1, 2, 3, 4)).blocks_of(2)) == 1, "what nested sizes are for"
