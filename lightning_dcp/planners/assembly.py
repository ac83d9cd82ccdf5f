"""What all planners that place given samples share: checks of the request, padding, and the final plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import INFEASIBLE, CostModel, IntArray, Settings
from lightning_dcp.plan import IterationPlan, MicroBatch, Shape
from lightning_dcp.planners.protocol import InfeasibleError, Limits, PlanRequest
from lightning_dcp.topology import World


class Placement(NamedTuple):
    """A micro-batch before its settings are known: positions in the request, and the group."""

    members: tuple[int, ...]
    first_rank: int
    sp_size: int


def usable_sp_sizes(request: PlanRequest) -> tuple[int, ...]:
    """:func:`common_sp_sizes` of a planner that pads.

    Raises:
        ValueError: there is none, or the request asks for something that these planners cannot give.
    """
    if request.limits.packing:
        raise ValueError("packing=True: this planner pads and does not pack; use packing=False")
    return common_sp_sizes(request.world, request.cost)


def common_sp_sizes(world: World, cost: CostModel) -> tuple[int, ...]:
    """Sequence-parallel sizes that the world offers and the profile knows, ascending.

    Raises:
        ValueError: there is none.
    """
    sizes = tuple(p for p in world.sp_sizes if p in cost.sp_sizes)
    if not sizes:
        raise ValueError(
            f"the world has groups of {world.sp_sizes} ranks, the profile has sequence-parallel sizes "
            f"{cost.sp_sizes}; profile at least one size of the world"
        )
    return sizes


def pad(shapes: Sequence[Shape], sp_size: int) -> Shape:
    """Smallest shape that holds all ``shapes`` and whose first axis ``sp_size`` ranks can share.

    The first axis is a multiple of ``sp_size``, and a shard holds two places or more: models that drop
    ``is_causal`` for queries of length one would silently attend to what follows.
    """
    first, *rest = (max(axis) for axis in zip(*shapes, strict=True))
    return (round_up(max(first, shortest(sp_size)), sp_size), *rest)


def shortest(sp_size: int) -> int:
    """Least length of the first axis that ``sp_size`` ranks share; see :func:`pad`."""
    return 2 * sp_size if sp_size > 1 else 1


def _padded_axis(lengths: IntArray, sp_sizes: IntArray) -> IntArray:
    """:func:`pad` of many first axes."""
    least = np.maximum(lengths, np.where(sp_sizes > 1, 2 * sp_sizes, 1))
    return np.asarray(-(-least // sp_sizes) * sp_sizes)


def round_up(length: int, multiple: int) -> int:
    """Smallest multiple that is not below ``length``."""
    return -(-length // multiple) * multiple


def padded_tokens(shapes: IntArray, sp_size: int) -> IntArray:
    """Tokens of each sample after its first axis is padded as in :func:`pad`.

    Args:
        shapes: sizes, shape ``[..., axes]``.
        sp_size: ``p``.
    """
    first = _padded_axis(shapes[..., 0], np.asarray(sp_size))
    return np.asarray(first * shapes[..., 1:].prod(axis=-1), dtype=np.int64)


def round_up_all(shapes: IntArray, sp_size: int) -> IntArray:
    """Tokens of each sample after its first axis is only rounded up to a multiple of ``sp_size``.

    Every plan pads at least so much; a lower bound may count on no more.
    """
    first = -(-shapes[..., 0] // sp_size) * sp_size
    return np.asarray(first * shapes[..., 1:].prod(axis=-1), dtype=np.int64)


def may_share(limits: Limits, sp_size: int, shapes: IntArray) -> NDArray[np.bool_]:
    """Whether samples may run on ``sp_size`` ranks: with ``exact_shapes`` only where nothing is padded.

    Args:
        limits: limits of the request.
        sp_size: ``p``.
        shapes: sizes, shape ``[..., axes]``.
    """
    unpadded = padded_tokens(shapes, sp_size) == shapes.prod(axis=-1)
    return np.asarray(unpadded | (not limits.exact_shapes))


def settings_within(request: PlanRequest, sp_size: int, batch_size: IntArray, largest: IntArray) -> Settings:
    """:meth:`CostModel.settings` under all limits of the request, not of memory alone.

    Args:
        request: cost model and limits.
        sp_size: ``p``.
        batch_size: samples of each micro-batch.
        largest: largest size of its samples on each axis, shape ``[..., axes]``; padded here as plans are.
    """
    limits, tokens = request.limits, padded_tokens(largest, sp_size)
    found = request.cost.settings(sp_size, batch_size, tokens, limits.memory_bytes, limits.recompute)
    refused = exceeds(limits, sp_size, batch_size, tokens) | ~may_share(limits, sp_size, largest)
    time = np.where(refused, INFEASIBLE, found.nanoseconds)
    return Settings(nanoseconds=time, bytes=found.bytes, recompute=found.recompute)


def exceeds(limits: Limits, sp_size: int, batch_size: IntArray, tokens: IntArray) -> NDArray[np.bool_]:
    """Whether micro-batches pass ``max_batch_size`` or ``max_tokens``."""
    too_large = np.zeros(np.broadcast_shapes(np.shape(batch_size), np.shape(tokens)), dtype=bool)
    if limits.max_batch_size is not None:
        too_large |= np.asarray(batch_size) > limits.max_batch_size
    if limits.max_tokens is not None:
        too_large |= np.asarray(batch_size) * tokens // sp_size > limits.max_tokens
    return too_large


def check_feasible(request: PlanRequest, sp_sizes: Sequence[int]) -> None:
    """Refuse a step with a sample that fits no group even alone.

    Raises:
        InfeasibleError: names the first such sample, its length, the least memory it needs and the limit.
    """
    shapes = request.shapes
    fits = np.zeros(len(shapes), dtype=bool)
    for p in sp_sizes:
        fits |= settings_within(request, p, np.asarray(1), shapes).nanoseconds < INFEASIBLE
    if not fits.all():
        raise_infeasible(request, int(np.argmin(fits)), sp_sizes)


def raise_infeasible(request: PlanRequest, position: int, sp_sizes: Sequence[int]) -> None:
    """Say why the sample at ``position`` fits none of ``sp_sizes`` and what can be done.

    Raises:
        InfeasibleError: always.
    """
    limits, shape = request.limits, tuple(request.shapes[position].tolist())
    name = f"sample {request.sample_ids[position]} of shape {shape} ({prod(shape)} tokens)"
    unpadded = [p for p in sp_sizes if may_share(limits, p, np.asarray(shape, dtype=np.int64))]
    if not unpadded:
        raise InfeasibleError(
            f"{name} would be padded on {tuple(sp_sizes)} ranks (sp_sizes), and padding changes what this model "
            "computes; allowed are one rank and sizes that divide the first axis into parts of two places or more. "
            "Make the model ignore padding (attention_mask), allow such a size, or leave such samples out"
        )
    sp_sizes = unpadded
    least, best = min((_least_bytes(request, shape, p), p) for p in sp_sizes)
    if least > limits.memory_bytes:
        recompute = "" if limits.recompute == "auto" else "recompute='auto', "
        raise InfeasibleError(
            f"{name} needs at least {least} bytes per rank (sp_size {best}, recompute {limits.recompute!r}); "
            f"the limit is {limits.memory_bytes} bytes. Allow more ranks per sequence (sp_sizes up to now: "
            f"{tuple(sp_sizes)}), {recompute}a higher memory_limit, or leave such samples out"
        )
    raise InfeasibleError(
        f"{name} has {prod(pad([shape], max(sp_sizes))) // max(sp_sizes)} tokens per rank at sp_size "
        f"{max(sp_sizes)}; max_tokens is {limits.max_tokens}. Raise max_tokens, allow more ranks per sequence, or "
        "leave such samples out"
    )


def _least_bytes(request: PlanRequest, shape: Shape, sp_size: int) -> int:
    tokens = np.asarray(prod(pad([shape], sp_size)))
    # A limit of 0 bytes makes the search go on to the counts that need least memory.
    limit = 0 if request.limits.recompute == "auto" else request.limits.memory_bytes
    return int(request.cost.settings(sp_size, np.asarray(1), tokens, limit, request.limits.recompute).bytes)


def largest_of(request: PlanRequest, members: Sequence[int]) -> Shape:
    """Largest size on each axis among samples, given by their positions in the request."""
    return tuple(request.shapes[list(members)].max(axis=0).tolist())


def assemble(request: PlanRequest, placements: Sequence[Placement], lower_bound: int = 0) -> IterationPlan:
    """The plan of these placements, each with the fewest recomputed layers that fit.

    Raises:
        InfeasibleError: a placement does not fit the limits.
    """
    micro_batches = tuple(micro_batches_of(request, placements))
    return IterationPlan(world_size=request.world.world_size, micro_batches=micro_batches, lower_bound=lower_bound)


def micro_batches_of(request: PlanRequest, placements: Sequence[Placement]) -> Iterator[MicroBatch]:
    """The micro-batches of these placements, in order; see :func:`assemble`."""
    if not placements:
        return
    # All looked up at once: a question for each micro-batch would cost more than the planning.
    counts = [len(item.members) for item in placements]
    edges = np.cumsum([0, *counts])
    members = np.fromiter(chain.from_iterable(item.members for item in placements), np.int64, int(edges[-1]))
    shapes = request.shapes[members]
    largest = np.maximum.reduceat(shapes, edges[:-1], axis=0)
    sp_sizes = np.asarray([item.sp_size for item in placements], dtype=np.int64)
    found = _settings_of(request, placements, np.diff(edges), largest)
    padded = np.column_stack([_padded_axis(largest[:, 0], sp_sizes), largest[:, 1:]])
    ids, sizes = iter(request.sample_ids[members].tolist()), map(tuple, shapes.tolist())
    rows = zip(
        placements,
        counts,
        map(tuple, padded.tolist()),
        map(tuple, found.recompute.tolist()),
        found.nanoseconds.tolist(),
        found.bytes.tolist(),
        strict=True,
    )
    for (_, first_rank, sp_size), count, padded_shape, recompute, nanoseconds, held in rows:
        yield MicroBatch(
            sample_ids=tuple(islice(ids, count)),
            shapes=tuple(islice(sizes, count)),
            padded_shape=padded_shape,
            first_rank=first_rank,
            sp_size=sp_size,
            recompute=recompute,
            nanoseconds=nanoseconds,
            bytes=held,
        )


def _settings_of(
    request: PlanRequest, placements: Sequence[Placement], counts: IntArray, largest: IntArray
) -> Settings:
    """Settings of each placement, given its number of samples and its largest size on each axis."""
    sp_size = np.asarray([item.sp_size for item in placements], dtype=np.int64)
    total = len(placements)
    time, held = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    recompute = np.zeros((total, len(request.cost.num_layers)), dtype=np.int64)
    for p in np.unique(sp_size).tolist():
        rows = np.flatnonzero(sp_size == p)
        found = settings_within(request, p, counts[rows], largest[rows])
        time[rows], held[rows], recompute[rows] = found.nanoseconds, found.bytes, found.recompute
    if (time >= INFEASIBLE).any():
        worst = placements[int(time.argmax())]
        position = max(worst.members, key=lambda i: int(request.shapes[i].prod()))
        raise_infeasible(request, position, (worst.sp_size,))
    return Settings(nanoseconds=time, bytes=held, recompute=recompute)


def raise_micro_batches(placements: Sequence[Placement], world_size: int, minimum: int) -> list[Placement]:
    """Multiply every rank's number of micro-batches when all are below ``G_min`` (paper, Appendix C).

    The factor is ``ceil(G_min / max g)``. A micro-batch is cut into that many parts on its own group; one with
    fewer samples is cut into single samples, so a step of few samples may stay below ``G_min``.
    """
    counts = [0] * world_size
    for item in placements:
        for rank in range(item.first_rank, item.first_rank + item.sp_size):
            counts[rank] += 1
    factor = -(-minimum // max(counts, default=1)) if max(counts, default=0) else 1
    parts: list[Placement] = []
    for item in placements:
        pieces = min(factor, len(item.members))
        edges = [len(item.members) * k // pieces for k in range(pieces + 1)]
        parts += [item._replace(members=item.members[a:b]) for a, b in pairwise(edges)]
    return parts
