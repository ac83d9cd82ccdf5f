"""The controls: fixed settings, and plans read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dcp.plan import IterationPlan, PlanError
from lightning_dcp.planners import Balanced, InfeasibleError, PlanRequest, Replay, Static
from lightning_dcp.topology import World
from tests.planning_tools import COST, COST_2D, MiB, check, request, texts

# Static


def test_micro_batches_follow_the_order_of_the_samples() -> None:
    asked = request(texts(50, 900, 60, 70, 80), 2)
    plan = Static(batch_size=2, deal="in_order").plan(asked)
    check(plan, asked)
    assert [m.sample_ids for m in plan.micro_batches] == [(10, 11), (12, 13), (14,)]
    assert [m.first_rank for m in plan.micro_batches] == [0, 1, 0]


def test_longest_first_on_the_rank_that_is_free_first() -> None:
    asked = request(texts(100, 2000, 700, 700, 700), 2)
    plan = Static().plan(asked)
    check(plan, asked)
    assert plan.of_rank(0)[0].shapes == ((2000,),)
    assert [m.shapes for m in plan.of_rank(1)] == [((700,),), ((700,),), ((700,),), ((100,),)]
    assert plan.makespan < Static(deal="in_order").plan(asked).makespan


def test_the_same_size_for_every_sample() -> None:
    asked = replace(request(texts(*range(100, 900, 100)), 4), world=World.build(4, (1, 2, 4)))
    plan = Static(sp_size=2, batch_size=2).plan(asked)
    check(plan, asked)
    assert {(m.sp_size, m.batch_size) for m in plan.micro_batches} == {(2, 2)}
    assert {m.first_rank for m in plan.micro_batches} == {0, 2}


def test_ranks_outside_every_group_take_part_alone() -> None:
    asked = request(texts(*[300] * 6), 3)
    plan = Static(sp_size=2).plan(asked)
    check(plan, asked)
    assert {(m.first_rank, m.sp_size) for m in plan.micro_batches} == {(0, 2), (2, 1)}
    in_order = Static(sp_size=2, deal="in_order").plan(asked)
    assert [m.first_rank for m in in_order.micro_batches] == [0, 2, 0, 2, 0, 2]


def test_what_does_not_fit_one_rank_goes_to_the_groups() -> None:
    memory = COST.bytes(1, (6000,), 1, (3,)) - 1
    asked = request(texts(6000, 40, 6000, 6000), 3, memory=memory)
    for planner in (Static(sp_size=2), Static(sp_size=2, deal="in_order")):
        plan = planner.plan(asked)
        check(plan, asked)
        assert {m.sp_size for m in plan.micro_batches if (6000,) in m.shapes} == {2}
        assert [m.shapes for m in plan.of_rank(2)] == [((40,),)]


def test_without_a_profile_of_one_rank_the_others_stay_idle() -> None:
    asked = replace(request(texts(300, 300), 3), cost=type(COST)(replace(COST.profile, measurements=_only(2))))
    plan = Static(sp_size=2).plan(asked)
    check(plan, asked)
    assert {m.first_rank for m in plan.micro_batches} == {0}


def _only(sp_size: int) -> tuple[Any, ...]:
    return tuple(m for m in COST.profile.measurements if m.sp_size == sp_size)


def test_a_micro_batch_over_a_limit_is_cut() -> None:
    lengths = texts(1000, 900, 800, 700, 600)
    memory = COST.bytes(2, (1000,), 1, (3,))
    asked = request(lengths, 1, memory=memory)
    plan = Static(batch_size=5).plan(asked)
    check(plan, asked)
    assert [m.sample_ids for m in plan.micro_batches if m.batch_size > 1]
    assert max(m.batch_size for m in plan.micro_batches) < 5
    by_tokens = request(lengths, 1, max_tokens=2000)
    check(Static(batch_size=5).plan(by_tokens), by_tokens)
    by_count = request(lengths, 1, max_batch_size=2)
    assert max(m.batch_size for m in Static(batch_size=5).plan(by_count).micro_batches) == 2


def test_exact_shapes_keep_different_shapes_apart() -> None:
    shapes = [(4, 8), (8, 4), (4, 8), (8, 4), (4, 8)]
    asked = request(shapes, 1, cost=COST_2D, exact_shapes=True)
    plan = Static(batch_size=2).plan(asked)
    check(plan, asked)
    assert sorted(m.batch_size for m in plan.micro_batches) == [1, 2, 2]


def test_infeasible_is_about_the_fixed_size() -> None:
    memory = COST.bytes(1, (6000,), 1, (3,)) - 1
    asked = request(texts(40, 6000), 4, memory=memory)
    with pytest.raises(InfeasibleError, match=rf"sample 11 .*at least {memory + 1} bytes per rank \(sp_size 1"):
        Static(batch_size=2).plan(asked)
    check(Static(sp_size=2, batch_size=2).plan(asked), asked)


@pytest.mark.parametrize(("sp_size", "batch_size"), [(0, 1), (1, 0), (1, -3)])
def test_sizes_below_one_are_refused(sp_size: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="allowed are integers from 1"):
        Static(sp_size=sp_size, batch_size=batch_size)


def test_unknown_deal_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed are 'longest_first' and 'in_order'"):
        Static(deal="random")  # type: ignore[arg-type]


# Replay


def saved(path: Path, *plans: IterationPlan) -> Replay:
    path.write_text("\n\n".join(plan.to_json() for plan in plans) + "\n", encoding="utf-8")
    return Replay(path)


def later(asked: PlanRequest) -> PlanRequest:
    return replace(asked, sample_ids=asked.sample_ids + 100)


def test_replay_gives_the_saved_plan_of_the_same_samples(tmp_path: Path) -> None:
    asked = request(texts(*range(100, 2100, 100)), 4)
    plans = [Balanced().plan(asked), Static(sp_size=2).plan(later(asked))]
    replay = saved(tmp_path / "plans.jsonl", *plans, plans[0])
    assert replay.plan(asked) == plans[0]
    assert replay.plan(later(asked)) == plans[1]
    mixed = replace(asked, sample_ids=asked.sample_ids[::-1], shapes=asked.shapes[::-1])
    assert replay.plan(mixed) == plans[0]


def test_replay_refuses_other_samples_and_names_them(tmp_path: Path) -> None:
    asked = request(texts(100, 200, 300), 2)
    replay = saved(tmp_path / "plans.jsonl", Balanced().plan(asked))
    with pytest.raises(PlanError, match=r"the step's samples \[110, 111, 112\]: it ends after one plan") as past:
        replay.plan(later(asked))
    assert "comes after the saved ones" in str(past.value)
    assert "max_steps=1" in str(past.value)
    fewer = replace(asked, sample_ids=asked.sample_ids[:2], shapes=asked.shapes[:2])
    with pytest.raises(
        PlanError, match=r"\[10, 11\]: .* 2 of these 2 samples in other steps.*past the saved epoch"
    ):
        replay.plan(fewer)
    many = request(texts(*[5] * 30), 2)
    with pytest.raises(PlanError, match=r"\[10, 11, 12, 13, 14, 15, 16, 17\] and more: .* 3 of these 30"):
        replay.plan(many)


def test_replay_refuses_what_does_not_fit_this_run(tmp_path: Path) -> None:
    asked = request(texts(3000, 200, 300), 4, memory=COST.bytes(1, (3000,), 1, (3,)) - 1)
    plan = Static(sp_size=4).plan(asked)
    replay = saved(tmp_path / "plans.jsonl", plan)
    assert replay.plan(asked) == plan
    peak = max(m.bytes for m in plan.micro_batches)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"world": World.build(8, (1, 2, 4, 8))}, "is for 4 ranks; this run has 8"),
        ({"world": World.build(4, (1, 2))}, r"uses ranks 0\.\.3; this run has no such group"),
        ({"shapes": ((3000,), (201,), (300,))}, r"sample 11 has shape \(201,\); the saved plan says \(200,\)"),
        ({"cost": COST_2D}, r"recomputes \(0,\) layers; this model has \(2, 3\)"),
        ({"limits": replace(asked.limits, memory_bytes=peak - 1)}, f"needs {peak} bytes per rank"),
    ]
    for change, message in changes:
        with pytest.raises(PlanError, match=message):
            replay.plan(replace(asked, **change))


def test_replay_refuses_what_was_switched_off_since(tmp_path: Path) -> None:
    asked = request(texts(3000, 2999), 2, memory=40 * MiB)
    replay = saved(tmp_path / "plans.jsonl", Static().plan(asked))
    none = replace(asked, limits=replace(asked.limits, recompute="none"))
    with pytest.raises(PlanError, match=r"recomputes \(\d,\) layers, which this run does not allow"):
        replay.plan(none)
    wide = saved(tmp_path / "plans.jsonl", Static(sp_size=2).plan(asked))
    exact = replace(asked, limits=replace(asked.limits, exact_shapes=True))
    with pytest.raises(PlanError, match=r"samples \[11\] pads them"):
        wide.plan(exact)
    single = Static(sp_size=2).plan(request(texts(2), 2))
    short = replace(single, micro_batches=(replace(single.micro_batches[0], padded_shape=(2,)),))
    with pytest.raises(PlanError, match=r"gives 2 ranks 2 places, 4 are the least"):
        saved(tmp_path / "plans.jsonl", short).plan(request(texts(2), 2))


def test_replay_of_a_step_without_samples(tmp_path: Path) -> None:
    asked = request([], 2)
    assert saved(tmp_path / "plans.jsonl", Balanced().plan(asked)).plan(asked).micro_batches == ()


def test_replay_refuses_more_layers_than_the_model_has(tmp_path: Path) -> None:
    asked = request(texts(3000), 1, memory=16 * 4 * MiB)
    plan = Static().plan(asked)
    assert plan.micro_batches[0].recompute == (0,)
    deep = replace(plan, micro_batches=(replace(plan.micro_batches[0], recompute=(5,)),))
    with pytest.raises(PlanError, match=r"recomputes \(5,\) layers; this model has \(4,\)"):
        saved(tmp_path / "plans.jsonl", deep).plan(asked)


def test_replay_refuses_damaged_files_with_the_line(tmp_path: Path) -> None:
    plan = Balanced().plan(request(texts(100, 200), 2))
    path = tmp_path / "plans.jsonl"
    path.write_text(plan.to_json() + "\n" + plan.to_json()[:-5] + "\n")
    with pytest.raises(PlanError, match=r"plans\.jsonl, line 2"):
        Replay(path)
    other = Static(sp_size=2).plan(request(texts(100, 200), 2))
    assert other != plan
    path.write_text(plan.to_json() + "\n" + other.to_json() + "\n")
    with pytest.raises(PlanError, match="line 2: another line plans the same samples differently"):
        Replay(path)
    with pytest.raises(FileNotFoundError):
        Replay(tmp_path / "missing")
