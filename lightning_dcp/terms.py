"""Eq. 4 to 6 for many candidates at once: time and memory with any number of recomputed layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.interpolation import Grid, IntArray

RecomputePolicy = Literal["auto", "none", "full"]

UNFITTING = 2**62
"""Nanoseconds of a setting that no number of recomputed layers makes fit the memory limit."""

_MAX_COMBINATIONS = 1024
_AT_ONCE = 2**14
"""Counts that are looked at together, at least one for each candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The quantities of Eq. 4 to 6 for many candidates; per-family arrays end in the family axis."""

    layers: IntArray
    plain_time: IntArray
    recompute_time: IntArray
    activation: IntArray
    layer_input: IntArray
    constant_time: IntArray
    constant_bytes: IntArray

    @classmethod
    def from_stack(cls, values: IntArray, layers: IntArray) -> Terms:
        """From quantities of a grid, ``[Q, ...]``, and the layers of each family."""
        count = len(layers)
        families = np.moveaxis(values[: 4 * count].reshape(4, count, *values.shape[1:]), 1, -1)
        return cls(
            layers=layers,
            plain_time=families[0],
            recompute_time=families[1],
            activation=families[2],
            # A recomputed layer never holds more than a plain one, whatever noise says.
            layer_input=np.minimum(families[3], families[2]),
            constant_time=values[-2],
            constant_bytes=values[-1],
        )

    def time(self, counts: IntArray) -> IntArray:
        """``T`` (Eq. 4) with these counts of recomputed layers, ``[..., families]``."""
        per_family = self.layers * self.plain_time + counts * self.recompute_time
        return np.asarray(per_family.sum(axis=-1) + self.constant_time)

    def plain(self) -> IntArray:
        """``T`` without recompute."""
        return np.asarray((self.layers * self.plain_time).sum(axis=-1) + self.constant_time)

    def memory(self, counts: IntArray, static_bytes: int) -> IntArray:
        """``M`` (Eq. 6) with these counts of recomputed layers, ``[..., families]``."""
        held = (self.layers - counts) * self.activation + counts * self.layer_input
        # The first layers are the recomputed ones, so their recompute runs when later activations are gone;
        # only if no layer is left plain does a whole layer's m come on top (found by running).
        last = np.where((counts == self.layers) & (counts > 0), self.activation, 0)
        return np.asarray(held.sum(axis=-1) + last.max(axis=-1, initial=0) + self.constant_bytes + static_bytes)

    def counts(self, policy: RecomputePolicy, room: int) -> IntArray:
        """Counts per family as the policy says, shape ``[..., families]``."""
        if policy == "auto":
            return self.fewest_recomputed(room)
        shape = (*self.constant_time.shape, len(self.layers))
        return np.broadcast_to(self.layers if policy == "full" else 0 * self.layers, shape)

    def fewest_recomputed(self, room: int) -> IntArray:
        """Counts per family of least time within ``room`` bytes, shape ``[..., families]``."""
        counts = np.zeros((*self.constant_time.shape, len(self.layers)), dtype=np.int64)
        short = self.memory(counts, 0) > room
        if short.any() and len(self.layers):
            counts[short] = self.only(short)._search(room)
        return counts

    def only(self, chosen: NDArray[np.bool_]) -> Terms:
        """The same for some of the candidates."""
        arrays = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name != "layers"}
        return replace(self, **arrays)

    def _search(self, room: int) -> IntArray:
        free, total = int(np.argmax(self.layers)), len(self.constant_time)
        others = np.asarray(list(_combinations(self.layers, free)), dtype=np.int64)
        every = np.arange(total)
        best = np.zeros((total, len(self.layers)), dtype=np.int64)
        best_score = np.full(total, np.iinfo(np.int64).max)
        step = max(_AT_ONCE // total, 1)
        for start in range(0, len(others), step):
            counts = self._completed(others[start : start + step], free, room)
            memory = self.memory(counts, 0)
            # What does not fit is ranked behind all that does, by memory.
            score = np.where(memory <= room, self.time(counts), UNFITTING + memory)
            first = score.argmin(axis=0)
            better = score[first, every] < best_score
            best[better], best_score[better] = counts[first, every][better], score[first, every][better]
        return best

    def _completed(self, others: IntArray, free: int, room: int) -> IntArray:
        """Counts to try for each combination ``[m, families]`` of the other families, shape ``[2 m, n, families]``."""
        counts = np.repeat(np.repeat(others, 2, axis=0)[:, None], len(self.constant_time), axis=1)
        missing = self.memory(counts[::2], 0) - room
        gain = np.maximum((self.activation - self.layer_input)[:, free], 1)
        # All layers of a family cost a whole layer's m at the peak, so one less is tried first.
        counts[::2, :, free] = np.clip(-(-missing // gain), 0, self.layers[free] - 1)
        counts[1::2, :, free] = self.layers[free]
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Best settings of many candidates at once; all arrays have the broadcast shape of the question.

    Attributes:
        nanoseconds: time with the fewest recomputed layers that fit (Eq. 4), or :data:`UNFITTING`.
        bytes: memory with them (Eq. 6).
        recompute: the counts ``r``, shape ``[..., families]``.
    """

    nanoseconds: IntArray
    bytes: IntArray
    recompute: IntArray

    @classmethod
    def within(cls, terms: Terms, memory_bytes: int, static_bytes: int, policy: RecomputePolicy) -> Settings:
        """The counts that the policy asks for within the memory; where nothing fits, those of least memory."""
        counts = terms.counts(policy, memory_bytes - static_bytes)
        memory = terms.memory(counts, static_bytes)
        time = np.where(memory <= memory_bytes, terms.time(counts), UNFITTING)
        return cls(nanoseconds=time, bytes=memory, recompute=counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Samples of given sizes, looked up once for questions about any batch size.

    Attributes:
        grid: quantities of one sequence-parallel size.
        rows: :meth:`Grid.rows` of the samples, shape ``[Q, B + 1, n]``.
        layers: layers of each family.
        static_bytes: bytes that no micro-batch changes.
    """

    grid: Grid
    rows: IntArray
    layers: IntArray
    static_bytes: int

    def part(self, chosen: slice | IntArray) -> Lines:
        """The same for some of the samples."""
        return replace(self, rows=self.rows[..., chosen])

    def times(
        self, batch_sizes: IntArray, memory_bytes: int, policy: RecomputePolicy = "auto"
    ) -> tuple[IntArray, IntArray]:
        """:meth:`CostModel.settings` of batch sizes ``[R]`` of each size.

        Returns:
            Nanoseconds, :data:`UNFITTING` where nothing fits, and those without recompute, whatever the memory; each
            of shape ``[R, n]``.
        """
        terms = Terms.from_stack(self.grid.between(self.rows, batch_sizes), self.layers)
        plain, room = terms.plain(), memory_bytes - self.static_bytes
        held = (terms.layers * terms.activation).sum(axis=-1) + terms.constant_bytes
        short = held > room if policy != "full" else np.ones(plain.shape, dtype=bool)
        if not short.any():
            return plain, plain
        found = plain.copy()
        found[short] = Settings.within(terms.only(short), room, 0, policy).nanoseconds
        return found, plain

    def plain_line(self) -> tuple[IntArray, IntArray]:
        """A line below the times of all batch sizes, whatever is recomputed: at one sample, and growth; each ``[n]``.

        Without recompute the time is a line between two measured batch sizes and beyond the last; the flattest of
        these counts. ``T(b) >= first + growth * (b - 1)``.
        """
        times = Terms.from_stack(self.rows, self.layers).plain()
        times[1:-1] -= times[:-2]
        # Each quantity of the first and of the asked batch size is rounded down by less than a nanosecond a layer.
        slack = int(self.layers.sum()) + 1
        widths = self.grid.batch_widths
        growth = times[1:] // widths[:, None]
        return times[0] - slack, np.asarray(growth.min(axis=0))


def _combinations(layers: IntArray, free: int) -> Iterator[tuple[int, ...]]:
    """Counts of all families but ``free`` (0 there), fewest first."""
    others = [int(n) if k != free else 0 for k, n in enumerate(layers)]
    step = 1
    while prod(n // step + 2 for n in others if n) > _MAX_COMBINATIONS and step <= max(others):
        step *= 2
    choices = [sorted({*range(0, n + 1, step), n}) for n in others]
    yield from sorted(product(*choices), key=lambda counts: (sum(counts), counts))
