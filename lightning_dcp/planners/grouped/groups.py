"""The offered samples in groups of similar sizes (paper 3.1), each in the order of the permutation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import INFEASIBLE, IntArray, RecomputePolicy
from lightning_dcp.lengths import length_groups
from lightning_dcp.planners.assembly import raise_infeasible, settings_within
from lightning_dcp.planners.protocol import PlanRequest

_BITS = 6
"""Leading binary digits of a length that the edges are chosen by: at most 3 % above it."""

_MEMBERS, _LEAST_GROUPS = 128, 16
"""Samples offered for each group of tokens that is chosen: finer groups fill no batches. With 16 groups padding is
small."""

_SIDES = 8
"""Most groups of each further axis. Few are enough: images and videos come in few resolutions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Samples that may share a micro-batch.

    Attributes:
        order: positions in the request, group behind group, each in the order of the permutation, int64 ``[n]``.
        starts: where each group starts in ``order``, and the end of the last, int64 ``[K + 1]``.
        sizes: largest size on each axis among the samples of each group, int64 ``[K, axes]``.
        tokens: tokens of the samples before each place of ``order``, int64 ``[n + 1]``.
        spared: groups of samples that fit with fewer recomputed layers than the request's policy asks for, and only
            then; they are planned with the fewest that fit. bool ``[K]``.
    """

    order: IntArray
    starts: IntArray
    sizes: IntArray
    tokens: IntArray
    spared: NDArray[np.bool_]

    @property
    def counts(self) -> IntArray:
        """Samples of each group, int64 ``[K]``."""
        return np.diff(self.starts)

    def members(self, group: int) -> IntArray:
        """Positions of a group's samples in the request, ascending."""
        return self.order[self.starts[group] : self.starts[group + 1]]

    def places(self) -> tuple[IntArray, IntArray]:
        """Group of each sample in the order of the request, and its place in the group, int64 ``[n]``."""
        group, place = np.empty_like(self.order), np.empty_like(self.order)
        group[self.order] = np.repeat(np.arange(len(self.counts)), self.counts)
        place[self.order] = np.arange(len(self.order)) - np.repeat(self.starts[:-1], self.counts)
        return group, place

    def fits(self, request: PlanRequest, sp_size: int) -> NDArray[np.bool_]:
        """Whether one sample of each group fits on ``sp_size`` ranks, bool ``[K]``."""
        fits = _fits(request, sp_size, self.sizes)
        if self.spared.any():
            fits = np.where(self.spared, _fits(with_policy(request, "auto"), sp_size, self.sizes), fits)
        return fits

    @classmethod
    def build(
        cls,
        request: PlanRequest,
        sp_sizes: Sequence[int],
        edges: Sequence[int] | None,
        max_groups: int,
        spare: bool = False,
    ) -> Groups:
        """Sort the offered samples into groups.

        A group holds the tokens between two edges and, of samples with several axes, one range of each further axis
        (one value where at most 8 occur), as padding is the product of all axes. With ``limits.exact_shapes`` a
        group is one shape. So is each sample of a group whose largest sizes together fit nothing.

        Args:
            request: the offered samples, at least one.
            sp_sizes: sizes that may be used; every sample must fit one.
            edges: upper edges in tokens, ascending; samples above the last one form one more group. ``None``: the
                edges that pad the offered samples least.
            max_groups: most edges that are chosen; fewer where few samples are offered.
            spare: samples that fit none of the sizes under the request's recompute policy form groups of their own.

        Raises:
            InfeasibleError: a sample fits none of the sizes; the first such sample is named.
        """
        shapes = request.shapes
        if request.limits.exact_shapes:
            columns = [*shapes.T]
        else:
            columns = [_by_tokens(shapes.prod(axis=1), edges, max_groups)]
            columns += [_by_side(side) for side in shapes.T[1:]]
        spared = np.zeros(len(shapes), dtype=bool)
        groups = cls._of(shapes, columns, spared)
        if spare and groups._unfit(request, sp_sizes).any():
            spared = ~np.any([_fits(request, p, shapes) for p in sp_sizes], axis=0)
            columns.append(spared.astype(np.int64))
            groups = cls._of(shapes, columns, spared)
        unfit = groups._unfit(request, sp_sizes)
        if unfit.any():
            alone = unfit[groups.places()[0]]
            groups = cls._of(shapes, [*columns, *np.where(alone, shapes.T, 0)], spared)
            unfit = groups._unfit(request, sp_sizes)
        if unfit.any():
            first = int(np.argmax(unfit[groups.places()[0]]))
            raise_infeasible(with_policy(request, "auto") if spare else request, first, sp_sizes)
        return groups

    def _unfit(self, request: PlanRequest, sp_sizes: Sequence[int]) -> NDArray[np.bool_]:
        return np.asarray(~np.any([self.fits(request, p) for p in sp_sizes], axis=0))

    @classmethod
    def _of(cls, shapes: IntArray, columns: Sequence[IntArray], spared: NDArray[np.bool_]) -> Groups:
        """Groups of equal values in all columns, ordered by them."""
        number = _ranks(columns[0])
        for column in columns[1:]:
            rank = _ranks(column)
            number = _ranks(number * (int(rank.max()) + 1) + rank)
        if number.max() < 2**15:
            number = number.astype(np.int16)  # sorted in linear time
        order = np.argsort(number, kind="stable")
        counts = np.bincount(number)
        starts = np.cumsum(counts) - counts
        shapes = shapes[order]
        return cls(
            order=order,
            starts=np.append(starts, len(order)),
            sizes=np.maximum.reduceat(shapes, starts, axis=0),
            tokens=np.append(0, np.cumsum(shapes.prod(axis=1))),
            spared=spared[order[starts]],
        )


def with_policy(request: PlanRequest, policy: RecomputePolicy) -> PlanRequest:
    """The request with another recompute policy."""
    return replace(request, limits=replace(request.limits, recompute=policy))


def _by_tokens(tokens: IntArray, edges: Sequence[int] | None, max_groups: int) -> IntArray:
    if edges is None:
        count = min(max_groups, max(len(tokens) // _MEMBERS, _LEAST_GROUPS))
        # Rounded up, since the dynamic program takes time with the square of the different lengths.
        edges = length_groups(_rounded_up(tokens), count)
    return np.searchsorted(np.asarray(edges, dtype=np.int64), tokens)


def _by_side(side: IntArray) -> IntArray:
    return np.searchsorted(np.asarray(length_groups(side, _SIDES), dtype=np.int64), side)


def _rounded_up(lengths: IntArray) -> IntArray:
    """Lengths rounded up to numbers of 6 leading binary digits."""
    # frexp is exact below 2**53: a logarithm may differ in its last bit between two machines.
    digits = np.frexp(lengths.astype(np.float64))[1].astype(np.int64)
    unit = np.int64(1) << np.maximum(digits - _BITS, 0)
    return np.asarray(-(-lengths // unit) * unit)


def _ranks(values: IntArray) -> IntArray:
    """Values numbered from 0 without gaps, in their order."""
    least, most = int(values.min()), int(values.max())
    if most - least < 2**16:
        present: NDArray[np.bool_] = np.zeros(most - least + 1, dtype=bool)
        present[values - least] = True
        return (np.cumsum(present) - 1)[values - least]
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def _fits(request: PlanRequest, sp_size: int, sizes: IntArray) -> NDArray[np.bool_]:
    return np.asarray(settings_within(request, sp_size, np.asarray(1), sizes).nanoseconds < INFEASIBLE)
