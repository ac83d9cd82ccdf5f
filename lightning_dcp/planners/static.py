"""The controls: one fixed setting for all samples, and plans read back from a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_dcp.cost import INFEASIBLE
from lightning_dcp.plan import IterationPlan, MicroBatch, PlanError
from lightning_dcp.planners.assembly import (
    Placement,
    assemble,
    largest_of,
    raise_infeasible,
    raise_micro_batches,
    settings_within,
    shortest,
    usable_sp_sizes,
)
from lightning_dcp.planners.bound import lower_bound
from lightning_dcp.planners.options import check_integers
from lightning_dcp.planners.protocol import PlanRequest
from lightning_dcp.topology import Block

Deal = Literal["longest_first", "in_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """One sequence-parallel size and one batch size for every sample: what ``balanced`` is compared with.

    Samples are cut into micro-batches in the order in which they come, ``batch_size`` at a time, and dealt to the
    groups of ``sp_size`` ranks. Recomputed layers are the fewest that fit (or as ``limits.recompute`` says).

    - Ranks outside every group of ``sp_size`` (rank 2 of 3 at ``sp_size=2``) take part with ``p = 1``, as far as
      the micro-batches fit one rank; those that do not fit go to the groups only.
    - A micro-batch over a limit is cut in halves until it fits.
    - ``limits.max_step_factor`` is not used: the step's samples are given, so its length is no choice.

    Attributes:
        sp_size: ``p``.
        batch_size: ``b``.
        deal: ``"longest_first"`` gives the longest micro-batch to the group that ends it first;
            ``"in_order"`` goes round the groups.

    Raises:
        ValueError: a size is below one or ``deal`` is unknown.
    """

    sp_size: int = 1
    batch_size: int = 1
    deal: Deal = "longest_first"
    name: str = field(default="static", init=False)
    draws: bool = field(default=False, init=False)
    lockstep: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_integers(self, 1, "sp_size", "batch_size")
        if self.deal not in ("longest_first", "in_order"):
            raise ValueError(f"deal={self.deal!r}; allowed are 'longest_first' and 'in_order'")

    def plan(self, request: PlanRequest) -> IterationPlan:
        """Plan one optimizer step with the fixed setting.

        Raises:
            InfeasibleError: a sample does not fit ``sp_size``, even alone.
            ValueError: ``sp_size`` is no size of the world or of the profile.
        """
        sizes = usable_sp_sizes(request)
        if self.sp_size not in sizes:
            raise ValueError(f"sp_size={self.sp_size} is not possible here; allowed are {sizes}")
        blocks = request.world.blocks_of(self.sp_size)
        covered = {rank for first, size in blocks for rank in range(first, first + size)}
        single = [block for block in request.world.blocks_of(1) if block[0] not in covered and 1 in sizes]
        chunks = _fitting(request, list(self._cut(request)), self.sp_size)
        placements = self._deal(request, chunks, [*blocks, *single])
        minimum = request.limits.min_micro_batches
        placements = raise_micro_batches(placements, request.world.world_size, minimum)
        return assemble(request, placements, lower_bound(request))

    def _cut(self, request: PlanRequest) -> Iterator[tuple[int, ...]]:
        positions = list(range(len(request.shapes)))
        runs = [positions]
        if request.limits.exact_shapes:
            shapes = request.sizes
            positions.sort(key=lambda i: shapes[i])
            runs = [list(run) for _, run in groupby(positions, key=lambda i: shapes[i])]
        for run in runs:
            for start in range(0, len(run), self.batch_size):
                yield tuple(run[start : start + self.batch_size])

    def _deal(self, request: PlanRequest, chunks: list[tuple[int, ...]], blocks: list[Block]) -> list[Placement]:
        times = {p: _times(request, chunks, p) for p in {size for _, size in blocks}}
        order = list(range(len(chunks)))
        if self.deal == "longest_first":
            order.sort(key=lambda k: -times[self.sp_size][k])
        loads, placements = [0] * len(blocks), []
        for turn, k in enumerate(order):
            ends = [load + times[size][k] for load, (_, size) in zip(loads, blocks, strict=True)]
            fitting = [j for j, (_, size) in enumerate(blocks) if times[size][k] < INFEASIBLE]
            if self.deal == "longest_first":
                best = min(fitting, key=lambda j: ends[j])
            else:
                best = min(fitting, key=lambda j: (j - turn) % len(blocks))
            loads[best] = ends[best]
            placements.append(Placement(chunks[k], *blocks[best]))
        return placements


def _fitting(request: PlanRequest, chunks: list[tuple[int, ...]], sp_size: int) -> list[tuple[int, ...]]:
    """The chunks; those over a limit are cut in halves, again and again."""
    times = _times(request, chunks, sp_size)
    if max(times, default=0) < INFEASIBLE:
        return chunks
    parts: list[tuple[int, ...]] = []
    for chunk, time in zip(chunks, times, strict=True):
        if time < INFEASIBLE:
            parts.append(chunk)
        elif len(chunk) == 1:
            raise_infeasible(request, chunk[0], (sp_size,))
        else:
            parts += [chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]]
    return _fitting(request, parts, sp_size)


def _times(request: PlanRequest, chunks: list[tuple[int, ...]], sp_size: int) -> list[int]:
    if not chunks:
        return []
    sizes = np.asarray([len(chunk) for chunk in chunks], dtype=np.int64)
    largest = np.asarray([largest_of(request, chunk) for chunk in chunks], dtype=np.int64)
    return [int(t) for t in settings_within(request, sp_size, sizes, largest).nanoseconds]


class Replay:
    """Plans of an earlier run, found again by the step's set of samples.

    Args:
        file: one :meth:`IterationPlan.to_json` a line; empty lines are skipped.

    Raises:
        PlanError: a line holds no plan (the message gives its number), or two lines plan the same samples
            differently.
    """

    name = "replay"
    draws = False
    lockstep = False

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        self._plans: dict[frozenset[int], IterationPlan] = {}
        for number, line in enumerate(self.file.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                self._add(number, line)

    def _add(self, number: int, line: str) -> None:
        try:
            plan = IterationPlan.from_json(line)
        except PlanError as error:
            raise PlanError(f"{self.file}, line {number}: {error}") from error
        ids = frozenset(plan.sample_ids)
        if self._plans.setdefault(ids, plan) != plan:
            raise PlanError(f"{self.file}, line {number}: another line plans the same samples differently")

    def plan(self, request: PlanRequest) -> IterationPlan:
        """The saved plan of exactly these samples.

        Raises:
            PlanError: no saved plan has these samples; or it was made for another world, other sample sizes,
                groups that do not exist here, or another number of layers.
        """
        ids = request.ids
        plan = self._plans.get(frozenset(ids))
        step = f"the step's samples {_some(ids)}"
        if plan is None:
            raise PlanError(self._unknown(ids, step))
        if plan.world_size != request.world.world_size:
            raise PlanError(
                f"the saved plan of {step} is for {plan.world_size} ranks; this run has {request.world.world_size}"
            )
        peak = max((m.bytes for m in plan.micro_batches), default=0)
        if peak > request.limits.memory_bytes:
            raise PlanError(
                f"the saved plan of {step} needs {peak} bytes per rank; the limit is "
                f"{request.limits.memory_bytes} bytes"
            )
        shapes = dict(zip(ids, request.sizes, strict=True))
        for m in plan.micro_batches:
            self._check(m, shapes, request)
        return plan

    def _unknown(self, ids: Sequence[int], step: str) -> str:
        """Why there may be no plan of these samples, and what to do."""
        count = len(self._plans)
        held = "one plan" if count == 1 else f"{count} plans"
        ways_out = f"end the run with the saved steps (max_steps={count}), save more, or use another planner"
        known = frozenset().union(*self._plans) & set(ids)
        if not known:
            return (
                f"{self.file} holds no plan of {step}: it ends after {held}, without any of these samples. This step "
                f"comes after the saved ones, or the data differ; {ways_out}"
            )
        return (
            f"{self.file} holds no plan of {step}: it has {held}, and {len(known)} of these {len(ids)} samples in "
            "other steps. The run is past the saved epoch, or its seed or global_batch_size differ from those that the "
            f"plans were saved with; {ways_out}"
        )

    def _check(self, m: MicroBatch, shapes: dict[int, tuple[int, ...]], request: PlanRequest) -> None:
        for sample_id, shape in zip(m.sample_ids, m.shapes, strict=True):
            if shapes[sample_id] != shape:
                raise PlanError(f"sample {sample_id} has shape {shapes[sample_id]}; the saved plan says {shape}")
        if (m.first_rank, m.sp_size) not in request.world.blocks:
            raise PlanError(
                f"the saved plan of samples {_some(m.sample_ids)} uses ranks {m.ranks.start}..{m.ranks.stop - 1}; "
                "this run has no such group"
            )
        self._check_freedoms(m, request)
        layers = request.cost.num_layers
        if len(m.recompute) != len(layers) or any(r > n for r, n in zip(m.recompute, layers, strict=True)):
            raise PlanError(
                f"the saved plan of samples {_some(m.sample_ids)} recomputes {m.recompute} layers; "
                f"this model has {layers}"
            )

    def _check_freedoms(self, m: MicroBatch, request: PlanRequest) -> None:
        """Refuse what may be switched off since the plan was saved: with it the model's result would depend on it."""
        found = (
            (request.limits.exact_shapes and set(m.shapes) != {m.padded_shape}, "pads them"),
            (request.limits.recompute == "none" and any(m.recompute), f"recomputes {m.recompute} layers"),
            (
                m.padded_shape[0] < shortest(m.sp_size),
                f"gives {m.sp_size} ranks {m.padded_shape[0]} places, {shortest(m.sp_size)} are the least",
            ),
        )
        for refused, reason in found:
            if refused:
                raise PlanError(
                    f"the saved plan of samples {_some(m.sample_ids)} {reason}, which this run does not allow; "
                    "use another planner, or the settings that the plan was saved under"
                )


def _some(ids: Sequence[int]) -> str:
    return f"{sorted(ids)[:8]}{' and more' if len(ids) > 8 else ''}"
