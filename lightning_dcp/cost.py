"""The cost model that the planners ask: Eq. 4 to 6 in integers.

A profile is a table of measurements. The cost model interpolates it linearly in the number of tokens and in
the batch size. All arithmetic is on int64 nanoseconds and bytes, so every rank gets the same answer to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np

from lightning_dcp.interpolation import MAX_VALUE, Grid, IntArray
from lightning_dcp.plan import Shape
from lightning_dcp.profile import Measurement, Profile
from lightning_dcp.terms import UNFITTING, Lines, RecomputePolicy, Settings, Terms

__all__ = ["INFEASIBLE", "CostModel", "IntArray", "Lines", "RecomputePolicy", "Settings"]

INFEASIBLE = UNFITTING
"""Nanoseconds of a setting that no number of recomputed layers makes fit the memory limit."""


class CostModel:
    """Predicted time and memory of a micro-batch, per rank, from a profile.

    Times and bytes never fall with the length of a sample or with the batch size (the lower bound of a plan
    stands on it): where a measurement says otherwise, it is raised to its neighbour's value. Beyond the measured
    sizes the last line is carried on, not below proportion; so lengths far beyond the longest probe come out too
    cheap where attention grows with their square.

    Args:
        profile: the measurements.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.num_layers = profile.num_layers
        self.sp_sizes = tuple(sorted({m.sp_size for m in profile.measurements}))
        self._grids = {
            p: Grid.build(
                (m.batch_size, prod(m.shape), _quantities(m)) for m in profile.measurements if m.sp_size == p
            )
            for p in self.sp_sizes
        }

    @cached_property
    def _parts(self) -> dict[int, Grid]:
        # Not before somebody asks: training without packing never does.
        return {p: Grid.build(_parts(grid)) for p, grid in self._grids.items()}

    def nanoseconds(self, batch_size: int, shape: Shape, sp_size: int, recompute: tuple[int, ...]) -> int:
        """Time ``T`` of one micro-batch (Eq. 4), ``recompute`` layers of each family recomputed (Eq. 5)."""
        terms = self._terms(sp_size, np.asarray(batch_size), np.asarray(prod(shape)))
        return int(terms.time(self._counts(recompute)))

    def times(
        self, sp_size: int, batch_size: IntArray, tokens: IntArray, recompute: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Nanoseconds of micro-batches ``[n]`` without recompute, and what counts ``[n, families]`` of it add."""
        terms = self._terms(sp_size, batch_size, tokens)
        plain = terms.plain()
        return plain, terms.time(recompute) - plain

    def bytes(self, batch_size: int, shape: Shape, sp_size: int, recompute: tuple[int, ...]) -> int:
        """Peak memory ``M`` of one micro-batch (Eq. 6)."""
        terms = self._terms(sp_size, np.asarray(batch_size), np.asarray(prod(shape)))
        return int(terms.memory(self._counts(recompute), self.profile.static_bytes))

    def settings(
        self,
        sp_size: int,
        batch_size: IntArray,
        tokens: IntArray,
        memory_bytes: int,
        policy: RecomputePolicy = "auto",
    ) -> Settings:
        """Fewest recomputed layers that fit, with their time and memory, for arrays of candidates.

        Algorithm 1 as meant: the smallest ``r`` within the memory. With several families the counts of least
        time within the memory, of equal ones the fewest (exact up to 1024 combinations of the smaller families;
        beyond, their counts are tried in equal steps). Where nothing fits, the counts of least memory.

        Args:
            sp_size: ``p``.
            batch_size: samples per micro-batch.
            tokens: padded tokens of each sample; broadcast against ``batch_size``.
            memory_bytes: limit per rank.
            policy: ``"auto"`` searches, ``"none"`` recomputes nothing, ``"full"`` every layer.
        """
        terms = self._terms(sp_size, np.asarray(batch_size), np.asarray(tokens))
        return self._best(terms, memory_bytes, policy)

    def _best(self, terms: Terms, memory_bytes: int, policy: RecomputePolicy) -> Settings:
        return Settings.within(terms, memory_bytes, self.profile.static_bytes, policy)

    def lines(self, sp_size: int, tokens: IntArray) -> Lines:
        """Look up samples once, for questions about many batch sizes.

        Args:
            sp_size: ``p``.
            tokens: padded tokens of each sample, shape ``[n]``.
        """
        self._check_size(sp_size)
        grid = self._grids[sp_size]
        return Lines(
            grid=grid,
            rows=grid.rows(tokens),
            layers=np.asarray(self.num_layers, dtype=np.int64),
            static_bytes=self.profile.static_bytes,
        )

    def packed_parts(self, sp_size: int, tokens: IntArray) -> IntArray:
        """What samples add to a packed row, shape ``[..., quantities]``; sums over samples go to :meth:`packed`.

        A packed row costs what a row without tokens costs, once, and for each sample what it adds at its own
        length (attention reaches no further): the most that it adds in any measured batch, so that samples too
        short to fill the device alone are not taken for free.

        Args:
            sp_size: ``p``.
            tokens: true tokens of each sample.
        """
        self._check_size(sp_size)
        return np.ascontiguousarray(np.moveaxis(self._parts[sp_size].at(np.asarray(1), tokens), 0, -1))

    def packed(
        self, sp_size: int, parts: IntArray, memory_bytes: int, policy: RecomputePolicy = "auto"
    ) -> Settings:
        """:meth:`settings` of packed rows.

        The places that fill the row up to a multiple of ``p`` are not counted.

        Args:
            sp_size: ``p``.
            parts: sums of :meth:`packed_parts` over the samples of each row, shape ``[..., quantities]``.
            memory_bytes: limit per rank.
            policy: as in :meth:`settings`.
        """
        terms = self.packed_terms(sp_size, parts)
        return self._best(terms, memory_bytes, policy)

    def packed_row(self, sp_size: int, lengths: Sequence[int], recompute: tuple[int, ...]) -> tuple[int, int]:
        """Nanoseconds and bytes of one packed row with these counts of recomputed layers."""
        parts = self.packed_parts(sp_size, np.asarray(lengths, dtype=np.int64)).sum(axis=0)
        terms, counts = self.packed_terms(sp_size, parts), self._counts(recompute)
        return int(terms.time(counts)), int(terms.memory(counts, self.profile.static_bytes))

    def useful_time(self, tokens: IntArray) -> IntArray:
        """Rank-nanoseconds of the work that samples are trained for: no recompute, exchange, padding or fixed cost.

        What each adds to a full row on the smallest group; it weighs samples alike whatever plan they end up in.

        Args:
            tokens: true tokens of each sample.
        """
        p = self.sp_sizes[0]
        parts = np.moveaxis(self.packed_parts(p, tokens), -1, 0)
        terms = Terms.from_stack(parts, np.asarray(self.num_layers, dtype=np.int64))
        return p * terms.time(np.zeros(len(self.num_layers), dtype=np.int64))

    def packed_terms(self, sp_size: int, parts: IntArray) -> Terms:
        """Eq. 4 to 6 of packed rows, for questions that :meth:`packed` does not answer; arguments as there."""
        self._check_size(sp_size)
        base = self._grids[sp_size].at(np.asarray(1), np.asarray(0))
        values = np.minimum(base + np.asarray(parts), MAX_VALUE)
        return Terms.from_stack(np.moveaxis(values, -1, 0), np.asarray(self.num_layers, dtype=np.int64))

    def batch_sizes(self, limit: int) -> tuple[int, ...]:
        """Batch sizes worth trying up to ``limit``: all up to 8, then four per octave, and the measured ones."""
        spaced = {(4 + k) << octave for octave in range(1, 31) for k in range(4)}
        measured = {int(b) for grid in self._grids.values() for b in grid.batch_nodes}
        return tuple(sorted(b for b in {*range(1, 9), *spaced, *measured} if b <= limit))

    def least_share(
        self,
        sp_size: int,
        batch_range: tuple[IntArray, IntArray],
        tokens: IntArray,
        memory_bytes: int,
        policy: RecomputePolicy = "auto",
    ) -> tuple[IntArray, IntArray]:
        """Lower bounds of ``T(b)`` and of ``T(b) / b`` over ranges of batch sizes; exact for ranges of one.

        Between two measured batch sizes ``T`` is a line in ``b`` for each ``r``, so ``T / b`` is least at an end
        of the range; and what fits the memory at any ``b`` of the range fits it at the first.

        Args:
            sp_size: ``p``.
            batch_range: first and last ``b`` of each range, without a measured batch size between them.
            tokens: padded tokens of each sample; broadcast against the ranges.
            memory_bytes: limit per rank.
            policy: as in :meth:`settings`.

        Returns:
            Nanoseconds of the first ``b`` (:data:`INFEASIBLE` if it does not fit), and nanoseconds per sample,
            rounded down.
        """
        low, high = (np.asarray(end, dtype=np.int64) for end in batch_range)
        first = self.settings(sp_size, low, tokens, memory_bytes, policy).nanoseconds
        share = first // low
        if (low == high).all():
            return first, share
        at_high = self._terms(sp_size, high, tokens)
        mixed = replace(
            self._terms(sp_size, low, tokens),
            plain_time=at_high.plain_time,
            recompute_time=at_high.recompute_time,
            constant_time=at_high.constant_time,
        )
        last = mixed.time(mixed.counts(policy, memory_bytes - self.profile.static_bytes))
        # Each quantity was rounded down once, by less than a nanosecond a layer.
        slack = 2 * sum(self.num_layers) + 1
        least = np.maximum(np.minimum((first - slack) // low, (last - slack) // high), 0)
        return first, np.asarray(np.where(low == high, share, least))

    def _terms(self, sp_size: int, batch_size: IntArray, tokens: IntArray) -> Terms:
        self._check_size(sp_size)
        values = self._grids[sp_size].at(batch_size, tokens)
        return Terms.from_stack(values, np.asarray(self.num_layers, dtype=np.int64))

    def _check_size(self, sp_size: int) -> None:
        if sp_size not in self._grids:
            raise ValueError(f"sequence-parallel size {sp_size} was not profiled; the profile has {self.sp_sizes}")

    def _counts(self, recompute: tuple[int, ...]) -> IntArray:
        counts = recompute or (0,) * len(self.num_layers)
        allowed = len(counts) == len(self.num_layers) and all(
            0 <= r <= n for r, n in zip(counts, self.num_layers, strict=True)
        )
        if not allowed:
            raise ValueError(f"recompute is {recompute}; allowed are counts from 0 up to {self.num_layers}")
        return np.asarray(counts, dtype=np.int64)


def _quantities(m: Measurement) -> IntArray:
    """One column of a grid: per-layer time, recompute, activation, input for each family, then the constants."""
    per_layer = [f + b for f, b in zip(m.forward, m.backward, strict=True)]
    row = [*per_layer, *m.recompute, *m.activation_bytes, *m.input_bytes, m.constant_time, m.constant_bytes]
    return np.asarray(row, dtype=np.int64)


def _parts(grid: Grid) -> Iterator[tuple[int, int, IntArray]]:
    """What one sample of each measured length adds to a packed row, as points of a grid."""
    base = grid.values[:, 0, 0]
    for column in range(1, len(grid.token_nodes)):
        added = np.maximum(grid.values[:, : len(grid.batch_nodes), column] - base[:, None], 0)
        yield 1, int(grid.token_nodes[column]), (-(-added // grid.batch_nodes)).max(axis=1)
