"""The plan of packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.assembly import Placement, raise_micro_batches, shortest
from lightning_dcp.planners.packing.menu import Menu, Width
from lightning_dcp.planners.packing.rows import Rows


def finish(rows: Rows, least: int) -> IterationPlan:
    """Every row with the fewest recomputed layers that fit, after ``limits.min_micro_batches`` is met.

    Args:
        rows: all samples in rows.
        least: lower bound of the makespan, nanoseconds.
    """
    request = rows.kinds.menu.request
    live = np.flatnonzero(rows.count > 0)
    members, first, size = rows.members(live), rows.first[live], rows.size[live]
    if request.limits.min_micro_batches > 1:
        members, first, size = _more(members, first, size, rows)
    order = np.lexsort((np.asarray([samples[0] for samples in members]), -size, first))
    built: dict[int, MicroBatch] = {}
    for width in rows.kinds.menu.widths:
        chosen = order[size[order] == width.sp_size]
        built |= zip(
            chosen.tolist(),
            _micro_batches(rows.kinds.menu, width, [members[k] for k in chosen.tolist()], first[chosen].tolist()),
            strict=True,
        )
    return IterationPlan(
        world_size=request.world.world_size,
        micro_batches=tuple(built[k] for k in order.tolist()),
        lower_bound=least,
    )


def _more(
    members: Sequence[IntArray], first: IntArray, size: IntArray, rows: Rows
) -> tuple[list[IntArray], IntArray, IntArray]:
    """The rows after each was cut into as many as ``G_min`` asks for."""
    request = rows.kinds.menu.request
    placements = [
        Placement(tuple(samples.tolist()), rank, p)
        for samples, rank, p in zip(members, first.tolist(), size.tolist(), strict=True)
    ]
    cut = raise_micro_batches(placements, request.world.world_size, request.limits.min_micro_batches)
    return (
        [np.asarray(item.members, dtype=np.int64) for item in cut],
        np.asarray([item.first_rank for item in cut]),
        np.asarray([item.sp_size for item in cut]),
    )


def _micro_batches(
    menu: Menu, width: Width, members: Sequence[IntArray], first: Sequence[int]
) -> Iterator[MicroBatch]:
    """Micro-batches of rows on groups of one width."""
    if not members:
        return
    request, p = menu.request, width.sp_size
    samples = np.concatenate(members)
    ends = np.cumsum([len(row) for row in members])
    starts = np.concatenate([[0], ends[:-1]])
    parts = np.add.reduceat(width.parts[samples], starts, axis=0)
    found = request.cost.packed(p, parts, request.limits.memory_bytes, request.limits.recompute)
    tokens = np.maximum(-(-np.add.reduceat(menu.lengths[samples], starts) // p) * p, shortest(p))
    ids = request.sample_ids[menu.order[samples]].tolist()
    shapes = [(length,) for length in menu.lengths[samples].tolist()]
    columns = (starts, ends, tokens, found.nanoseconds, found.bytes, found.recompute)
    for rank, start, end, length, nanoseconds, held, recompute in zip(
        first, *(column.tolist() for column in columns), strict=True
    ):
        yield MicroBatch(
            sample_ids=tuple(ids[start:end]),
            shapes=tuple(shapes[start:end]),
            padded_shape=(length,),
            packed=True,
            first_rank=rank,
            sp_size=p,
            recompute=tuple(recompute),
            nanoseconds=nanoseconds,
            bytes=held,
        )
