"""What a simulation counts, on planners that keep the rules and on planners that break them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from lightning_dcp.cost import IntArray
from lightning_dcp.lengths import length_groups
from lightning_dcp.permutation import permutation
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import Balanced, InfeasibleError, Planner, PlanRequest, Static, create
from lightning_dcp.planners.floating import Floating
from lightning_dcp.planners.grouped.bucket import Bucket
from lightning_dcp.planners.lockstep import plan_lockstep
from lightning_dcp.simulate import (
    Cluster,
    Simulation,
    check_lengths,
    compare,
    for_dataset,
    longest_sample,
    plan_record,
    simulate,
    tuned_static,
)
from lightning_dcp.topology import World
from tests.synthetic import analytic_profile

MiB = 1 << 20
SYNC = 7_000_000
PROFILE = replace(analytic_profile((1, 2, 4)), sync_time=SYNC)
CLUSTER = Cluster.build(PROFILE, 4, memory_bytes=400 * MiB)
KEYS = (
    *("planner", "tokens_per_second", "seconds_per_step", "optimizer_steps", "idle_ratio", "padding_ratio", "gap"),
    *("planning_ms", "planning_ms_worst", "samples_dropped", "samples_repeated", "ratio_to_bucket"),
)
LENGTHS = np.random.default_rng(5).integers(8, 2_000, 100)


def run(
    planner: Planner, lengths: Any = LENGTHS, cluster: Cluster = CLUSTER, **options: Any
) -> tuple[Simulation, list[IterationPlan]]:
    """The result and all plans."""
    plans: list[IterationPlan] = []
    values = {"steps": 3, "global_batch_size": 10} | options
    result = simulate(lengths, cluster, planner, **values, on_step=lambda step, plan: plans.append(plan))
    assert len(plans) == result.optimizer_steps
    return result, plans


def samples(plans: list[IterationPlan]) -> Counter[int]:
    return Counter(i for plan in plans for m in plan.micro_batches for i in m.sample_ids)


@dataclass
class Careless:
    """Plans what it is given, but for what ``change`` does to the request first."""

    drop: int = 0
    repeat: int = 0
    draws: bool = False
    width: int = 8
    offered: list[IntArray] = field(default_factory=list)
    name: str = "careless"
    lockstep: bool = False

    def lookahead(self, world: World) -> int:
        return self.width

    def plan(self, request: PlanRequest) -> IterationPlan:
        self.offered.append(request.sample_ids)
        ids = request.sample_ids[: len(request.sample_ids) - self.drop]
        if self.repeat and len(self.offered) > 1:
            ids = np.concatenate([ids, self.offered[-2][: self.repeat]])
        return Balanced().plan(request_of(request, ids))


@dataclass(frozen=True)
class InRounds:
    """For an engine that communicates in every micro-batch."""

    name: str = "rounds"
    draws: bool = False
    lockstep: bool = True

    def plan(self, request: PlanRequest) -> IterationPlan:
        return plan_lockstep(request)


def request_of(request: PlanRequest, ids: IntArray) -> PlanRequest:
    return PlanRequest(
        sample_ids=ids,
        shapes=LENGTHS[ids % len(LENGTHS)][:, None],
        cost=request.cost,
        world=request.world,
        limits=request.limits,
    )


@pytest.mark.parametrize(
    "planner",
    [
        *(Balanced(), Static(sp_size=2, batch_size=2), Floating(min_samples=4, max_samples=9), InRounds()),
        *(create(name, window=12) for name in ("bucket", "packed", "dcp-inter", "dcp-intra")),
    ],
    ids=lambda planner: planner.name,
)
def test_all_planners_train_the_first_samples_of_the_permutation(planner: Planner) -> None:
    cluster = replace(CLUSTER, limits=replace(CLUSTER.limits, packing=planner.name == "packed"))
    result, plans = run(planner, cluster=cluster, seed=3)
    assert samples(plans) == Counter(permutation(3, 0, 100)[:30].tolist())
    assert (result.samples_dropped, result.samples_repeated, result.samples) == (0, 0, 30)
    assert result.tokens == LENGTHS[permutation(3, 0, 100)[:30]].sum()
    if not planner.draws:
        assert [plan.num_samples for plan in plans] == [10, 10, 10]


def test_further_epochs_follow_where_the_dataset_ends() -> None:
    result, plans = run(Balanced(), LENGTHS[:7], steps=2, global_batch_size=10)
    wanted = [*permutation(0, 0, 7), *(permutation(0, 1, 7) + 7), *(permutation(0, 2, 7)[:6] + 14)]
    assert [set(samples([plan])) for plan in plans] == [{*wanted[:10]}, {*wanted[10:]}]
    assert (result.samples_dropped, result.samples_repeated) == (0, 0)
    assert result.samples == 20


def test_a_planner_that_draws_is_offered_the_first_samples_that_no_step_had() -> None:
    planner = Careless(draws=True, drop=3)
    result, plans = run(planner, steps=1, global_batch_size=20)
    order = permutation(0, 0, 100)[:20].tolist()
    trained: list[int] = []
    for offered, plan in zip(planner.offered, plans, strict=False):
        left = [i for i in order if i not in trained]
        assert offered.tolist() == left[:8]
        trained += samples([plan])
    assert result.optimizer_steps == len(plans) == 4
    assert len(planner.offered) == 5, "it planned nothing of the last three, so it was not asked again"
    assert (result.samples_dropped, result.samples_repeated) == (3, 0)


def test_dropped_and_repeated_samples_are_counted_from_the_plans() -> None:
    result, plans = run(Careless(drop=2, repeat=1))
    assert (result.samples_dropped, result.samples_repeated) == (6, 2)
    assert result.samples == samples(plans).total() == 30 - 6 + 2
    assert result.tokens == sum(plan.num_tokens for plan in plans)


def test_seconds_are_makespans_and_the_end_of_each_step() -> None:
    result, plans = run(Static())
    seconds = sum(plan.makespan + SYNC for plan in plans) / 1e9
    assert result.seconds == pytest.approx(seconds, rel=1e-12)
    assert result.seconds_per_step == pytest.approx(seconds / 3, rel=1e-12)
    assert result.tokens_per_second == pytest.approx(
        LENGTHS[permutation(0, 0, 100)[:30]].sum() / seconds, rel=1e-12
    )


def test_ratios_are_those_of_the_whole_and_leave_the_end_of_a_step_apart() -> None:
    result, plans = run(Static(sp_size=2, batch_size=3))
    busy = [[sum(m.nanoseconds for m in plan.of_rank(rank)) for rank in range(4)] for plan in plans]
    length = sum(max(ranks) for ranks in busy)
    assert result.idle_ratio == pytest.approx(1 - sum(map(sum, busy)) / (4 * length), rel=1e-12)
    batches = [m for plan in plans for m in plan.micro_batches]
    padded = sum(m.padded_shape[0] * m.batch_size for m in batches)
    assert result.padding_ratio == pytest.approx(1 - result.tokens / padded, rel=1e-12)
    assert result.gap == pytest.approx(sum(plan.gap for plan in plans) / 3, rel=1e-12)
    tokens = LENGTHS[permutation(0, 0, 100)[:30]]
    useful = CLUSTER.cost.useful_time(tokens).sum()
    assert result.useful_ratio == pytest.approx(useful / (4 * (length + 3 * SYNC)), rel=1e-12)
    assert 0 < result.useful_ratio < 1 - result.idle_ratio
    assert result.peak_bytes == max(m.bytes for m in batches)
    assert 0 < result.planning_ms <= result.planning_ms_worst


def test_lockstep_lasts_the_sum_of_its_rounds() -> None:
    result, plans = run(InRounds())
    assert result.seconds == pytest.approx(sum(sum(p.rounds()) + SYNC for p in plans) / 1e9, rel=1e-12)


@dataclass
class Altered:
    """Balanced plans with something changed."""

    changes: dict[str, Any]
    name: str = "altered"
    draws: bool = False
    lockstep: bool = False

    def plan(self, request: PlanRequest) -> IterationPlan:
        plan = Balanced().plan(request)
        changes = dict(self.changes)
        if "bytes" in changes:
            first, *others = plan.micro_batches
            changes = {"micro_batches": (replace(first, **changes), *others)}
        if "shorter" in changes:
            m = next(m for m in plan.micro_batches if m.shapes[0] != (1,))
            changed = replace(m, shapes=((1,), *m.shapes[1:]))
            changes = {"micro_batches": tuple(changed if n is m else n for n in plan.micro_batches)}
        return IterationPlan(
            world_size=changes.get("world_size", plan.world_size),
            micro_batches=changes.get("micro_batches", plan.micro_batches),
            lower_bound=changes.get("lower_bound", plan.lower_bound),
        )


def test_a_plan_without_a_bound_has_no_gap() -> None:
    assert run(Altered({"lower_bound": 0}))[0].gap is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 5}, "a plan for 5 ranks; the cluster has 4"),
        ({"bytes": 500 * MiB}, "needs 524288000 bytes per rank; the limit is 419430400"),
        ({"shorter": True}, "other sizes than those of its samples"),
    ],
)
def test_plans_of_something_else_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(Altered(changes))


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 0, 5], {}, r"sample 1 has the size \(0,\)"),
        ([3, 2**31], {}, r"sample 1 has the size \(2147483648,\)"),
        ([[2**20, 2**20]], {}, r"sample 0 has the size"),
        ([1.5, 2.0], {}, "must be integers"),
        (np.zeros((0,), dtype=int), {}, "at least one sample"),
        ([3], {"steps": 0}, "steps=0"),
        ([3], {"global_batch_size": 0}, "global_batch_size=0"),
    ],
)
def test_wrong_arguments_are_refused(lengths: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(Balanced(), np.asarray(lengths), **options)


def test_a_planner_that_wants_to_see_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="its lookahead is 0"):
        run(Careless(draws=True, width=0))


def test_a_sample_that_a_planner_cannot_place_is_named() -> None:
    tight = Cluster.build(PROFILE, 4, memory_bytes=10 * MiB)
    with pytest.raises(InfeasibleError, match=r"sample 0 of shape \(1900,\) .*10485760"):
        run(Static(), [1900, 10], tight)


def test_comparison_has_the_ratio_to_bucket_and_labels_of_its_own() -> None:
    slow = Careless(name="bucket")
    seen: list[tuple[str, int]] = []
    results = compare(
        LENGTHS,
        CLUSTER,
        {"a": Balanced(), "b": Static(), "c": slow},
        steps=2,
        global_batch_size=10,
        on_step=lambda label, step, plan: seen.append((label, step)),
    )
    assert [r.planner for r in results] == ["a", "b", "c"]
    assert seen == [(label, step) for label in "abc" for step in (0, 1)]
    assert [r.ratio_to_bucket for r in results] == pytest.approx(
        [r.tokens_per_second / results[2].tokens_per_second for r in results]
    )
    assert results[1].ratio_to_bucket != 1.0
    alone = compare(LENGTHS, CLUSTER, [Balanced()], steps=2, global_batch_size=10)[0]
    assert alone.ratio_to_bucket is None
    assert alone.tokens_per_second == results[0].tokens_per_second
    with pytest.raises(ValueError, match="same label"):
        compare(LENGTHS, CLUSTER, [Static(), Static(sp_size=2)], steps=1, global_batch_size=4)


def test_grouped_planners_get_the_groups_of_the_whole_dataset() -> None:
    bucket = for_dataset(create("bucket", length_groups=5), LENGTHS)
    assert isinstance(bucket, Bucket)
    assert bucket.edges == length_groups(LENGTHS, 5)
    for planner in (Balanced(), create("packed"), create("dcp-intra", edges=(5_000,))):
        assert for_dataset(planner, LENGTHS) is planner


def test_json_has_the_documented_keys() -> None:
    values = run(Balanced())[0].as_json()
    assert (*values,) == KEYS
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_a_record_of_a_plan_can_be_checked_by_another_program() -> None:
    tight = Cluster.build(PROFILE, 4, memory_bytes=30 * MiB)
    _, plans = run(create("balanced"), LENGTHS[:20], tight, global_batch_size=12)
    for step, plan in enumerate(plans):
        record = json.loads(json.dumps(plan_record(step, plan, 20)))
        assert [*record] == ["step", "makespan", "lower_bound", "micro_batches"]
        assert record["step"] == step
        clock = [0.0] * 4
        for m in record["micro_batches"]:
            assert [*m] == [
                *("samples", "shapes", "padded_shape", "packed", "first_rank", "sp_size", "recompute", "seconds"),
                "bytes",
            ]
            assert m["shapes"] == [[LENGTHS[i]] for i in m["samples"]]
            for rank in range(m["first_rank"], m["first_rank"] + m["sp_size"]):
                clock[rank] += m["seconds"]
        assert record["makespan"] == pytest.approx(max(clock), rel=1e-9)
        assert 0 < record["lower_bound"] <= record["makespan"]
    assert any(any(m.recompute) for plan in plans for m in plan.micro_batches)


def test_the_longest_sample_on_every_size() -> None:
    tight = Cluster.build(PROFILE, 4, memory_bytes=10 * MiB)
    shapes = np.asarray([10, 1900, 1900, 40])[:, None]
    found = longest_sample(shapes, tight)
    assert (found.position, found.shape) == (1, (1900,))
    assert [fit.sp_size for fit in found.fits] == [1, 2, 4]
    assert [fit.fits for fit in found.fits] == [False, True, True]
    assert found.narrowest is not None
    assert found.narrowest.sp_size == 2
    for fit in found.fits:
        assert fit.bytes == tight.cost.bytes(1, (1900,), fit.sp_size, fit.recompute)
        assert fit.fits == (fit.bytes <= 10 * MiB)
    assert any(found.narrowest.recompute)
    assert (
        longest_sample(shapes, replace(tight, limits=replace(tight.limits, memory_bytes=2 * MiB))).narrowest
        is None
    )


def test_the_first_sample_that_fits_nowhere_is_found_in_any_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dcp.simulate.needs._CHUNK", 16)
    tight = Cluster.build(PROFILE, 4, memory_bytes=20 * MiB)
    shapes = np.full((50, 1), 100)
    check_lengths(shapes, tight)
    shapes[37], shapes[40] = 15_000, 16_000
    with pytest.raises(InfeasibleError, match=r"sample 37 of shape \(15000,\)"):
        check_lengths(shapes, tight)


def test_plain_data_parallel_is_tuned() -> None:
    """No fixed setting of a power of two in batch size beats it on its samples."""
    lengths = np.full(64, 64)
    lengths[::16] = 4000
    planner = tuned_static(lengths[:, None], CLUSTER, global_batch_size=32)
    assert planner.deal == "in_order"

    def speed(p: int, b: int) -> float:
        static = Static(sp_size=p, batch_size=b, deal="in_order")
        return simulate(lengths, CLUSTER, static, steps=8, global_batch_size=32).tokens_per_second

    best = max(speed(p, b) for p in (1, 2, 4) for b in (1, 2, 4, 8))
    assert speed(planner.sp_size, planner.batch_size) == best
    short = tuned_static(np.full((64, 1), 16), CLUSTER, global_batch_size=32)
    assert (short.sp_size, short.batch_size) == (1, 8), "launches are shared by the samples of a batch"
    tight = replace(CLUSTER, limits=replace(CLUSTER.limits, memory_bytes=20 * MiB, packing=True))
    assert tuned_static(lengths[:, None], tight, global_batch_size=32).sp_size > 1
    with pytest.raises(InfeasibleError, match=r"sample 0 of shape \(4000,\) fits none"):
        tuned_static(
            lengths[:, None],
            replace(tight, limits=replace(tight.limits, memory_bytes=2 * MiB)),
            global_batch_size=32,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"sp_sizes": (3,)}, r"sp_sizes is \(3,\); allowed .* \[1, 2, 4\]"),
        ({"sp_sizes": ()}, r"sp_sizes is \(\)"),
        ({"world_size": 2, "sp_sizes": (4,)}, r"allowed for 2 ranks .* \[1, 2\]"),
        ({"world_size": 2**21}, "world_size is 2097152"),
    ],
)
def test_clusters_that_cannot_be(options: dict[str, Any], message: str) -> None:
    values = {"world_size": 4} | options
    with pytest.raises(ValueError, match=message):
        Cluster.build(PROFILE, memory_bytes=MiB, **values)


def test_a_cluster_takes_the_profiled_sizes_that_divide_one_another() -> None:
    profile = analytic_profile((1, 2, 3, 4, 8))
    assert Cluster.build(profile, 6, memory_bytes=MiB).world.sp_sizes == (1, 2, 4)
    assert Cluster.build(profile, 16, memory_bytes=MiB).world.sp_sizes == (1, 2, 4, 8)
    assert Cluster.build(profile, 6, memory_bytes=MiB, sp_sizes=(3, 1)).world.sp_sizes == (1, 3)
    with pytest.raises(ValueError, match="starts at sequence-parallel size 4"):
        Cluster.build(analytic_profile((4,)), 2, memory_bytes=MiB)
    cluster = Cluster.build(profile, 16, memory_bytes=MiB, ranks_per_node=4, max_tokens=7)
    assert (cluster.world.ranks_per_node, cluster.limits.max_tokens) == (4, 7)
