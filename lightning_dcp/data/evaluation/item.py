"""What travels from an evaluation loader to the strategy: one micro-batch of one rank, before sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_dcp.data.evaluation.collating import EvaluationHooks
from lightning_dcp.data.evaluation.rounds import Assignment
from lightning_dcp.plan import Shape


class EvaluationItem:
    """One item of validation, test or prediction.

    An object of a plain class, so that Lightning hands it through to the strategy as it is; user code sees its data.

    Attributes:
        data: the collated micro-batch, unsharded: a dict where it comes from a ``DCPDataModule``'s dataset, else
            whatever the user's loader gives.
        ids: samples of the micro-batch; empty where the source has no indices.
        first_rank, sp_size: the group that computes it.
        is_copy: it does not count; see :class:`~lightning_dcp.data.evaluation.rounds.Assignment`.
        shapes: true sizes of the samples; empty where they are not known.
        padded_shape: what they are padded to; empty likewise.
        hooks: sharding and counting; ``None`` where the data comes from a user's own loader.
    """

    __slots__ = ("data", "first_rank", "hooks", "ids", "is_copy", "padded_shape", "shapes", "sp_size")

    def __init__(
        self,
        data: Any,
        assignment: Assignment,
        *,
        shapes: Sequence[Shape] = (),
        padded_shape: Shape = (),
        hooks: EvaluationHooks | None = None,
    ) -> None:
        self.data = data
        self.ids = assignment.ids
        self.first_rank = assignment.first_rank
        self.sp_size = assignment.sp_size
        self.is_copy = assignment.is_copy
        self.shapes = tuple(shapes)
        self.padded_shape = padded_shape
        self.hooks = hooks
