"""The cheapest way to cut the sorted samples into micro-batches, and what it says about each sample's price.

A dynamic program over the samples, longest first: ``least(i)`` is the rank-time of the samples from ``i`` on, over all
groups and batch sizes of micro-batches that end within a makespan. Its steps depend on each other, so many parts of
the samples are worked on at once; what lies behind a part is first guessed, then taken from the part itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.padded.least import NEVER
from lightning_dcp.planners.padded.menus import Menu
from lightning_dcp.planners.padded.samples import Samples

_STEPS = 32
"""Least samples of a part."""
_PARTS = 64
_ROUNDS = 2
"""Times that each part is worked on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The cheapest micro-batch from each sample on, if the rest is cut as cheaply as it can be.

    Attributes:
        least: rank-nanoseconds of the samples from ``i`` on, shape ``[n + 1]``, or less where they could be cheaper in
            batches that were not asked for.
        sp_size: ``p`` of the micro-batch from ``i`` on, shape ``[n]``.
        row: row of its batch size in the menu, shape ``[n]``.
        batch_size: ``b``, shape ``[n]``.
    """

    least: IntArray
    sp_size: IntArray
    row: IntArray
    batch_size: IntArray

    def chain(self) -> list[int]:
        """Where the micro-batches begin when the first begins at 0."""
        sizes, starts, i = self.batch_size.tolist(), [], 0
        while i < len(sizes):
            starts.append(i)
            i += sizes[i]
        return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Micro-batches that the dynamic program may take: ``O`` tabled ones, and the last one for each of ``P`` widths.

    Attributes:
        batch_sizes: tabled ``b``, shape ``[O]``.
        rows: their rows in the menus, shape ``[O]``.
        last_sizes: ``b`` of the last ones of the samples from ``i`` on, shape ``[n, P]``.
        last_rows: the rows before them, shape ``[n, P]``.
        costs: rank-nanoseconds of the samples from ``i`` on, shape ``[n, O + P]``.
        sp_sizes: ``p``, shape ``[O + P]``.
    """

    batch_sizes: IntArray
    rows: IntArray
    last_sizes: IntArray
    last_rows: IntArray
    costs: IntArray
    sp_sizes: IntArray

    @classmethod
    def build(
        cls, samples: Samples, menus: Sequence[Menu], columns: IntArray, makespan: int | IntArray
    ) -> _Options:
        """All that ends within the makespan."""
        sp_sizes, rows, costs = [], [], []
        for menu in menus:
            in_time = menu.times <= makespan
            used = np.flatnonzero(in_time.any(axis=1))
            sp_sizes += [menu.sp_size] * len(used)
            rows += used.tolist()
            costs.append(np.where(in_time[used], menu.sp_size * menu.times[used], NEVER))
        last = [np.stack(parts) for parts in zip(*(menu.last_within(makespan) for menu in menus), strict=True)]
        found = cls(
            batch_sizes=menus[0].batch_sizes[rows],
            rows=np.asarray(rows),
            last_sizes=last[1].T[columns],
            last_rows=last[0].T[columns],
            costs=np.ascontiguousarray(np.concatenate([*costs, last[2]]).T)[columns],
            sp_sizes=np.asarray([*sp_sizes, *(menu.sp_size for menu in menus)]),
        )
        found._refuse_late(samples)
        return found

    def _refuse_late(self, samples: Samples) -> None:
        """Take away what would need more samples than there are."""
        count, tabled = len(samples.ends), len(self.batch_sizes)
        longest = int(max(self.batch_sizes.max(), self.last_sizes.max()))
        # Where all samples may share, only the last ones are concerned.
        first = max(count - longest, 0) if int(samples.ends[0]) == count else 0
        room = (samples.ends - np.arange(count))[first:, None]
        self.costs[first:, :tabled][room < self.batch_sizes] = NEVER
        self.costs[first:, tabled:][room < self.last_sizes[first:]] = NEVER

    def alone(self) -> IntArray:
        """The least rank-nanoseconds for a sample in any of them, shape ``[n]``."""
        tabled = len(self.batch_sizes)
        tables = self.costs[:, :tabled] // self.batch_sizes, self.costs[:, tabled:] // self.last_sizes
        return np.asarray(np.minimum(tables[0].min(axis=1), tables[1].min(axis=1)))

    def cuts(self, least: IntArray, choice: IntArray) -> Cuts:
        """What was chosen for each sample."""
        every, tabled = np.arange(len(choice)), len(self.batch_sizes)
        in_table, last = np.minimum(choice, tabled - 1), np.maximum(choice - tabled, 0)
        return Cuts(
            least=least,
            sp_size=self.sp_sizes[choice],
            row=np.where(choice < tabled, self.rows[in_table], self.last_rows[every, last]),
            batch_size=np.where(choice < tabled, self.batch_sizes[in_table], self.last_sizes[every, last]),
        )


def cut(
    samples: Samples, menus: Sequence[Menu], columns: IntArray, shares: IntArray, makespan: int | IntArray
) -> Cuts:
    """The dynamic program over batch sizes; every sample must end within ``makespan`` alone.

    Batch sizes are the tabled ones and the last that ends in time. Whether memory allows the last is not asked, it
    counts with the recompute of the tabled one before it.

    Args:
        samples: the step's samples.
        menus: their menus.
        columns: column of the menus for the micro-batches that begin at each sample, shape ``[n]``.
        shares: rank-time that a sample might take in batches that the menus lack, shape ``[n]``.
        makespan: most nanoseconds of a micro-batch, or of those that begin with each kind, shape ``[U]``.
    """
    options = _Options.build(samples, menus, columns, makespan)
    guess = np.append(np.cumsum(np.minimum(options.alone(), shares)[::-1])[::-1], 0)
    parts = _Parts(options, shares)
    for _ in range(_ROUNDS if parts.count > 1 else 1):
        guess = parts.work(guess)
    return options.cuts(guess, parts.choice())


class _Parts:
    """All parts of the samples, worked on at once from their ends to their beginnings.

    Attributes:
        count: number of parts; the first is filled up in front with samples that nothing depends on.
    """

    def __init__(self, options: _Options, shares: IntArray) -> None:
        num_samples = len(shares)
        self.count = max(1, min(_PARTS, num_samples // _STEPS))
        self._steps = -(-num_samples // self.count)
        self._front = self.count * self._steps - num_samples
        self._batch_sizes = options.batch_sizes
        self._last_sizes = self._by_step(options.last_sizes, 1)
        self._costs = self._by_step(options.costs, NEVER)
        self._shares = self._by_step(shares[:, None], NEVER)[:, :, 0]
        self._longest = int(max(self._batch_sizes.max(), self._last_sizes.max()))
        self._choice = np.zeros((self.count, self._steps), dtype=np.int64)

    def _by_step(self, values: IntArray, fill: int) -> IntArray:
        """Values of all samples, shape ``[n, m]``, as one contiguous block ``[parts, m]`` for each step."""
        filled = np.full((self.count * self._steps, values.shape[1]), fill, dtype=np.int64)
        filled[self._front :] = values
        return np.ascontiguousarray(filled.reshape(self.count, self._steps, -1).swapaxes(0, 1))

    def work(self, guess: IntArray) -> IntArray:
        """``least`` of all samples, given a guess of it for what lies behind each part; shape ``[n + 1]``."""
        steps, tabled = self._steps, len(self._batch_sizes)
        least = self._with_tails(guess)
        parts, total = np.arange(self.count)[:, None], np.empty_like(self._costs[0])
        for step in range(steps - 1, -1, -1):
            total[:, :tabled] = least[:, step + self._batch_sizes]
            total[:, tabled:] = least[parts, step + self._last_sizes[step]]
            total += self._costs[step]
            self._choice[:, step] = total.argmin(axis=1)
            least[:, step] = np.minimum(total.min(axis=1), self._shares[step] + least[:, step + 1])
        # Part by part the values are relative to the part's end.
        offsets = np.append(np.cumsum(least[::-1, 0])[::-1][1:], 0)
        return np.append((least[:, :steps] + offsets[:, None]).ravel()[self._front :], 0)

    def _with_tails(self, guess: IntArray) -> IntArray:
        """Room for ``least`` of each part, and behind it the guess of what lies there, relative to the part's end."""
        tail = np.zeros(self._front + len(guess) + self._longest, dtype=np.int64)
        tail[self._front : self._front + len(guess)] = guess
        ends = np.arange(1, self.count + 1)[:, None] * self._steps
        behind = tail[ends + np.arange(self._longest)]
        return np.concatenate(
            [np.zeros((self.count, self._steps), dtype=np.int64), behind - behind[:, :1]], axis=1
        )

    def choice(self) -> IntArray:
        """The option taken at each sample, shape ``[n]``."""
        return self._choice.ravel()[self._front :]
