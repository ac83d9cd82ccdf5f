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
        tokens: tokens of each sample.
        samples_per_step: samples of a step.
        tokens_per_step: tokens of a step, where the samples are not given.
    """

    def __init__(
        self, order: EpochOrder, tokens: IntArray, samples_per_step: int | None, tokens_per_step: int | None
    ) -> None:
        self._order = order
        self._tokens = tokens
        self._samples_per_step = samples_per_step
        self._tokens_per_step = tokens_per_step
        self._whole: tuple[int, Cut] | None = None

    def whole(self, epoch: int) -> Cut:
        """The steps of a whole epoch; those of the epoch that was asked for last are kept."""
        if self._whole is None or self._whole[0] != epoch:
            self._whole = epoch, self.rest(epoch, 0, np.arange(len(self._tokens), dtype=np.int64))
        return self._whole[1]

    def rest(self, epoch: int, first_step: int, places: IntArray) -> Cut:
        """The steps of what is left of an epoch, numbered from ``first_step`` on."""
        if self._samples_per_step is not None:
            bounds = cut_by_samples(len(places), self._samples_per_step)
        else:
            tokens = self._tokens[self._order.samples(epoch)[places]]
            bounds = cut_by_tokens(tokens, int(self._tokens_per_step or 1))
        return Cut(first_step=first_step, places=places, bounds=bounds)
