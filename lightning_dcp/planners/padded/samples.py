"""The step's samples in the order in which they share micro-batches: longest first, equal ones together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.protocol import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples sorted by falling tokens.

    Attributes:
        order: positions in the request, shape ``[n]``.
        shapes: sizes in that order, shape ``[n, axes]``.
        unit: number of each sample's shape among the distinct ones, shape ``[n]``, from 0 without gaps.
        distinct: the different shapes, shape ``[U, axes]``.
        counts: samples of each, shape ``[U]``.
        ends: the samples from ``i`` up to ``ends[i] - 1`` may share a micro-batch, shape ``[n]``.
        nested: no shape is larger on any axis than one before it, so the first sample of a run is its largest.
    """

    order: IntArray
    shapes: IntArray
    unit: IntArray
    distinct: IntArray
    counts: IntArray
    ends: IntArray
    nested: bool

    @classmethod
    def build(cls, request: PlanRequest) -> Samples:
        """Sort the samples of a request; the order of the request does not matter."""
        shapes = request.shapes
        if shapes.shape[1] == 1:
            order = np.lexsort((request.sample_ids, -shapes[:, 0]))
        else:
            order = np.lexsort((request.sample_ids, *-shapes.T, -shapes.prod(axis=-1)))
        shapes = shapes[order]
        new = np.append(True, (shapes[1:] != shapes[:-1]).any(axis=-1))
        unit, starts = np.cumsum(new) - 1, np.flatnonzero(new)
        edges = np.append(starts, len(shapes))
        ends = edges[unit + 1] if request.limits.exact_shapes else np.full(len(shapes), len(shapes))
        distinct = shapes[starts]
        return cls(
            order=order,
            shapes=shapes,
            unit=unit,
            distinct=distinct,
            counts=np.diff(edges),
            ends=ends,
            nested=bool((distinct[:-1] >= distinct[1:]).all()),
        )
