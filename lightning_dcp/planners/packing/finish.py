"""The plan of packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.assembly import Placement, raise_micro_batches, round_up, shortest
from lightning_dcp.planners.packing.menu import Menu
from lightning_dcp.planners.packing.rows import Rows


def finish(rows: Rows, least: int) -> IterationPlan:
    """Every row with the fewest recomputed layers that fit, after ``limits.min_micro_batches`` is met.

    Args:
        rows: all samples in rows.
        least: lower bound of the makespan, nanoseconds.
    """
    menu = rows.kinds.menu
    live = np.flatnonzero(rows.count > 0)
    members = rows.members(live)
    sizes = rows.size[live]
    order = np.lexsort((np.asarray([samples[0] for samples in members]), -sizes, rows.first[live]))
    placements = [
        Placement(tuple(members[k].tolist()), int(rows.first[live[k]]), int(sizes[k])) for k in order.tolist()
    ]
    world_size, minimum = menu.request.world.world_size, menu.request.limits.min_micro_batches
    if minimum > 1:
        placements = raise_micro_batches(placements, world_size, minimum)
    return IterationPlan(
        world_size=world_size, micro_batches=tuple(_micro_batches(menu, placements)), lower_bound=least
    )


def _micro_batches(menu: Menu, placements: Sequence[Placement]) -> list[MicroBatch]:
    """The micro-batches of these rows; members are positions in the menu."""
    request = menu.request
    ids, lengths = request.sample_ids[menu.order].tolist(), menu.lengths.tolist()
    built: dict[int, MicroBatch] = {}
    for width in menu.widths:
        chosen = [k for k, item in enumerate(placements) if item.sp_size == width.sp_size]
        if not chosen:
            continue
        starts = np.cumsum([0, *(len(placements[k].members) for k in chosen[:-1])])
        samples = [i for k in chosen for i in placements[k].members]
        parts = np.add.reduceat(width.parts[samples], starts, axis=0)
        found = request.cost.packed(width.sp_size, parts, request.limits.memory_bytes, request.limits.recompute)
        settings = zip(found.nanoseconds.tolist(), found.bytes.tolist(), found.recompute.tolist(), strict=True)
        for k, (nanoseconds, held, recompute) in zip(chosen, settings, strict=True):
            members = placements[k].members
            tokens = max(sum(lengths[i] for i in members), shortest(width.sp_size))
            built[k] = MicroBatch(
                sample_ids=tuple(ids[i] for i in members),
                shapes=tuple((lengths[i],) for i in members),
                padded_shape=(round_up(tokens, width.sp_size),),
                packed=True,
                first_rank=placements[k].first_rank,
                sp_size=width.sp_size,
                recompute=tuple(recompute),
                nanoseconds=nanoseconds,
                bytes=held,
            )
    return [built[k] for k in range(len(placements))]
