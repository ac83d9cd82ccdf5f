"""Who evaluates what: each sample once, every rank equally many items, groups disjoint in every round."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lightning_dcp.cost import CostModel
from lightning_dcp.data.evaluation.rounds import (
    Assignment,
    MemoryRule,
    Piece,
    dealt,
    even,
    mixed,
    of_rank,
    rounds_of,
)
from lightning_dcp.topology import World
from tests.synthetic import analytic_profile

SHAPES = ((1,), (8,), (64,), (256,))


def rule_of(memory: int, exact_shapes: bool = False) -> MemoryRule:
    profile = replace(analytic_profile((1, 2, 4), (3,), shapes=SHAPES), static_bytes=0)
    return MemoryRule(cost=CostModel(profile), memory_bytes=memory, exact_shapes=exact_shapes)


def need(rule: MemoryRule, batch_size: int, tokens: int, sp_size: int) -> int:
    return rule.cost.bytes(batch_size, (tokens,), sp_size, (3,))


def counted(own: list[list[Assignment]]) -> Counter[int]:
    """How often each sample counts, over all ranks; members of one group count once together."""
    groups = {(number, a.first_rank, a.ids) for items in own for number, a in enumerate(items) if not a.is_copy}
    return Counter(i for _, _, ids in groups for i in ids)


def test_each_sample_once_and_no_rank_idle_without_need() -> None:
    """pytorch/torchtitan#1618: every rank has equally many items."""
    for world_size in (1, 2, 3, 4, 6):
        for batch_size in (1, 2, 5):
            for size in range(1, 40):
                own = [even(range(size), batch_size, world_size, rank) for rank in range(world_size)]
                assert len({len(items) for items in own}) == 1
                assert counted(own) == Counter(range(size))
                assert all(len(a.ids) <= batch_size for items in own for a in items)
                last = [items[-1] for items in own]
                left = size - batch_size * world_size * (len(own[0]) - 1)
                assert sum(not a.is_copy for a in last) == min(left, world_size)
                assert not any(a.is_copy for items in own for a in items[:-1])
                assert [own[0][0].ids[0], own[0][0].is_copy] == [0, False]


def test_whole_rounds_are_in_the_order_of_the_dataset() -> None:
    own = [even(range(9), 2, 2, rank) for rank in range(2)]
    assert [[a.ids for a in items] for items in own] == [[(0, 1), (4, 5), (8,)], [(2, 3), (6, 7), (8,)]]
    assert own[1][-1].is_copy


def test_batches_of_a_batch_sampler_stay_whole() -> None:
    batches = [[5, 1], [2], [0, 3, 4]]
    own = [dealt(batches, 2, rank) for rank in range(2)]
    assert [[a.ids for a in items] for items in own] == [[(5, 1), (0, 3, 4)], [(2,), (0, 3, 4)]]
    assert [a.is_copy for a in own[1]] == [False, True]


@pytest.mark.parametrize("world_size", [1, 2, 4, 6])
def test_groups_as_small_as_memory_allows_and_disjoint(world_size: int) -> None:
    sizes = [p for p in (1, 2, 4) if p <= world_size]
    world = World.build(world_size, sizes)
    generator = random.Random(world_size)
    for case in range(25):
        shapes = np.asarray([[generator.choice((3, 9, 40, 100, 250))] for _ in range(generator.randint(1, 30))])
        rule = rule_of(need(rule_of(0), 1, generator.choice((10, 60, 120)), 1))
        batch_size = generator.choice((1, 3))
        rounds = mixed(shapes, batch_size, world, rule)
        if rounds is None:
            assert need(rule, batch_size, int(shapes.max()), 1) <= rule.memory_bytes
            continue
        own = [of_rank(rounds, rank) for rank in range(world_size)]
        assert len({len(items) for items in own}) == 1, case
        assert counted(own) == Counter(range(len(shapes)))
        for number in range(len(own[0])):
            for rank, items in enumerate(own):
                a = items[number]
                assert (a.first_rank, a.sp_size) in world.blocks
                for member in range(a.first_rank, a.first_rank + a.sp_size):
                    assert own[member][number] == a, "the members of a group have different items"
                assert a.first_rank <= rank < a.first_rank + a.sp_size
        for a in {a for items in own for a in items if not a.is_copy}:
            longest = int(shapes[list(a.ids)].max())
            fits = [p for p in sizes if need(rule, 1, -(-longest // p) * p, p) <= rule.memory_bytes]
            assert a.sp_size == (fits[0] if fits else sizes[-1])
            padded = -(-max(longest, 2 * a.sp_size if a.sp_size > 1 else 1) // a.sp_size) * a.sp_size
            assert len(a.ids) == 1 or need(rule, len(a.ids), padded, a.sp_size) <= rule.memory_bytes


def test_batches_shrink_before_groups_grow() -> None:
    base = rule_of(0)
    rule = rule_of(need(base, 2, 64, 1))
    world = World.build(2, [1, 2])
    rounds = mixed(np.full((8, 1), 64), 4, world, rule)
    assert rounds is not None
    assert {(len(a.ids), a.sp_size) for a in of_rank(rounds, 0)} == {(2, 1)}


def test_equal_shapes_only_where_padding_changes_the_result() -> None:
    rule = rule_of(1 << 40, exact_shapes=True)
    rounds = mixed(np.asarray([[4], [4], [5], [5], [5]]), 2, World.build(1, [1]), rule)
    assert rounds is not None
    assert [a.ids for a in of_rank(rounds, 0)] == [(0, 1), (2, 3), (4,)]


def test_short_samples_fill_the_ranks_beside_long_ones() -> None:
    pieces = [Piece(ids=(0,), sp_size=2), Piece(ids=(1,)), Piece(ids=(2,), sp_size=2), Piece(ids=(3, 4, 5))]
    world = World.build(4, [1, 2, 4])
    rounds = rounds_of(pieces, world, Piece(ids=(1,)))
    assert len(rounds) == 2
    counted_ids = sorted(i for placed in rounds for a in placed if not a.is_copy for i in a.ids)
    assert counted_ids == list(range(6))
    for placed in rounds:
        assert sorted(r for a in placed for r in range(a.first_rank, a.first_rank + a.sp_size)) == [0, 1, 2, 3]
    assert not any(a.is_copy for a in rounds[0])
