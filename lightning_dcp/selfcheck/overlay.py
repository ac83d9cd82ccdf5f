"""Recordings of two runs laid over each other: where they first differ.

Shapes: B samples, S padded length, s = S / p tokens of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dcp.plan import Shape
from lightning_dcp.selfcheck.recording import Recording
from lightning_dcp.selfcheck.samples import Row

Pair = tuple[Tensor, Tensor]
"""What was found and what it should be, cut to the same shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two runs differ.

    Attributes:
        order: what comes first over all ranks: certainty (lower is surer), micro-batch, event in it.
        text: place and size, for a sentence.
    """

    order: tuple[int, int, int]
    text: str


def first_in_shards(
    whole: Recording, shards: Recording, rows: Sequence[Row], sp_size: int, group_rank: int, threshold: float
) -> Difference | None:
    """The first tensor of a shard that is not this rank's contiguous part of the unsharded one.

    Only real tokens are compared. A tensor whose shape is neither that of a shard nor the whole one is named only
    where nothing else is.
    """
    odd: Difference | None = None
    for step, (row, reference, found) in enumerate(zip(rows, whole.rows, shards.rows, strict=False)):
        for order, (event, expected) in enumerate(reference.items()):
            if event not in found:
                continue
            pair = _part(expected, found[event], row, sp_size, group_rank)
            place = whole.place(event)
            if pair is None:
                shapes = f"{tuple(found[event].shape)} for a shard, {tuple(expected.shape)} for the whole"
                odd = odd or Difference(order=(1, step, order), text=f"{place} (shape {shapes})")
            elif (apart := _apart(*pair)) > threshold:
                return Difference(order=(0, step, order), text=_sized(place, apart))
    return odd


def first_in_padding(
    alone: Recording, together: Recording, singles: Sequence[Row], padded: Row, threshold: float
) -> Difference | None:
    """The first tensor that depends, at real tokens, on the padding or on the other sample."""
    for order, (event, found) in enumerate(together.rows[0].items() if together.rows else ()):
        for index, (row, reference) in enumerate(zip(singles, alone.rows, strict=False)):
            if event in reference:
                pair = _sample(found, reference[event], index, padded, row.padded_shape)
                if pair is not None and (apart := _apart(*pair)) > threshold:
                    text = f"{_sized(together.place(event), apart)}, at real tokens of sample {row.sample_ids[0]}"
                    return Difference(order=(0, 0, order), text=text)
    return None


def first_in_repetition(
    once: Recording, again: Recording, threshold: float, *, recompute: bool = False
) -> Difference | None:
    """The first tensor that differs between two runs of the same micro-batches, or a forward and its recompute."""
    for step, (first, second) in enumerate(
        zip(once.rows, again.repeated if recompute else again.rows, strict=False)
    ):
        for order, (event, expected) in enumerate(first.items()):
            found = second.get(event)
            if (
                found is not None
                and found.shape == expected.shape
                and (apart := _apart(found, expected)) > threshold
            ):
                return Difference(order=(0, step, order), text=_sized(once.place(event), apart))
    return None


def _sized(place: str, apart: float) -> str:
    return f"{place} (by {apart:.1e} of its norm)"


def _apart(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, where that is finite; NaN counts as infinite."""
    b = expected.double()
    # Masks hold -inf on purpose.
    finite = b.isfinite()
    difference = float(torch.where(finite, found.double() - b, 0.0).norm())
    norm = float(torch.where(finite, b, 0.0).norm())
    if difference == 0.0:
        return 0.0
    return difference / norm if norm > 0.0 and math.isfinite(difference) else math.inf


def _part(expected: Tensor, found: Tensor, row: Row, sp_size: int, group_rank: int) -> Pair | None:
    """What a shard holds and the part of the whole that it should equal, real tokens only; ``None`` if unclear."""
    if expected.shape == found.shape:
        return found, expected
    if expected.dim() != found.dim():
        return None
    batch, length = len(row.sample_ids), row.padded_shape[0]
    shard = length // sp_size
    if expected.shape[0] == batch * length and found.shape[0] == batch * shard:
        # [B S, ...]: rows of a shard are no contiguous part before the two axes are taken apart.
        expected = expected.reshape(batch, length, *expected.shape[1:])
        found = found.reshape(batch, shard, *found.shape[1:])
    axes = [i for i, (a, b) in enumerate(zip(expected.shape, found.shape, strict=True)) if a != b]
    if len(axes) != 1 or expected.shape[axes[0]] != sp_size * found.shape[axes[0]]:
        return None
    axis, size = axes[0], found.shape[axes[0]]
    expected = expected.narrow(axis, group_rank * size, size)
    if size != shard:
        return found, expected
    real_Bs = _real(row.shapes, length).narrow(1, group_rank * shard, shard).to(found.device)
    if axis > 0 and found.shape[0] == batch:
        return found.movedim(axis, 1)[real_Bs], expected.movedim(axis, 1)[real_Bs]
    real_s = real_Bs.any(0)
    return found.movedim(axis, 0)[real_s], expected.movedim(axis, 0)[real_s]


def _real(shapes: Sequence[Shape], length: int) -> Tensor:
    """``[B, S]``: True where a sample has a token (first axis)."""
    return torch.arange(length) < torch.tensor([shape[0] for shape in shapes])[:, None]


def _sample(found: Tensor, reference: Tensor, index: int, padded: Row, shape: Shape) -> Pair | None:
    """One sample's part of a padded tensor and the tensor of the sample alone; ``None`` if unclear."""
    batch, length = len(padded.sample_ids), padded.padded_shape[0]
    if found.dim() != reference.dim():
        return None
    if found.shape[0] == batch * length and reference.shape[0] == shape[0]:
        found, reference = found.reshape(batch, length, *found.shape[1:]), reference[None]
    if found.shape[0] == batch and reference.shape[0] == 1:
        found = found[index : index + 1]
    if any(a < b for a, b in zip(found.shape, reference.shape, strict=True)):
        return None
    return found[tuple(slice(0, size) for size in reference.shape)], reference
