"""Plans as values: rules, JSON both ways, digest, order of a rank."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dcp.plan import IterationPlan, MicroBatch, PlanError, read_json
from lightning_dcp.topology import World
from tests.synthetic import random_plan

ROOT = Path(__file__).parent.parent


def micro_batch(**changes: Any) -> MicroBatch:
    values: dict[str, Any] = {
        "sample_ids": (4, 7),
        "shapes": ((5,), (8,)),
        "padded_shape": (8,),
        "first_rank": 0,
        "sp_size": 2,
        "recompute": (1,),
        "nanoseconds": 100,
        "bytes": 1000,
    }
    return MicroBatch(**{**values, **changes})


def two_groups() -> IterationPlan:
    return IterationPlan(
        world_size=4,
        micro_batches=(
            micro_batch(sample_ids=(1,), shapes=((3,),), sp_size=1, first_rank=1, nanoseconds=7),
            micro_batch(),
            micro_batch(sample_ids=(2,), shapes=((3,),), sp_size=1, first_rank=1, nanoseconds=5),
            micro_batch(sample_ids=(3,), shapes=((4,),), sp_size=4, nanoseconds=50),
        ),
        lower_bound=100,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_ids": (4, True)}, "sample_ids holds True"),
        ({"sample_ids": (4, -1)}, "sample_ids holds -1"),
        ({"sample_ids": (4, 7.0)}, "sample_ids holds 7.0"),
        ({"sample_ids": [4, 7]}, "must be a tuple"),
        ({"sample_ids": ()}, "0 sample ids and 2 shapes"),
        ({"sample_ids": (4,)}, "1 sample ids and 2 shapes"),
        ({"shapes": [(5,), (8,)]}, "shapes is list"),
        ({"shapes": ((5,), (8, 1))}, "number of axes"),
        ({"shapes": ((5,), (0,))}, "shapes holds 0"),
        ({"shapes": ((5,), (9,))}, "do not fit"),
        ({"shapes": ((), ()), "padded_shape": ()}, "multiple of sp_size"),
        ({"padded_shape": (9,)}, "multiple of sp_size 2"),
        ({"packed": True}, "do not fit"),
        ({"packed": 1}, "packed is 1"),
        ({"sp_size": 0}, "sp_size holds 0"),
        ({"first_rank": -1}, "first_rank holds -1"),
        ({"recompute": (1.0,)}, "recompute holds 1.0"),
        ({"nanoseconds": 2**62}, "nanoseconds holds"),
        ({"bytes": -5}, "bytes holds -5"),
    ],
)
def test_micro_batch_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        micro_batch(**changes)


def test_micro_batch_counts() -> None:
    two_axes = micro_batch(shapes=((2, 3), (4, 1)), padded_shape=(4, 3))
    assert (two_axes.batch_size, two_axes.num_tokens, two_axes.padded_tokens) == (2, 10, 24)
    packed = micro_batch(packed=True, padded_shape=(14,))
    assert (packed.num_tokens, packed.padded_tokens, packed.ranks) == (13, 14, range(0, 2))
    with pytest.raises(PlanError, match="do not fit"):
        micro_batch(packed=True, shapes=((2, 3), (4, 1)), padded_shape=(6, 2))


def test_a_rank_runs_outer_groups_first_and_equal_groups_in_plan_order() -> None:
    plan = two_groups()
    assert [m.sample_ids for m in plan.of_rank(1)] == [(3,), (4, 7), (1,), (2,)]
    assert [m.sample_ids for m in plan.of_rank(3)] == [(3,)]
    assert plan.busy().tolist() == [150, 162, 50, 50]
    for rank in (-1, 4):
        with pytest.raises(PlanError, match="not in the world"):
            plan.of_rank(rank)


def test_no_rank_waits_inside_a_group_in_planned_time() -> None:
    world = World.build(6, (1, 2, 3, 6))
    for seed in range(50):
        rng = random.Random(seed)
        plan = random_plan(rng, range(12), [(rng.randint(1, 40),) for _ in range(12)], world)
        clock = [0] * 6
        pending = [list(plan.of_rank(rank)) for rank in range(6)]
        while any(pending):
            ready = next(q[0] for q in pending if q and all(pending[r][:1] == [q[0]] for r in q[0].ranks))
            assert len({clock[rank] for rank in ready.ranks}) == 1
            for rank in ready.ranks:
                clock[rank] += pending[rank].pop(0).nanoseconds
        assert clock == plan.busy().tolist()


def test_ratios_by_hand() -> None:
    plan = two_groups()
    assert plan.makespan == 162
    assert plan.gap == pytest.approx(0.62)
    assert plan.num_samples == 5
    assert plan.num_tokens == 13 + 3 + 3 + 4
    assert plan.padding_ratio == pytest.approx(1 - 23 / (16 + 8 + 8 + 8))
    assert replace(plan, lower_bound=0).gap == float("inf")
    empty = IterationPlan(world_size=2, micro_batches=())
    assert (empty.makespan, empty.idle_ratio, empty.padding_ratio) == (0, 0.0, 0.0)


def test_idle_time_of_a_group_counts_once_for_each_of_its_ranks() -> None:
    """Eq. 3 as printed counts each batch once; the text's idle time is that of GPUs, ``p_i`` for a group."""
    plan = IterationPlan(
        world_size=4,
        micro_batches=(
            micro_batch(sample_ids=(0,), shapes=((8,),), sp_size=2, nanoseconds=30),
            micro_batch(sample_ids=(1,), shapes=((8,),), first_rank=2, sp_size=1, nanoseconds=100),
            micro_batch(sample_ids=(2,), shapes=((8,),), first_rank=3, sp_size=1, nanoseconds=80),
        ),
    )
    as_printed = ((100 - 30) + (100 - 100) + (100 - 80)) / (4 * 100)
    weighted = (2 * (100 - 30) + (100 - 100) + (100 - 80)) / (4 * 100)
    assert plan.idle_ratio == pytest.approx(weighted)
    assert plan.idle_ratio != pytest.approx(as_printed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 3}, "leaves the world of 3"),
        ({"world_size": 0}, "world_size holds 0"),
        ({"world_size": True}, "world_size holds True"),
        ({"world_size": 2**40}, "allowed are up to"),
        ({"lower_bound": 163}, "lies above the makespan"),
        ({"lower_bound": -1}, "lower_bound holds -1"),
        ({"micro_batches": []}, "micro_batches is list"),
        ({"micro_batches": (micro_batch(), micro_batch(first_rank=2))}, r"samples \[4, 7\] stand in more"),
        ({"micro_batches": (micro_batch(sample_ids=(3, 3)),)}, r"samples \[3\] stand in more"),
        (
            {"micro_batches": (micro_batch(), micro_batch(sample_ids=(1, 2), first_rank=1))},
            r"groups 0\.\.1 and 1\.\.2 overlap",
        ),
        (
            {
                "micro_batches": (
                    micro_batch(),
                    micro_batch(sample_ids=(1,), shapes=((1, 2),), padded_shape=(2, 2)),
                )
            },
            "shapes of .1, 2. axes",
        ),
        (
            {"micro_batches": (micro_batch(nanoseconds=2**61), micro_batch(sample_ids=(1, 2), nanoseconds=2**61))},
            "less than 2",
        ),
    ],
)
def test_plan_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(two_groups(), **changes)


@pytest.mark.parametrize("axes", [1, 2])
def test_json_both_ways(axes: int) -> None:
    world = World.build(6, (1, 2, 3, 6))
    for seed in range(20):
        rng = random.Random(seed)
        shapes = [tuple(rng.randint(1, 30) for _ in range(axes)) for _ in range(9)]
        plan = random_plan(rng, rng.sample(range(1000), 9), shapes, world, (4, 2))
        again = IterationPlan.from_json(plan.to_json())
        assert again == plan
        assert again.digest() == plan.digest()
        assert "\n" not in plan.to_json()


def edited(path: tuple[Any, ...], value: Any) -> str:
    content = json.loads(two_groups().to_json())
    node = content
    for key in path[:-1]:
        node = node[key]
    if value is KeyError:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return json.dumps(content)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


ROW = ("micro_batches", 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        '"lightning_dcp.plan"',
        '{"format": "lightning_dcp.plan"}',
        '{"format": "lightning_dcp.profile"}',
        "[" * 100_000,
        '{"format":"lightning_dcp.plan","world_size":' + "1" * 5000 + ',"lower_bound":0,"micro_batches":[]}',
        '{"format":"lightning_dcp.plan","world_size":1,"world_size":2,"lower_bound":0,"micro_batches":[]}',
        edited(("world_size",), KeyError),
        edited(("world_size",), "4"),
        edited(("world_size",), 4.0),
        edited(("world_size",), True),
        edited(("world_size",), None),
        edited(("world_size",), float("nan")),
        edited(("world_size",), float("inf")),
        edited(("world_size",), 2**61),
        edited(("world_size",), -4),
        edited(("lower_bound",), 10**6),
        edited(("makespan",), 162),
        edited(("micro_batches",), {}),
        edited(("micro_batches",), [1]),
        edited(("micro_batches",), [None]),
        edited(("micro_batches",), "abc"),
        edited((*ROW, "sample_ids"), KeyError),
        edited((*ROW, "sample_ids"), 4),
        edited((*ROW, "sample_ids"), "47"),
        edited((*ROW, "sample_ids"), {"0": 4}),
        edited((*ROW, "sample_ids"), [4, True]),
        edited((*ROW, "sample_ids"), [4, 4]),
        edited((*ROW, "sample_ids"), [4, [7]]),
        edited((*ROW, "sample_ids"), [4, 1]),
        edited((*ROW, "shapes"), [5, 8]),
        edited((*ROW, "shapes"), [[5], [-8]]),
        edited((*ROW, "shapes"), nested(900)),
        edited((*ROW, "padded_shape"), [8.0]),
        edited((*ROW, "first_rank"), 3),
        edited((*ROW, "sp_size"), 10**30),
        edited((*ROW, "packed"), 0),
        edited((*ROW, "nanoseconds"), 1e30),
        edited((*ROW, "recompute"), None),
        edited((*ROW, "colour"), "red"),
    ],
)
def test_foreign_or_damaged_json_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        IterationPlan.from_json(text)


def test_deep_nesting_is_refused_at_every_depth_and_at_a_deep_stack() -> None:
    def deeper(levels: int, text: str) -> None:
        if levels:
            deeper(levels - 1, text)
        else:
            IterationPlan.from_json(text)

    for depth in (9, 50, 300, 600, 900):
        text = edited((*ROW, "recompute"), nested(depth))
        for levels in (0, 300):
            with pytest.raises(PlanError):
                deeper(levels, text)


def test_many_repeated_samples_are_refused_in_linear_time() -> None:
    rows = tuple(micro_batch(sample_ids=(i, i), nanoseconds=1) for i in range(20_000))
    with pytest.raises(PlanError, match=r"samples \[0, 1, 2, 3, 4\]"):
        IterationPlan(world_size=2, micro_batches=rows)


def test_read_json_gives_the_content() -> None:
    assert read_json('{"format": "a", "x": [1]}', "a", ("x",)) == {"format": "a", "x": [1]}


def test_digest_changes_with_every_field() -> None:
    plan = two_groups()
    changes: dict[str, Any] = {
        "sample_ids": (4, 8),
        "shapes": ((6,), (8,)),
        "padded_shape": (10,),
        "packed": True,
        "first_rank": 2,
        "sp_size": 1,
        "recompute": (2,),
        "nanoseconds": 101,
        "bytes": 1001,
    }
    assert set(changes) == {f.name for f in fields(MicroBatch)}
    digests = {plan.digest()}
    for name, value in changes.items():
        change = {name: value, **({"padded_shape": (14,)} if name == "packed" else {})}
        rows = list(plan.micro_batches)
        rows[1] = replace(rows[1], **change)
        digests.add(replace(plan, micro_batches=tuple(rows)).digest())
    digests.add(replace(plan, world_size=5).digest())
    digests.add(replace(plan, lower_bound=99).digest())
    digests.add(replace(plan, micro_batches=plan.micro_batches[::-1]).digest())
    digests.add(replace(plan, micro_batches=plan.micro_batches[:-1]).digest())
    digests.add(replace(plan, micro_batches=tuple(replace(m, recompute=()) for m in plan.micro_batches)).digest())
    assert len(digests) == 1 + len(changes) + 5
    assert all(0 <= digest < 2**40 and int(float(digest)) == digest for digest in digests)


def test_the_same_numbers_in_other_fields_have_another_digest() -> None:
    """Two samples of one axis and one sample of two axes: both are the numbers 1, 3, 3, 3, 3 and the scalars."""
    two = micro_batch(sample_ids=(1, 3), shapes=((3,), (3,)), padded_shape=(3,), first_rank=0, sp_size=1)
    pair = micro_batch(sample_ids=(1,), shapes=((3, 3),), padded_shape=(3, 3), first_rank=0, sp_size=1)
    digests = {IterationPlan(world_size=1, micro_batches=(m,)).digest() for m in (two, pair)}
    assert len(digests) == 2


def test_digest_is_the_same_in_other_processes_and_hash_seeds() -> None:
    code = "from tests.test_plan import two_groups; print(two_groups().digest())"
    found = set()
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        found.add(int(done.stdout))
    assert found == {two_groups().digest()}


# Lockstep


def in_lockstep(*rows: tuple[int, int, int], world_size: int = 4) -> IterationPlan:
    """A plan of ``(first rank, p, nanoseconds)``."""
    made = tuple(
        MicroBatch(
            sample_ids=(i,), shapes=((8,),), padded_shape=(8,), first_rank=a, sp_size=p, nanoseconds=t, bytes=0
        )
        for i, (a, p, t) in enumerate(rows)
    )
    return IterationPlan(world_size=world_size, micro_batches=made, lockstep=True)


def test_in_lockstep_each_round_lasts_as_long_as_its_longest_micro_batch() -> None:
    plan = in_lockstep((0, 1, 5), (0, 1, 9), (1, 1, 7), (2, 2, 6), (2, 1, 1))
    assert plan.rounds() == [7, 9]
    assert plan.makespan == 16
    assert replace(plan, lockstep=False).makespan == 14
    assert plan.idle_ratio == pytest.approx(1 - (5 + 9 + 7 + 2 * 6 + 1) / (4 * 16))


def test_a_group_is_in_the_same_round_on_all_of_its_ranks() -> None:
    """Whatever the plan order: what runs before it belongs to wider groups or to the same one."""
    rng = random.Random(0)
    for _ in range(50):
        world = World.build(8, (1, 2, 4, 8))
        rows = [(*rng.choice(world.blocks), rng.randint(1, 9)) for _ in range(rng.randint(1, 12))]
        plan = in_lockstep(*rows, world_size=8)
        number: dict[tuple[int, ...], set[int]] = {}
        for rank in range(8):
            for k, m in enumerate(plan.of_rank(rank)):
                number.setdefault(m.sample_ids, set()).add(k)
        assert all(len(found) == 1 for found in number.values())
        queues = [plan.of_rank(rank) for rank in range(8)]
        depth = max(map(len, queues))
        expected = [max(q[k].nanoseconds for q in queues if k < len(q)) for k in range(depth)]
        assert plan.rounds() == expected


def test_lockstep_travels_with_the_plan() -> None:
    plan = in_lockstep((0, 1, 5), (1, 1, 7))
    assert IterationPlan.from_json(plan.to_json()) == plan
    assert plan.digest() != replace(plan, lockstep=False).digest()
    with pytest.raises(PlanError, match="lockstep is 1; it must be True or False"):
        replace(plan, lockstep=1)  # type: ignore[arg-type]
