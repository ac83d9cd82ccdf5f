"""The running micro-batch, published through one slot.

This module holds the project's only module state. It is a plain variable, not a thread local: on CUDA the
recompute of a checkpointed layer runs in a thread of autograd, which must see the same micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from lightning_dcp.plan import Shape

LossWeighting = Literal["token", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SPGroup:
    """A sequence-parallel group as seen from this rank.

    Attributes:
        ranks: global ranks of the members, ascending and consecutive.
        rank: index of this rank in the group, ``0 .. size - 1``.
        handle: process group; ``None`` for a group of one rank, where every exchange is the identity.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Sequence-parallel size ``p``."""
        return len(self.ranks)


class ExchangeError(RuntimeError):
    """An exchange of a group ended without a result: another rank left it, has gone, or did not come in time."""


@dataclass(slots=True, kw_only=True)
class MicroBatchContext:
    """Everything that code inside a micro-batch may ask about it.

    Attributes:
        group: the sequence-parallel group.
        sample_ids: samples of the micro-batch in batch order.
        shapes: their true shapes.
        padded_shape: shape that they are padded to, before sharding.
        packed: the samples stand one behind the other in one row of ``padded_shape[0]`` tokens.
        seed, epoch: with the sample id they determine the random numbers of ``rand_per_sample``.
        weighting: whether the objective is the mean over items (tokens) or over samples.
        items_per_sample_B: valid items of each whole (unsharded) sample, float64; needed by sample weighting.
        is_copy: the samples belong to another rank's item of the same evaluation, and nothing of this call counts. It
            runs so that all ranks call equally often; never set in training.
        interceptions: calls of scaled_dot_product_attention that were exchanged over the group.
        gathers: calls of ``gather`` over the group.
        failures: reasons why the result is void. They are raised on all ranks after the micro-batch, since an
            exception in one rank would leave its peers waiting in the next exchange.
        masks_differ: set by the exchange, on the device, to a value above zero where ranks disagree on a mask.
    """

    group: SPGroup = field(default_factory=SPGroup)
    sample_ids: tuple[int, ...] = ()
    shapes: tuple[Shape, ...] = ()
    padded_shape: Shape = ()
    packed: bool = False
    seed: int = 0
    epoch: int = 0
    weighting: LossWeighting = "token"
    items_per_sample_B: torch.Tensor | None = None
    is_copy: bool = False
    interceptions: int = 0
    gathers: int = 0
    failures: list[str] = field(default_factory=list)
    masks_differ: torch.Tensor | None = None

    @property
    def has_padding(self) -> bool:
        """Whether any sample is shorter than the padded shape; equal on all ranks of the group."""
        if self.packed:
            return sum(shape[0] for shape in self.shapes) != self.padded_shape[0]
        return any(shape != self.padded_shape for shape in self.shapes)


_active: MicroBatchContext | None = None


def current() -> MicroBatchContext:
    """The running micro-batch; outside of one a fresh context with a group of one rank (identity)."""
    return _active if _active is not None else MicroBatchContext()


@contextmanager
def activate(context: MicroBatchContext) -> Iterator[MicroBatchContext]:
    """Publish a micro-batch from before its ``training_step`` to the end of its backward.

    Raises:
        RuntimeError: another micro-batch is active; they do not nest.
    """
    global _active
    if _active is not None:
        raise RuntimeError(f"samples {_active.sample_ids} are still running; micro-batches do not nest")
    _active = context
    try:
        yield context
    finally:
        _active = None
