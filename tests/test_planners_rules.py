"""The rules that every planner's tests rest on must fail where a plan breaks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_dcp.cost import RecomputePolicy
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners import PlanRequest, Static
from tests.planning_tools import COST, check, request, texts


def packed_row(asked: PlanRequest, members: tuple[int, ...], sp_size: int = 1, **changes: Any) -> MicroBatch:
    lengths = [asked.sizes[i][0] for i in members]
    recompute = changes.pop("recompute", (1,))
    nanoseconds, size = COST.packed_row(sp_size, lengths, recompute)
    row = MicroBatch(
        sample_ids=tuple(asked.ids[i] for i in members),
        shapes=tuple(asked.sizes[i] for i in members),
        padded_shape=(max(-(-sum(lengths) // sp_size), 2 if sp_size > 1 else 1) * sp_size,),
        packed=True,
        first_rank=0,
        sp_size=sp_size,
        recompute=recompute,
        nanoseconds=nanoseconds,
        bytes=size,
    )
    return replace(row, **changes)


def test_packed_rows() -> None:
    asked = request(texts(5, 70, 300), 2, packing=True)
    first, second = packed_row(asked, (0, 2), 2), packed_row(asked, (1,), first_rank=1)
    good = IterationPlan(world_size=2, micro_batches=(first, second), lower_bound=1)
    check(good, asked)
    assert first.padded_shape == (306,)
    for wrong in (
        replace(first, nanoseconds=first.nanoseconds - 1),
        replace(first, bytes=first.bytes + 1),
        replace(first, padded_shape=(308,)),
    ):
        with pytest.raises(AssertionError):
            check(replace(good, micro_batches=(wrong, second)), asked)
    for limits in (
        {"packing": False},
        {"max_tokens": 152},
        {"max_batch_size": 1},
        {"memory_bytes": first.bytes - 1},
    ):
        with pytest.raises(AssertionError):
            check(good, replace(asked, limits=replace(asked.limits, **limits)))
    check(good, replace(asked, limits=replace(asked.limits, max_tokens=153, max_batch_size=2)))


def test_recompute_policy_is_kept() -> None:
    asked = request(texts(100), 1, packing=True)
    plan = IterationPlan(world_size=1, micro_batches=(packed_row(asked, (0,)),), lower_bound=1)
    check(plan, asked)
    policies: tuple[RecomputePolicy, ...] = ("none", "full")
    for policy in policies:
        with pytest.raises(AssertionError):
            check(plan, replace(asked, limits=replace(asked.limits, recompute=policy)))


def test_every_sample_once_or_the_first_at_least() -> None:
    asked = request(texts(50, 60, 70), 2)
    plan = Static().plan(asked)
    check(plan, asked)
    check(plan, asked, drawn=True)
    held = {m.shapes[0][0]: m for m in plan.micro_batches}
    some = replace(plan, micro_batches=(held[50], held[70]), lower_bound=0)
    check(some, asked, drawn=True)
    for wrong, drawn in (
        (some, False),
        (replace(plan, lower_bound=0), False),
        (replace(some, micro_batches=(held[60], held[70])), True),
        (replace(some, micro_batches=(held[50], replace(held[70], sample_ids=(99,)))), True),
    ):
        with pytest.raises(AssertionError):
            check(wrong, asked, drawn=drawn)


def test_makespan_in_lockstep() -> None:
    asked = request(texts(50, 600, 700), 2)
    plan = replace(Static().plan(asked), lockstep=True)
    check(plan, asked)
    assert plan.makespan > replace(plan, lockstep=False).makespan
    object.__setattr__(plan, "makespan", plan.makespan + 1)
    with pytest.raises(AssertionError):
        check(plan, asked)
