"""Requests for planner tests, the rules every plan must keep, and the optimum of tiny cases by brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product, zip_longest
from typing import Any

from hypothesis import strategies as st

from lightning_dcp.cost import CostModel
from lightning_dcp.plan import IterationPlan, MicroBatch, Shape
from lightning_dcp.planners import Limits, PlanRequest
from lightning_dcp.topology import World
from tests.synthetic import analytic_profile

MiB = 1 << 20
SIZES = (1, 2, 3, 4, 6, 8)

COST = CostModel(analytic_profile(SIZES, (4,)))
COST_2D = CostModel(
    analytic_profile(SIZES, (2, 3), shapes=((1, 8), (2, 32), (8, 32), (8, 128), (32, 128), (128, 128)))
)


def request(
    shapes: Sequence[Shape], world_size: int = 4, *, cost: CostModel = COST, memory: int = 400 * MiB, **limits: Any
) -> PlanRequest:
    """A step of these samples; ids are 10, 11, ..."""
    return PlanRequest(
        sample_ids=tuple(range(10, 10 + len(shapes))),
        shapes=tuple(shapes),
        cost=cost,
        world=World.build(world_size, [p for p in cost.sp_sizes if p <= world_size]),
        limits=Limits(memory_bytes=memory, **limits),
    )


def texts(*lengths: int) -> list[Shape]:
    return [(length,) for length in lengths]


@st.composite
def requests(draw: st.DrawFn, worlds: Sequence[int] = SIZES, max_samples: int = 24) -> PlanRequest:
    """Steps of all kinds: one or two axes, roomy or tight memory, every limit."""
    world_size = draw(st.sampled_from(list(worlds)))
    count = draw(st.integers(1, max_samples))
    shapes: list[Shape]
    if draw(st.booleans()):
        longest = draw(st.sampled_from([20, 300, 3000]))
        shapes = [(draw(st.integers(1, longest)),) for _ in range(count)]
        cost, need = COST, max(COST.bytes(1, s, 1, (3,)) for s in shapes)
    else:
        shapes = [(draw(st.integers(1, 30)), draw(st.sampled_from([4, 9, 32]))) for _ in range(count)]
        cost, need = COST_2D, max(COST_2D.bytes(1, s, 1, (1, 2)) for s in shapes)
    return request(
        shapes,
        world_size,
        cost=cost,
        memory=2 * need + draw(st.sampled_from([0, 100_000, 300 * MiB])),
        max_batch_size=draw(st.sampled_from([None, 1, 3])),
        max_tokens=draw(st.sampled_from([None, 4000])),
        exact_shapes=draw(st.booleans()),
        min_micro_batches=draw(st.sampled_from([1, 1, 3])),
    )


def check(plan: IterationPlan, asked: PlanRequest, drawn: bool = False) -> None:
    """Everything that a plan of this request must fulfil.

    Args:
        plan: the plan.
        asked: what it was made for.
        drawn: the planner chooses its samples: any of them with the first one offered, instead of all.
    """
    assert plan.world_size == asked.world.world_size
    held = sorted(i for m in plan.micro_batches for i in m.sample_ids)
    offered = sorted(asked.ids)
    if drawn:
        assert len(set(held)) == len(held)
        assert set(held) <= set(offered)
        assert asked.ids[0] in held, "the first sample offered is in every step, so that none waits for ever"
    else:
        assert held == offered
    shapes = dict(zip(asked.ids, asked.sizes, strict=True))
    for m in plan.micro_batches:
        assert m.shapes == tuple(shapes[i] for i in m.sample_ids)
        _check_micro_batch(m, asked)
    assert drawn or plan.lower_bound > 0
    assert plan.lower_bound <= plan.makespan
    _check_ranks(plan)


def _check_ranks(plan: IterationPlan) -> None:
    """Groups nested or disjoint, outer first on every rank, and the makespan that follows."""
    groups = sorted({(m.first_rank, m.first_rank + m.sp_size) for m in plan.micro_batches})
    for k, (first, end) in enumerate(groups):
        for other, other_end in groups[k + 1 :]:
            nested = end <= other or other_end <= end or (first == other and end <= other_end)
            assert nested, f"groups {first}..{end - 1} and {other}..{other_end - 1} overlap"
    ranks = [plan.of_rank(r) for r in range(plan.world_size)]
    for mine in ranks:
        assert [m.sp_size for m in mine] == sorted((m.sp_size for m in mine), reverse=True)
    if plan.lockstep:
        rounds = zip_longest(*[[m.nanoseconds for m in mine] for mine in ranks], fillvalue=0)
        assert plan.makespan == sum(max(times) for times in rounds)
    else:
        assert plan.makespan == max(sum(m.nanoseconds for m in mine) for mine in ranks)


def _check_micro_batch(m: MicroBatch, asked: PlanRequest) -> None:
    limits, p = asked.limits, m.sp_size
    assert (m.first_rank, p) in asked.world.blocks
    if m.packed:
        _check_packed(m, asked)
    else:
        _check_padded(m, asked)
    assert m.bytes <= limits.memory_bytes
    assert m.batch_size <= (limits.max_batch_size or m.batch_size)
    assert m.padded_tokens // p <= (limits.max_tokens or m.padded_tokens)
    assert limits.recompute != "none" or not any(m.recompute)
    assert limits.recompute != "full" or m.recompute == asked.cost.num_layers


def _check_padded(m: MicroBatch, asked: PlanRequest) -> None:
    p = m.sp_size
    longest = [max(axis) for axis in zip(*m.shapes, strict=True)]
    shared = max(longest[0], 2 * p if p > 1 else 1)  # no shard of a single place
    assert m.padded_shape == (-(-shared // p) * p, *longest[1:])
    assert m.nanoseconds == asked.cost.nanoseconds(m.batch_size, m.padded_shape, p, m.recompute)
    assert m.bytes == asked.cost.bytes(m.batch_size, m.padded_shape, p, m.recompute)
    assert not asked.limits.exact_shapes or set(m.shapes) == {m.padded_shape}


def _check_packed(m: MicroBatch, asked: PlanRequest) -> None:
    """One row of mixed lengths, each costing what it adds at its own length."""
    assert asked.limits.packing, "rows are packed only where the request allows it"
    p, lengths = m.sp_size, [length for (length,) in m.shapes]
    shared = max(sum(lengths), 2 * p if p > 1 else 1)
    assert m.padded_shape == (-(-shared // p) * p,)
    assert (m.nanoseconds, m.bytes) == asked.cost.packed_row(p, lengths, m.recompute)


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to cut the items into non-empty sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        for k, part in enumerate(smaller):
            yield [*smaller[:k], [first, *part], *smaller[k + 1 :]]
        yield [[first], *smaller]


def optimum(asked: PlanRequest) -> int:
    """Least makespan over all partitions, groups and recompute counts; written without the planners' code."""
    cost, limits, world = asked.cost, asked.limits, asked.world
    counts = list(product(*[range(n + 1) for n in cost.num_layers]))

    def time(members: list[int], p: int) -> int | None:
        shapes = [asked.sizes[i] for i in members]
        if len(members) > (limits.max_batch_size or len(members)) or (
            limits.exact_shapes and len(set(shapes)) > 1
        ):
            return None
        longest = [max(axis) for axis in zip(*shapes, strict=True)]
        shape = (-(-longest[0] // p) * p, *longest[1:])
        if limits.exact_shapes and shape != shapes[0]:
            return None
        tokens = len(members)
        for axis in shape:
            tokens *= axis
        if limits.max_tokens is not None and tokens // p > limits.max_tokens:
            return None
        fitting = [r for r in counts if cost.bytes(len(members), shape, p, r) <= limits.memory_bytes]
        return min((cost.nanoseconds(len(members), shape, p, r) for r in fitting), default=None)

    best: int | None = None
    for parts in partitions(range(len(asked.shapes))):
        options = [[(b, t) for b in world.blocks if (t := time(part, b[1])) is not None] for part in parts]
        for chosen in product(*options):
            loads = [0] * world.world_size
            for (first, size), t in chosen:
                for rank in range(first, first + size):
                    loads[rank] += t
            best = max(loads) if best is None else min(best, max(loads))
    assert best is not None
    return best
