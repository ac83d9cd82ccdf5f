"""Changes of rows priced with the recomputed layers that they would have afterwards, for where memory is tight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.packing.rows import Rows, Swap

NEVER = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the rows hold, as sums of :meth:`CostModel.packed_parts <lightning_dcp.cost.CostModel.packed_parts>`.

    Attributes:
        rows: the rows.
        parts: per width what each sample adds and, last, what none adds, ``[n + 1, quantities]``.
        sums: of each row at its width, ``[R, quantities]``.
        times: nanoseconds of each row, ``[R]``.
    """

    rows: Rows
    parts: tuple[IntArray, ...]
    sums: IntArray
    times: IntArray

    @classmethod
    def of(cls, rows: Rows) -> Contents:
        """Of all rows."""
        kinds, samples = rows.kinds, np.arange(len(rows.row_of))
        parts = tuple(np.concatenate([width.parts, 0 * width.parts[:1]]) for width in kinds.menu.widths)
        sums = np.zeros((len(rows.first), parts[0].shape[1]), dtype=np.int64)
        np.add.at(sums, rows.row_of, np.stack(parts)[kinds.width[rows.kind[rows.row_of]], samples])
        times = kinds.fixed[rows.kind] * (rows.count > 0)
        np.add.at(times, rows.row_of, kinds.times[rows.kind[rows.row_of], samples])
        return cls(rows=rows, parts=parts, sums=sums, times=times)

    def price(self, width: IntArray, sums: IntArray) -> IntArray:
        """Nanoseconds of rows with these sums ``[m, k, quantities]`` on groups of these widths ``[k]``."""
        found = np.empty(sums.shape[:2], dtype=np.int64)
        request = self.rows.kinds.menu.request
        for index in np.unique(width).tolist():
            columns = np.flatnonzero(width == index)
            found[:, columns] = request.cost.packed(
                self.rows.kinds.menu.widths[index].sp_size,
                sums[:, columns],
                request.limits.memory_bytes,
                request.limits.recompute,
            ).nanoseconds
        return found

    def swap(self, given: IntArray, source: IntArray, taken: IntArray, target: IntArray) -> Swap:
        """:meth:`Rows.swap` with the fewest recomputed layers that fit each row afterwards.

        Args:
            given: samples ``[m, 1]``; their rows run on groups of one width.
            source: their rows ``[m, 1]``.
            taken: samples ``[k]``, ``n`` for none.
            target: rows ``[k]``.
        """
        rows, width = self.rows, self.rows.kinds.width[self.rows.kind]
        here, there, parts = int(width[source[0, 0]]), width[target], np.stack(self.parts)
        left = self.sums[source] - parts[here, given] + parts[here, taken]
        joined = self.sums[target] + parts[there, given] - parts[there, taken]
        emptied = (taken == len(rows.row_of)) & (rows.count[source] == 1)
        left_time = np.where(emptied, 0, self.price(np.full(len(taken), here), left))
        joined_time = self.price(there, joined)
        return Swap(
            fits=rows.has_room(given, source, taken, target),
            source_time=np.minimum(left_time, NEVER) - self.times[source],
            target_time=np.minimum(joined_time, NEVER) - self.times[target],
        )
