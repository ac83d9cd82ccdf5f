"""Drawn steps: planners choose the samples of a step among the next ones of the epoch's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.data.remaining import Remaining


class Stray(NamedTuple):
    """How far a step's samples were trained from their places in the epoch's order.

    The place of a sample in training is the number of samples that were trained before it in the epoch; those of
    one step are taken in the order of the epoch. Fixed steps do not stray.

    Attributes:
        mean: mean distance in samples.
        maximum: largest distance.
    """

    mean: float = 0.0
    maximum: int = 0

    @classmethod
    def of(cls, places: IntArray, before: int) -> Stray:
        """That of one step.

        Args:
            places: places of its samples in the order of the epoch.
            before: samples of the epoch that were trained before.
        """
        distance = np.abs(np.sort(places) - np.arange(before, before + len(places)))
        return cls(float(distance.mean()), int(distance.max())) if len(places) else cls()


class EpochDraw:
    """What coming steps may draw from; it runs ahead of what was trained, and starts anew with each iteration.

    Args:
        left: places that no step has had; this object takes from it.
        order: sample at each place.
        places: gives the places of samples.
    """

    def __init__(self, left: Remaining, order: IntArray, places: Callable[[IntArray], IntArray]) -> None:
        self._left = left
        self._order = order
        self._places = places

    @property
    def left(self) -> int:
        """Number of samples that no step has had."""
        return self._left.left

    def offer(self, count: int) -> IntArray:
        """Ids of the first ``count`` samples that no step has had, in the order of the epoch; fewer at its end."""
        return self._order[self._left.offer(count)]

    def take(self, ids: IntArray) -> None:
        """A step has drawn these samples."""
        self._left.take(self._places(ids))
