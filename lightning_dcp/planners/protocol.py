"""What every planner takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lightning_dcp.cost import CostModel, IntArray, RecomputePolicy
from lightning_dcp.plan import IterationPlan, PlanError, Shape
from lightning_dcp.planners.options import check_factor, check_flags, check_integers, check_policy
from lightning_dcp.topology import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan must respect.

    Attributes:
        memory_bytes: predicted peak per rank that no micro-batch may pass.
        max_batch_size: most samples in one micro-batch.
        max_tokens: most padded tokens of one micro-batch per rank.
        min_micro_batches: ``G_min`` (paper, Appendix C).
        max_step_factor: ``G_max`` (paper, Appendix C), at least 1.
        recompute: ``"auto"``, ``"none"`` or ``"full"``.
        exact_shapes: nothing is padded, since the model's result depends on it: only samples of equal shape share a
            micro-batch, on a group whose size divides their first axis.
        packing: micro-batches may hold samples of mixed lengths in one row.

    Raises:
        ValueError: a limit is out of range.
    """

    memory_bytes: int
    max_batch_size: int | None = None
    max_tokens: int | None = None
    min_micro_batches: int = 1
    max_step_factor: float | None = None
    recompute: RecomputePolicy = "auto"
    exact_shapes: bool = False
    packing: bool = False

    def __post_init__(self) -> None:
        if type(self.memory_bytes) is not int:
            raise ValueError(f"memory_bytes={self.memory_bytes!r}; allowed are integers")
        check_integers(self, 1, "min_micro_batches", optional=("max_batch_size", "max_tokens"))
        check_factor("max_step_factor", self.max_step_factor)
        check_policy(self.recompute)
        check_flags(self, "exact_shapes", "packing")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRequest:
    """The samples of one optimizer step and everything that a plan of them depends on.

    Attributes:
        sample_ids: positions in the dataset, in the order of the permutation, without repeats; int64 ``[n]``. Any
            sequence of integers may be given. For a planner that draws: the samples that it may choose from.
        shapes: size of each sample, int64 ``[n, axes]``; any sequence of shapes may be given.
        cost: predicted times and bytes.
        world: ranks and groups.
        limits: what the plan must respect.

    Raises:
        ValueError: not one shape for each sample id, no integers, or a size below 1.
    """

    sample_ids: IntArray
    shapes: IntArray
    cost: CostModel
    world: World
    limits: Limits

    def __init__(
        self,
        *,
        sample_ids: Sequence[int] | IntArray,
        shapes: Sequence[Shape] | IntArray,
        cost: CostModel,
        world: World,
        limits: Limits,
    ) -> None:
        for name, value in (("cost", cost), ("world", world), ("limits", limits)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "sample_ids", _integers("sample_ids", sample_ids, axes=1))
        object.__setattr__(self, "shapes", _integers("shapes", shapes, axes=2))
        if len(self.sample_ids) != len(self.shapes):
            raise ValueError(
                f"{len(self.sample_ids)} sample ids and {len(self.shapes)} shapes; one shape for each"
            )
        if self.shapes.min(initial=1) < 1:
            first = int((self.shapes < 1).any(axis=1).argmax())
            raise ValueError(
                f"sample {self.sample_ids[first]} has shape {self.sizes[first]}; every size must be at least 1"
            )

    @property
    def ids(self) -> tuple[int, ...]:
        """:attr:`sample_ids` as Python integers, as :class:`~lightning_dcp.plan.MicroBatch` takes them."""
        return tuple(self.sample_ids.tolist())

    @property
    def sizes(self) -> tuple[Shape, ...]:
        """:attr:`shapes` as tuples of Python integers."""
        return tuple(map(tuple, self.shapes.tolist()))


def _integers(name: str, values: Any, *, axes: int) -> IntArray:
    """An int64 array of so many axes that nobody can change; without samples ``[0]`` or ``[0, 1]``."""
    array = np.asarray(values)
    if not array.size:
        array = np.zeros((0, 1)[:axes], dtype=np.int64)
    if array.ndim != axes or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is an array of shape {array.shape} and type {array.dtype}; it must be integers of {axes} axes"
        )
    view = array.astype(np.int64, copy=False).view()
    view.flags.writeable = False
    return view


class InfeasibleError(PlanError):
    """A sample fits no allowed setting; the message names it, its length and the limit."""


@runtime_checkable
class Planner(Protocol):
    """A pure function from a step's samples to a plan: no clock, no randomness, no state.

    Attributes:
        name: as in ``DCPStrategy(planner=name)``.
        draws: whether the planner chooses which of the offered samples the step contains (the paper's planners
            do); otherwise it must plan all of them.
        lockstep: whether its plans are for an engine that communicates in every micro-batch (see
            :class:`~lightning_dcp.plan.IterationPlan`).
    """

    @property
    def name(self) -> str:
        """As in ``DCPStrategy(planner=name)``."""
        ...

    @property
    def draws(self) -> bool:
        """Whether the planner chooses the samples."""
        ...

    @property
    def lockstep(self) -> bool:
        """Whether the plans are for an engine that communicates in every micro-batch."""
        ...

    def plan(self, request: PlanRequest) -> IterationPlan:
        """Plan one optimizer step.

        Raises:
            InfeasibleError: a sample fits no allowed setting.
        """
        ...


@runtime_checkable
class DrawingPlanner(Planner, Protocol):
    """A planner that chooses the samples of its step among those that it is offered (``draws`` is ``True``).

    It is offered the first :meth:`lookahead` samples of the epoch's order that no step has had yet, fewer at the
    end of the epoch. The first of them is in every plan, so that no sample waits for ever and none is dropped.
    """

    def lookahead(self, world: World) -> int:
        """How many samples it wants to be offered, at least 1."""
        ...
