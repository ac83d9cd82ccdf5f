"""Eq. 4 to 6 for many candidates at once: time and memory with any number of recomputed layers."""

from __future__ import annotations

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
        return np.asarray(_total(per_family) + self.constant_time)

    def plain(self) -> IntArray:
        """``T`` without recompute."""
        return np.asarray(_total(self.layers * self.plain_time) + self.constant_time)

    def memory(self, counts: IntArray, static_bytes: int) -> IntArray:
        """``M`` (Eq. 6) with these counts of recomputed layers, ``[..., families]``."""
        held = (self.layers - counts) * self.activation + counts * self.layer_input
        # The first layers are the recomputed ones, so their recompute runs when later activations are gone;
        # only if no layer is left plain does a whole layer's m come on top (found by running).
        whole, last = (counts == self.layers) & (counts > 0), np.zeros(held.shape[:-1], dtype=np.int64)
        for k in range(held.shape[-1]):
            last = np.maximum(last, np.where(whole[..., k], self.activation[..., k], 0))
        return np.asarray(_total(held) + last + self.constant_bytes + static_bytes)

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
        free = int(np.argmax(self.layers))
        choices = _choices(self.layers, free)
        counts, fits = self._fastest(_combinations(choices), free, room)
        if not fits.all():
            # A recomputed layer never holds more, so least memory is where a family has none, all, or all but one.
            ends = [sorted({*c[:1], *c[-2:]}) for c in choices]
            counts[~fits] = self.only(~fits)._lightest(_combinations(ends), free, room)
        return counts

    def _fastest(self, others: IntArray, free: int, room: int) -> tuple[IntArray, NDArray[np.bool_]]:
        """Counts of least time with one of the combinations ``[m, families]`` of the others, and whether they fit."""
        total = len(self.constant_time)
        counts, best = np.zeros((total, len(self.layers)), dtype=np.int64), np.full(total, UNFITTING)
        needed, every = self.memory(counts, 0) - room, np.arange(total)
        step = max(_AT_ONCE // total, 1)
        for start in range(0, len(others), step):
            part = others[start : start + step]
            last = self._last(part)
            missing = needed + last
            added = np.zeros_like(missing)
            for k in range(len(self.layers)):
                if k != free:
                    missing -= part[:, k, None] * (self.activation[:, k] - self.layer_input[:, k])
                    added += part[:, k, None] * self.recompute_time[:, k]
            own = self._own(missing, last, free)
            added += own * self.recompute_time[:, free]
            added[own > self.layers[free]] = UNFITTING
            first = added.argmin(axis=0)
            better = np.flatnonzero(added[first, every] < best)
            best[better] = added[first[better], better]
            counts[better] = part[first[better]]
            counts[better, free] = own[first[better], better]
        return counts, best < UNFITTING

    def _own(self, missing: IntArray, last: IntArray, free: int) -> IntArray:
        """The fewest layers of a family that free ``missing`` bytes, beyond its layers where none do."""
        layers, gain = int(self.layers[free]), (self.activation - self.layer_input)[:, free]
        own = np.maximum((missing + (gain - 1)) // np.maximum(gain, 1), 0)
        fits = missing <= (layers - 1) * gain
        if not last.any():
            # All layers cost a whole layer's m at the peak, so they do not fit where one less does not.
            return np.where(fits, own, layers + 1)
        full = missing <= layers * gain - np.maximum(self.activation[:, free] - last, 0)
        return np.where(fits, own, np.where(full, layers, layers + 1))

    def _last(self, counts: IntArray) -> IntArray:
        """Bytes of a whole layer of the families that have none left plain, for counts ``[m, families]``."""
        found = np.zeros((len(counts), len(self.constant_time)), dtype=np.int64)
        for k, layers in enumerate(self.layers.tolist()):
            full = (counts[:, k] == layers) & (layers > 0)
            found[full] = np.maximum(found[full], self.activation[:, k])
        return found

    def _lightest(self, others: IntArray, free: int, room: int) -> IntArray:
        """Counts of least memory with one of the combinations ``[m, families]`` of the others."""
        best = np.zeros((len(self.constant_time), len(self.layers)), dtype=np.int64)
        least = np.full(len(best), np.iinfo(np.int64).max)
        gain = np.maximum((self.activation - self.layer_input)[:, free], 1)
        for combination in others:
            counts = np.broadcast_to(combination, best.shape).copy()
            missing = self.memory(counts, 0) - room
            one_left = np.clip(-(-missing // gain), 0, max(int(self.layers[free]) - 1, 0))
            for own in (one_left, self.layers[free]):
                counts[:, free] = own
                memory = self.memory(counts, 0)
                better = memory < least
                best[better], least[better] = counts[better], memory[better]
        return best


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
        held = _total(terms.layers * terms.activation) + terms.constant_bytes
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


def _choices(layers: IntArray, free: int) -> list[list[int]]:
    """Counts of each family that are tried, ascending; only 0 of ``free``."""
    others = [int(n) if k != free else 0 for k, n in enumerate(layers)]
    step = 1
    while prod(n // step + 2 for n in others if n) > _MAX_COMBINATIONS and step <= max(others):
        step *= 2
    return [sorted({*range(0, n + 1, step), n}) for n in others]


def _combinations(choices: list[list[int]]) -> IntArray:
    """One of each family's counts, fewest first, shape ``[m, families]``."""
    found = sorted(product(*choices), key=lambda counts: (sum(counts), counts))
    return np.asarray(found, dtype=np.int64)


def _total(values: IntArray) -> IntArray:
    """Sum over the families: one by one, for NumPy is slow at adding up short last axes."""
    total = np.zeros(values.shape[:-1], dtype=np.int64)
    for k in range(values.shape[-1]):
        total += values[..., k]
    return total
