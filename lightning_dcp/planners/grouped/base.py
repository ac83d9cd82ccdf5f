"""What the drawing planners share: their options, the recompute policy, and the finished plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from lightning_dcp.cost import RecomputePolicy
from lightning_dcp.lengths import MAX_GROUPS
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.assembly import Placement, micro_batches_of
from lightning_dcp.planners.bound import lower_bound
from lightning_dcp.planners.grouped.groups import Groups, with_policy
from lightning_dcp.planners.options import check_flags, check_integers
from lightning_dcp.planners.protocol import PlanRequest
from lightning_dcp.topology import World

SAMPLES_PER_RANK = 512
"""Samples offered for each rank where nothing else is said: enough for full batches of every length group."""
LEAST_WINDOW = 4096
"""Fewest samples that are offered where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Options of all planners that draw.

    Attributes:
        window: samples to be offered; by default 512 for each rank and at least 4096.
        certify: whether plans carry a lower bound of the samples that they hold.

    Raises:
        ValueError: an option is out of range.
    """

    window: int | None = None
    certify: bool = True
    draws: bool = field(default=True, init=False)
    lockstep: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_integers(self, 1, optional=("window",))
        check_flags(self, "certify")

    def lookahead(self, world: World) -> int:
        """How many samples the planner wants to be offered."""
        return self.window or max(LEAST_WINDOW, SAMPLES_PER_RANK * world.world_size)

    def _is_last(self, request: PlanRequest) -> bool:
        """Whether these samples are the last of the epoch: all that are left are offered, and they are few."""
        return len(request.sample_ids) < self.lookahead(request.world)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped(Drawing):
    """Options of the planners whose batches hold samples of one length group.

    Attributes:
        edges: upper edges of the length groups in tokens, ascending. The edges of the whole dataset
            (:func:`~lightning_dcp.lengths.length_groups`) keep the groups the same in every step. ``None``: the edges
            that pad the samples of the window least, found again in each step.
        length_groups: most groups that are chosen where ``edges`` is ``None``; 1 to 64. Where few samples are offered
            there are fewer, one for 128 of them, but 16.

    Raises:
        ValueError: an option is out of range.
    """

    edges: Sequence[int] | None = None
    length_groups: int = MAX_GROUPS

    def __post_init__(self) -> None:
        # dataclass(slots=True) makes a new class, which super() without arguments would not find.
        Drawing.__post_init__(self)
        if self.edges is not None:
            edges = tuple(self.edges)
            whole = all(type(edge) is int for edge in edges)
            if not edges or not whole or edges[0] < 1 or any(a >= b for a, b in pairwise(edges)):
                raise ValueError(f"edges={edges}; they must be integers from 1, ascending, at least one")
            object.__setattr__(self, "edges", edges)
        if type(self.length_groups) is not int or not 1 <= self.length_groups <= MAX_GROUPS:
            raise ValueError(f"length_groups={self.length_groups!r}; allowed are integers from 1 to {MAX_GROUPS}")

    def _settled(
        self, request: PlanRequest, policy: RecomputePolicy, sp_sizes: Sequence[int]
    ) -> tuple[PlanRequest, Groups]:
        """The request under the planner's recompute policy, and its samples in groups.

        ``limits.recompute`` wins where it is not ``"auto"``. All layers recomputed need one layer's input more than
        all but one; samples that this keeps from fitting form groups of their own (:attr:`Groups.spared`), planned
        with the fewest recomputed layers.

        Raises:
            InfeasibleError: a sample fits none of ``sp_sizes``.
        """
        spare = request.limits.recompute == "auto"
        if spare:
            request = with_policy(request, policy)
        return request, Groups.build(request, sp_sizes, self.edges, self.length_groups, spare and policy != "auto")


def padding(request: PlanRequest) -> PlanRequest:
    """The request without the permission to pack, which these planners do not use and which changes the bound."""
    return replace(request, limits=replace(request.limits, packing=False))


def finish(
    request: PlanRequest, settled: PlanRequest, groups: Groups, placements: Sequence[Placement], certify: bool
) -> IterationPlan:
    """The plan of the drawn samples.

    Args:
        request: the offered samples; the bound holds for its recompute policy.
        settled: the same under the recompute policy of the plan.
        groups: the same in groups, each spared or not.
        placements: positions in the request, on groups of ranks; at least one.
        certify: whether to compute the bound.
    """
    spared = (
        groups.spared[groups.places()[0]] if groups.spared.any() else np.zeros(len(request.shapes), dtype=bool)
    )
    fewest = [bool(spared[placement.members[0]]) for placement in placements]
    chosen = [i for placement in placements for i in placement.members]
    rows = np.asarray(chosen, dtype=np.int64)
    drawn = replace(request, sample_ids=request.sample_ids[rows], shapes=request.shapes[rows])
    renamed, start = [], 0
    for placement in placements:
        end = start + len(placement.members)
        renamed.append(placement._replace(members=tuple(range(start, end))))
        start = end
    bound = lower_bound(drawn) if certify else 0
    plan = partial(_assembled, drawn, renamed, fewest)
    parts = {False: plan(False, settled.limits.recompute), True: plan(True, "auto")}
    return IterationPlan(
        world_size=request.world.world_size,
        micro_batches=tuple(next(parts[few]) for few in fewest),
        lower_bound=bound,
    )


def _assembled(
    request: PlanRequest,
    placements: Sequence[Placement],
    fewest: Sequence[bool],
    few: bool,
    policy: RecomputePolicy,
) -> Iterator[MicroBatch]:
    """Micro-batches of the placements for which ``fewest`` is ``few``, in order."""
    chosen = [placement for placement, this in zip(placements, fewest, strict=True) if this == few]
    return micro_batches_of(with_policy(request, policy), chosen)


def nothing(request: PlanRequest) -> IterationPlan:
    """The plan of no samples."""
    return IterationPlan(world_size=request.world.world_size, micro_batches=())
