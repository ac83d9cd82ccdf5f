"""Which sizes are measured: a handful of lengths, mostly one sample at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.lengths import representatives
from lightning_dcp.plan import MicroBatch, Shape
from lightning_dcp.planners.assembly import pad
from lightning_dcp.planners.protocol import Limits

_BATCHES = (1, 4, 16, 64)
_NEAR = 0.8
"""Samples of at least this share of a probe's tokens may fill up its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One size to measure.

    Attributes:
        shape: size of the samples.
        sp_size: sequence-parallel size ``p``.
        sample_ids: which samples; their number is the batch size ``b``. One may stand more than once.
        sizes: their true sizes.
    """

    shape: Shape
    sp_size: int
    sample_ids: tuple[int, ...]
    sizes: tuple[Shape, ...]

    @property
    def batch_size(self) -> int:
        """Samples of the micro-batch, ``b``."""
        return len(self.sample_ids)

    @property
    def tokens_per_rank(self) -> float:
        """Padded tokens that one rank computes."""
        return self.batch_size * prod(self.shape) / self.sp_size

    def micro_batch(self, first_rank: int, num_families: int) -> MicroBatch:
        """The micro-batch of the group that starts at ``first_rank``, nothing recomputed."""
        return MicroBatch(
            sample_ids=self.sample_ids,
            shapes=self.sizes,
            padded_shape=pad([self.shape], self.sp_size),
            first_rank=first_rank,
            sp_size=self.sp_size,
            recompute=(0,) * num_families,
            nanoseconds=0,
            bytes=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthProbes:
    """All probes of one length, widest groups first: where memory is short they have the best chance to fit.

    Attributes:
        shape: the length.
        needed: measured whatever it takes: the shortest and the longest length.
        probes: the sizes.
    """

    shape: Shape
    needed: bool
    probes: tuple[Probe, ...]


def plan_probes(
    shapes: IntArray, sp_sizes: tuple[int, ...], limits: Limits, num_lengths: int = 6
) -> tuple[LengthProbes, ...]:
    """Choose what to measure, from the shortest length to the longest.

    Lengths are the edges of the data's length groups (paper 3.1, 3.5), so they stand close where padding to the next
    one would cost most; the shortest edge and the longest sample are among them. One sample at a time gives the
    dependence on the length. Batches of 4, 16 and 64, as long as they have at most half the tokens of the longest
    sample, give that on the batch size: a call's fixed cost is shared by the samples, which ``b = 1`` cannot show.

    Args:
        shapes: sizes of all samples, ``[n, axes]``.
        sp_sizes: sizes to measure.
        limits: no probe is above ``max_batch_size``; ``max_tokens`` per rank is kept where a group size allows it.
        num_lengths: at most so many lengths, at least 2.
    """
    sizes = _Sizes(shapes)
    chosen = representatives(shapes, max(num_lengths, 2))
    return tuple(
        LengthProbes(
            shape=shape,
            needed=position in (0, len(chosen) - 1),
            probes=tuple(_probes_of_length(sizes, shape, sp_sizes, limits)),
        )
        for position, shape in enumerate(chosen)
    )


def _probes_of_length(sizes: _Sizes, shape: Shape, sp_sizes: tuple[int, ...], limits: Limits) -> list[Probe]:
    most = max(prod(sizes.longest) // 2, 4 * prod(sizes.shortest))
    found = []
    for sp_size in sorted(sp_sizes, reverse=True):
        for batch in _BATCHES:
            tokens = batch * prod(shape)
            widest_alone = batch == 1 and sp_size == max(sp_sizes)
            allowed = (
                batch <= (limits.max_batch_size or batch)
                and tokens <= (limits.max_tokens or tokens) * sp_size
                and (batch == 1 or tokens <= most)
            )
            if allowed or widest_alone:
                ids = sizes.samples(shape, batch, limits.exact_shapes)
                found.append(Probe(shape=shape, sp_size=sp_size, sample_ids=ids, sizes=sizes.of(ids)))
    return found


class _Sizes:
    """The samples in the order of their tokens."""

    def __init__(self, shapes: IntArray) -> None:
        self._shapes = shapes
        self._tokens = shapes.prod(axis=1)
        self._order = np.argsort(self._tokens, kind="stable")

    @property
    def shortest(self) -> Shape:
        return self.of((int(self._order[0]),))[0]

    @property
    def longest(self) -> Shape:
        return self.of((int(self._order[-1]),))[0]

    def of(self, ids: tuple[int, ...]) -> tuple[Shape, ...]:
        return tuple(tuple(int(axis) for axis in self._shapes[i]) for i in ids)

    def samples(self, shape: Shape, batch: int, exact: bool) -> tuple[int, ...]:
        """Samples that fill a batch of a size: the nearest ones that fit in, over and over if there are few.

        Args:
            shape: size of the batch.
            batch: number of samples.
            exact: only samples of that very size, since the model minds padding.
        """
        tokens = prod(shape)
        same = self._shapes == np.asarray(shape) if exact else self._shapes <= np.asarray(shape)
        fits = same.all(axis=1) & (self._tokens >= _NEAR * tokens)
        longest_first = self._order[::-1]
        candidates = longest_first[fits[longest_first]][:batch]
        return tuple(int(candidates[i % len(candidates)]) for i in range(batch))
