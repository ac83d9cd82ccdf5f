"""Where the menus get their times from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import INFEASIBLE, CostModel, IntArray, Lines
from lightning_dcp.planners.assembly import (
    may_share,
    padded_tokens,
    round_up_all,
    settings_within,
)
from lightning_dcp.planners.padded.samples import Samples
from lightning_dcp.planners.protocol import Limits, PlanRequest
from lightning_dcp.planners.ranges import RangeMax


class Source(Protocol):
    """Times of micro-batches of ``U`` kinds.

    Attributes:
        counts: samples of each kind, shape ``[U]``.
    """

    @property
    def counts(self) -> IntArray:
        """Samples of each kind."""
        ...

    def rows(self, sp_size: int, batch_sizes: IntArray, columns: slice) -> tuple[IntArray, IntArray]:
        """Times of batch sizes ``[R]`` of some of the kinds, each ``[R, n]``.

        Returns:
            Nanoseconds within all limits, and those without recompute and limits.
        """
        ...

    def times(self, sp_size: int, batch_sizes: IntArray, kinds: IntArray) -> IntArray:
        """Nanoseconds within all limits of single questions, batch sizes and kinds ``[m]``, shape ``[m]``."""
        ...

    def most(self, sp_size: int) -> IntArray:
        """The largest batch size that limits other than memory allow, shape ``[U]``."""
        ...

    def least_share(self, sp_size: int, makespan: int) -> IntArray:
        """At most the nanoseconds for a sample in any batch that ends within ``makespan``, shape ``[U]``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Micro-batches of samples of one shape.

    Attributes:
        limits: limits of the request.
        tokens: for each ``p`` the tokens that a sample of each shape counts with, shape ``[U]``.
        allowed: for each ``p`` which shapes may run there, shape ``[U]``.
        lines: for each ``p`` the cost of these samples.
        floors: for each ``p`` lines that are not above it, see :meth:`Lines.plain_line`.
        largest: for each ``p`` the largest batch size that limits other than memory allow; each ``[U]``.
        counts: samples of each shape, shape ``[U]``.
        cost: the cost model.
    """

    limits: Limits
    tokens: Mapping[int, IntArray]
    allowed: Mapping[int, NDArray[np.bool_]]
    lines: Mapping[int, Lines]
    floors: Mapping[int, tuple[IntArray, IntArray]]
    largest: Mapping[int, IntArray]
    counts: IntArray
    cost: CostModel

    @classmethod
    def build(
        cls,
        request: PlanRequest,
        samples: Samples,
        tokens: Mapping[int, IntArray],
        allowed: Mapping[int, NDArray[np.bool_]],
    ) -> Alone:
        """Look the samples up once for each ``p``."""
        lines = {p: request.cost.lines(p, t) for p, t in tokens.items()}
        return cls(
            limits=request.limits,
            tokens=tokens,
            allowed=allowed,
            lines=lines,
            floors={p: line.plain_line() for p, line in lines.items()},
            largest={p: _largest(request.limits, samples.counts, p, t) for p, t in tokens.items()},
            counts=samples.counts,
            cost=request.cost,
        )

    def rows(self, sp_size: int, batch_sizes: IntArray, columns: slice) -> tuple[IntArray, IntArray]:
        """See :class:`Source`."""
        lines = self.lines[sp_size].part(columns)
        times, plain = lines.times(batch_sizes, self.limits.memory_bytes, self.limits.recompute)
        refused = (batch_sizes[:, None] > self.largest[sp_size][columns]) | ~self.allowed[sp_size][columns]
        return np.where(refused, INFEASIBLE, times), plain

    def times(self, sp_size: int, batch_sizes: IntArray, kinds: IntArray) -> IntArray:
        """See :class:`Source`."""
        limits, tokens = self.limits, self.tokens[sp_size][kinds]
        found = self.cost.settings(sp_size, batch_sizes, tokens, limits.memory_bytes, limits.recompute).nanoseconds
        refused = (batch_sizes > self.largest[sp_size][kinds]) | ~self.allowed[sp_size][kinds]
        return np.where(refused, INFEASIBLE, found)

    def most(self, sp_size: int) -> IntArray:
        """See :class:`Source`."""
        return self.largest[sp_size]

    def least_share(self, sp_size: int, makespan: int) -> IntArray:
        """See :class:`Source`."""
        first, growth = self.floors[sp_size]
        in_time = 1 + np.maximum(makespan - first, 0) // np.maximum(growth, 1)
        most = np.maximum(np.minimum(in_time, self.most(sp_size)), 1)
        beyond = first - growth
        return np.maximum(growth + np.where(beyond > 0, beyond // most, beyond), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Micro-batches of the samples from each one on, which may be larger than each of their samples.

    Attributes:
        request: the request.
        samples: its samples; the kinds are the single samples.
        alone: the same samples alone, no dearer than with others.
        largest: largest sizes of neighbours.
    """

    request: PlanRequest
    samples: Samples
    alone: Alone
    largest: RangeMax

    @property
    def counts(self) -> IntArray:
        """Each sample is a kind."""
        return np.ones(len(self.samples.order), dtype=np.int64)

    def rows(self, sp_size: int, batch_sizes: IntArray, columns: slice) -> tuple[IntArray, IntArray]:
        """See :class:`Source`; what begins too near the end does not fit."""
        count = len(self.samples.shapes)
        start, stop, _ = columns.indices(count)
        widths = batch_sizes.tolist()
        lasts = [max(min(stop, count - b + 1), start) for b in widths]
        asked = np.arange(start, stop) < np.asarray(lasts)[:, None]
        largest = np.concatenate(
            [self.largest.windows(start, last, b) for b, last in zip(widths, lasts, strict=True) if last > start]
            or [self.samples.shapes[:0]]
        )
        times = np.full(asked.shape, INFEASIBLE, dtype=np.int64)
        times[asked] = self._priced(sp_size, np.repeat(batch_sizes, asked.sum(axis=1)), largest)
        return times, np.zeros_like(times)

    def _priced(self, sp_size: int, batch_sizes: IntArray, largest: IntArray) -> IntArray:
        """Nanoseconds of micro-batches ``[m]`` with these largest sizes ``[m, axes]``; neighbours are often equal."""
        new = np.append(True, (largest[1:] != largest[:-1]).any(axis=-1) | (np.diff(batch_sizes) != 0))[
            : len(largest)
        ]
        found = settings_within(self.request, sp_size, batch_sizes[new], largest[new]).nanoseconds
        return np.asarray(found[np.cumsum(new) - 1])

    def times(self, sp_size: int, batch_sizes: IntArray, kinds: IntArray) -> IntArray:
        """See :class:`Source`."""
        ends = np.minimum(kinds + batch_sizes, len(self.samples.shapes))
        return self._priced(sp_size, batch_sizes, self.largest.between(kinds, ends))

    def most(self, sp_size: int) -> IntArray:
        """See :class:`Source`."""
        return self.alone.most(sp_size)[self.samples.unit]

    def least_share(self, sp_size: int, makespan: int) -> IntArray:
        """See :class:`Source`."""
        return self.alone.least_share(sp_size, makespan)[self.samples.unit]


def _largest(limits: Limits, counts: IntArray, sp_size: int, tokens: IntArray) -> IntArray:
    count = int(counts.sum())
    most = counts if limits.exact_shapes else np.full(len(counts), count, dtype=np.int64)
    if limits.max_batch_size is not None:
        most = np.minimum(most, limits.max_batch_size)
    if limits.max_tokens is not None:
        # The largest b with b * tokens // p <= max_tokens; 0 where not even one fits.
        most = np.minimum(most, ((limits.max_tokens + 1) * sp_size - 1) // tokens)
    return most


def for_bounds(request: PlanRequest, samples: Samples, sp_sizes: tuple[int, ...]) -> Alone:
    """Each sample with no more than every plan must pad it by: its first axis to a multiple of ``p``."""
    distinct = samples.distinct
    tokens = {p: round_up_all(distinct, p) for p in sp_sizes}
    own = distinct.prod(axis=-1)
    allowed = {p: (t == own) | (not request.limits.exact_shapes) for p, t in tokens.items()}
    return Alone.build(request, samples, tokens, allowed)


def for_certificates(samples: Samples, bounds: Alone) -> Alone:
    """Each sample with the fewest padded tokens of all that have as many tokens or more; see the certificate."""
    if samples.nested or bounds.limits.exact_shapes:
        return bounds
    own = samples.distinct.prod(axis=-1)
    last_equal = np.searchsorted(-own, -own, side="right") - 1
    tokens = {p: np.minimum.accumulate(t)[last_equal] for p, t in bounds.tokens.items()}
    if all((tokens[p] == t).all() for p, t in bounds.tokens.items()):
        return bounds
    lines = {p: bounds.cost.lines(p, t) for p, t in tokens.items()}
    return replace(
        bounds,
        tokens=tokens,
        lines=lines,
        floors={p: line.plain_line() for p, line in lines.items()},
        largest={p: _largest(bounds.limits, bounds.counts, p, t) for p, t in tokens.items()},
    )


def for_plans(request: PlanRequest, samples: Samples, bounds: Alone) -> Source:
    """Micro-batches of neighbours as plans pad them; the source of the bounds where that is the same."""
    if not samples.nested and not request.limits.exact_shapes:
        return Windows(request=request, samples=samples, alone=bounds, largest=RangeMax(samples.shapes))
    tokens = {p: padded_tokens(samples.distinct, p) for p in bounds.tokens}
    if all((tokens[p] == bounds.tokens[p]).all() for p in tokens):
        return bounds
    allowed = {p: may_share(request.limits, p, samples.distinct) for p in tokens}
    lines = {
        p: bounds.lines[p] if (t == bounds.tokens[p]).all() else request.cost.lines(p, t)
        for p, t in tokens.items()
    }
    largest = {p: _largest(request.limits, samples.counts, p, t) for p, t in tokens.items()}
    return replace(bounds, tokens=tokens, allowed=allowed, lines=lines, largest=largest)
