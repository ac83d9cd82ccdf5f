"""A plan as arrays, so that what is computed of every step costs no loop over its samples each time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.plan import IterationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Micro-batches ``[m]`` of a plan and their samples ``[n]``, in the order of the plan.

    Attributes:
        ids: ids of the samples ``[n]``.
        tokens: their tokens, without padding ``[n]``.
        sizes: samples of each micro-batch ``[m]``.
        padded: tokens that each of a micro-batch's samples is padded to ``[m]``.
        sp_sizes: ``p`` ``[m]``.
        recompute: recomputed layers of each family ``[m, families]``; no family where no micro-batch names any.
    """

    ids: IntArray
    tokens: IntArray
    sizes: IntArray
    padded: IntArray
    sp_sizes: IntArray
    recompute: IntArray

    @classmethod
    def of(cls, plan: IterationPlan) -> Columns:
        """The columns of a plan."""
        rows = plan.micro_batches
        shapes = list(chain.from_iterable(m.shapes for m in rows))
        axes = len(shapes[0]) if shapes else 1
        families = max((len(m.recompute) for m in rows), default=0)
        none = (0,) * families
        sizes = _ints([m.batch_size for m in rows])
        whole = _ints([prod(m.padded_shape) for m in rows])
        return cls(
            ids=_ints(plan.sample_ids),
            tokens=_ints(list(chain.from_iterable(shapes))).reshape(-1, axes).prod(axis=1),
            sizes=sizes,
            padded=whole // np.where([m.packed for m in rows], sizes, 1) if rows else whole,
            sp_sizes=_ints([m.sp_size for m in rows]),
            recompute=_ints([m.recompute or none for m in rows]).reshape(len(rows), families),
        )

    @property
    def starts(self) -> IntArray:
        """Where each micro-batch's samples start ``[m]``."""
        return np.cumsum(self.sizes) - self.sizes

    def of_rows(self, values: IntArray) -> IntArray:
        """Sums over each micro-batch of values of the samples ``[n]``."""
        return np.add.reduceat(values, self.starts) if len(self.sizes) else values[:0]

    @property
    def num_padded(self) -> int:
        """Tokens that are computed, with padding."""
        return int((self.sizes * self.padded).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.tokens.sum())


def _ints(values: object) -> IntArray:
    return np.asarray(values, dtype=np.int64)
