"""Fixed steps: an epoch, or what is left of one, cut into slices of so many samples or tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.data.order import EpochOrder


def cut_by_samples(size: int, samples_per_step: int) -> IntArray:
    """Bounds of the steps: step ``k`` holds the positions ``bounds[k] .. bounds[k + 1] - 1``."""
    return np.append(np.arange(0, size, samples_per_step, dtype=np.int64), np.int64(size))


def cut_by_tokens(tokens: IntArray, tokens_per_step: int) -> IntArray:
    """Bounds of the steps, cut greedily: a step ends before it passes the budget and holds at least one sample.

    Args:
        tokens: tokens of each sample in the order of the epoch.
        tokens_per_step: budget of a step.
    """
    total = np.cumsum(tokens)
    bounds = [0]
    while bounds[-1] < len(tokens):
        start = bounds[-1]
        spent = int(total[start - 1]) if start else 0
        end = int(np.searchsorted(total, spent + tokens_per_step, side="right"))
        bounds.append(max(end, start + 1))
    return np.asarray(bounds, dtype=np.int64)


def cut_by_batches(batches: IntArray, batches_per_step: int) -> IntArray:
    """Bounds of the steps, where somebody else made batches: each step holds so many of them, the last one the rest.

    Args:
        batches: number of the batch of each place, ascending.
        batches_per_step: batches of a step, counted from batch 0.
    """
    steps = batches // batches_per_step
    first = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    return np.concatenate([[0], first, [len(batches)]]).astype(np.int64) if len(batches) else np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What a step holds: at most one of the first three is given; none where a planner draws the steps.

    Attributes:
        samples: so many samples.
        tokens: at most so many tokens, see :func:`cut_by_tokens`.
        batches: so many batches that somebody else made.
        drop_last: an epoch ends with its last whole step; in samples only.
    """

    samples: int | None = None
    tokens: int | None = None
    batches: int | None = None
    drop_last: bool = False

    @property
    def is_given(self) -> bool:
        """Whether steps have a size."""
        return any(size is not None for size in (self.samples, self.tokens, self.batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The fixed steps of an epoch, or of what was left of it when it was cut.

    Attributes:
        first_step: number of the first step in the epoch.
        places: places of the epoch's order that are cut, ascending.
        bounds: step ``first_step + k`` has ``places[bounds[k] : bounds[k + 1]]``.
    """

    first_step: int
    places: IntArray
    bounds: IntArray

    @property
    def stop(self) -> int:
        """Number of the step after the last."""
        return self.first_step + len(self.bounds) - 1

    def start_of(self, step: int) -> int:
        """Number of places that were cut before a step; of :attr:`stop` all of them.

        Raises:
            IndexError: there is no such step.
        """
        if not self.first_step <= step <= self.stop:
            raise IndexError(f"step {step}; there are the steps {self.first_step} to {self.stop - 1}")
        return int(self.bounds[step - self.first_step])

    def places_of(self, step: int) -> IntArray:
        """Places of a step, ascending."""
        return self.places[self.start_of(step) : self.start_of(step + 1)]

    def step_at(self, place: int) -> int:
        """First step none of whose places stands before ``place``."""
        return self.first_step + int(np.searchsorted(self.bounds, np.searchsorted(self.places, place)))


class Cutter:
    """Cuts epochs into steps of one size.

    Args:
        order: order of the samples.
        tokens: tokens of each sample of the dataset.
        size: what a step holds.
    """

    def __init__(self, order: EpochOrder, tokens: IntArray, size: StepSize) -> None:
        self._order = order
        self._tokens = tokens
        self._size = size
        self._whole: tuple[int, Cut] | None = None

    def places(self, epoch: int) -> int:
        """Places of an epoch that its steps have, from the first on."""
        places, samples = len(self._order.samples(epoch)), self._size.samples
        return places - places % samples if self._size.drop_last and samples is not None else places

    def whole(self, epoch: int) -> Cut:
        """The steps of a whole epoch; those of the epoch that was asked for last are kept."""
        if self._whole is None or self._whole[0] != epoch:
            self._whole = epoch, self.rest(epoch, 0, np.arange(self.places(epoch), dtype=np.int64))
        return self._whole[1]

    def rest(self, epoch: int, first_step: int, places: IntArray) -> Cut:
        """The steps of what is left of an epoch, numbered from ``first_step`` on."""
        if self._size.samples is not None:
            bounds = cut_by_samples(len(places), self._size.samples)
        elif self._size.batches is not None:
            batches = self._order.batches(epoch)
            assert batches is not None
            bounds = cut_by_batches(batches[places], self._size.batches)
        else:
            ids = self._order.samples(epoch)[places]
            bounds = cut_by_tokens(self._tokens[ids % len(self._tokens)], int(self._size.tokens or 1))
        return Cut(first_step=first_step, places=places, bounds=bounds)
