"""Times of all micro-batches of neighbours in sorted order, and the cheapest way to cut a range into them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.assembly import padded_tokens, round_up_all, settings_within
from lightning_dcp.planners.bound import Shares
from lightning_dcp.planners.protocol import PlanRequest

NEVER = 2**50
"""Nanoseconds that stand for "does not fit"; thousands of them still add up without wrapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Predicted times of the step's samples, longest first.

    Attributes:
        order: positions in the request, by falling tokens, shape ``[n]``.
        shapes: sizes in that order, shape ``[n, axes]``.
        sp_sizes: ``p`` that may be used, ascending.
        batch_sizes: ``b`` that are tabled, ascending from 1, shape ``[K]``.
        times: for each ``p`` the nanoseconds of the micro-batch of the ``b`` samples from ``i`` on, shape
            ``[K, n]``; :data:`NEVER` where it does not fit or does not exist.
    """

    order: IntArray
    shapes: IntArray
    sp_sizes: tuple[int, ...]
    batch_sizes: IntArray
    times: dict[int, IntArray]

    @classmethod
    def build(cls, request: PlanRequest, options: Shares) -> Tables:
        """Sort the samples and look up, or ask the cost model for, the times of their runs."""
        shapes = request.shapes
        # Equal shapes must be neighbours (exact_shapes), and the order must not depend on the input's.
        order = np.lexsort((request.sample_ids, *-shapes.T, -shapes.prod(axis=-1)))
        shapes = shapes[order]
        sizes = options.batch_sizes
        legal = np.stack([_legal(shapes, b, request.limits.exact_shapes) for b in sizes.tolist()])
        times = {
            p: np.where(legal, np.minimum(_run_times(request, p, sizes, shapes, alone[:, order]), NEVER), NEVER)
            for p, alone in options.alone.items()
        }
        return cls(order=order, shapes=shapes, sp_sizes=tuple(times), batch_sizes=sizes, times=times)

    def partition(self, sp_size: int, low: int, high: int, cap: int) -> list[tuple[int, int, int]]:
        """Cut ``low .. high - 1`` into micro-batches ``(start, b, nanoseconds)`` of least total time.

        No micro-batch lasts longer than ``cap``, single samples excepted. With fixed sizes, contiguous runs of the
        sorted samples waste least padding, so this dynamic program over the cuts is exact for tabled ``b``.
        """
        count = high - low
        times = self.times[sp_size][:, low:high]
        usable = np.where(times <= cap, times, NEVER)
        usable[0] = times[0]
        # Column i of `least` is final before any earlier start needs it.
        least = np.full(count + int(self.batch_sizes[-1]) + 1, NEVER, dtype=np.int64)
        least[count] = 0
        choice = np.zeros(count, dtype=np.int64)
        columns = np.ascontiguousarray(usable.T)
        for i in range(count - 1, -1, -1):
            total = columns[i] + least[i + self.batch_sizes]
            choice[i] = total.argmin()
            least[i] = min(int(total[choice[i]]), NEVER)
        cuts, i = [], 0
        while i < count:
            k = int(choice[i])
            cuts.append((low + i, int(self.batch_sizes[k]), int(times[k, i])))
            i += int(self.batch_sizes[k])
        return cuts


def _run_times(request: PlanRequest, sp_size: int, sizes: IntArray, shapes: IntArray, alone: IntArray) -> IntArray:
    """Nanoseconds of the ``b`` samples from ``i`` on as they are padded in a plan, shape ``[K, n]``.

    With one axis the first sample of a run is the largest, so its own time holds, unless it is so short that plans
    pad it further than the lower bound may. With more axes a run may be larger than each of its samples.
    """
    if shapes.shape[1] == 1 and (padded_tokens(shapes, sp_size) == round_up_all(shapes, sp_size)).all():
        return alone
    largest = np.stack([_window_max(shapes, b) for b in sizes.tolist()])
    return settings_within(request, sp_size, sizes[:, None], largest).nanoseconds


def _window_max(shapes: IntArray, width: int) -> IntArray:
    """Largest size on each axis among the ``width`` samples from ``i`` on, shape ``[n, axes]``."""
    if shapes.shape[1] == 1 or width == 1:
        return shapes
    tail = np.repeat(shapes[-1:], width - 1, axis=0)
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate([shapes, tail]), width, axis=0)
    return np.asarray(windows.max(axis=-1))


def _legal(shapes: IntArray, width: int, exact: bool) -> NDArray[np.bool_]:
    """Whether the ``width`` samples from ``i`` on exist and may share a micro-batch, shape ``[n]``."""
    legal = np.arange(len(shapes)) + width <= len(shapes)
    if exact:
        last = np.minimum(np.arange(len(shapes)) + width - 1, len(shapes) - 1)
        # Equal shapes are neighbours, so equal ends mean that all between are equal.
        legal &= (shapes == shapes[last]).all(axis=-1)
    return legal
