"""The micro-batches that the self-check is made of, from two samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dcp.plan import MicroBatch, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One micro-batch of the check.

    Attributes:
        sample_ids: its samples.
        shapes: their true shapes.
        padded_shape: what they are padded to.
    """

    sample_ids: tuple[int, ...]
    shapes: tuple[Shape, ...]
    padded_shape: Shape

    def micro_batch(self, first_rank: int, sp_size: int, recompute: tuple[int, ...]) -> MicroBatch:
        """The micro-batch on a group; time and memory play no role here."""
        return MicroBatch(
            sample_ids=self.sample_ids,
            shapes=self.shapes,
            padded_shape=self.padded_shape,
            first_rank=first_rank,
            sp_size=sp_size,
            recompute=recompute,
            nanoseconds=0,
            bytes=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples in different micro-batches.

    Padded ones have one common length, a multiple of every sequence-parallel size, so that sizes can be compared
    without comparing paddings.

    Attributes:
        singles: each alone, unpadded.
        padded_singles: each alone, padded; the shortest first.
        pair: both together, padded.
    """

    singles: tuple[Row, ...]
    padded_singles: tuple[Row, ...]
    pair: Row

    @classmethod
    def of(cls, sample_ids: tuple[int, ...], shapes: tuple[Shape, ...], sp_sizes: tuple[int, ...]) -> Samples:
        """Lay out two samples; the same id twice (a dataset of one sample) counts once."""
        rows = sorted(dict(zip(sample_ids, shapes, strict=True)).items(), key=lambda row: row[1])
        multiple = math.lcm(*sp_sizes)
        padded = tuple(max(axis) for axis in zip(*(shape for _, shape in rows), strict=True))
        padded = (-(-padded[0] // multiple) * multiple, *padded[1:])
        return cls(
            singles=tuple(Row(sample_ids=(i,), shapes=(shape,), padded_shape=shape) for i, shape in rows),
            padded_singles=tuple(Row(sample_ids=(i,), shapes=(shape,), padded_shape=padded) for i, shape in rows),
            pair=Row(
                sample_ids=tuple(i for i, _ in rows),
                shapes=tuple(shape for _, shape in rows),
                padded_shape=padded,
            ),
        )


def choose(shapes: Sequence[Shape], items: Sequence[float]) -> tuple[int, ...]:
    """Positions of two candidates: the first with an item of the loss, and the next with one of another shape.

    Without such a second one the next best is taken: of the same shape, or without an item.
    """
    order = sorted(range(len(shapes)), key=lambda i: items[i] <= 0)
    first, others = order[0], order[1:]
    others.sort(key=lambda i: (items[i] <= 0, shapes[i] == shapes[first]))
    return (first, *others[:1])
