"""How long the samples that are left will take, by the cost model and by how right it was so far."""

from __future__ import annotations

import numpy as np

from lightning_dcp.cost import CostModel, IntArray


class Forecast:
    """Predicts times of samples and compares them with what was measured; no step is planned for it.

    A sample counts the cost model's useful time, divided by the ranks, and each step the time that ends every step.
    What plans lose beyond that (padding, idle time, recompute), and all that the profile does not know, is in the
    ratio of measured to predicted seconds of the steps so far.

    Args:
        cost: the cost model.
        tokens: tokens of all samples of the dataset; each length is priced once.
        world_size: number of ranks.
    """

    def __init__(self, cost: CostModel, tokens: IntArray, world_size: int) -> None:
        self._lengths = np.unique(tokens)
        self._seconds = cost.useful_time(self._lengths) / (world_size * 1e9)
        self._sync = cost.profile.sync_time / 1e9
        self._sums: list[tuple[float, float]] = []

    def work(self, tokens: IntArray) -> float:
        """Predicted seconds of samples, without what ends every step."""
        return float(self._seconds[np.searchsorted(self._lengths, tokens)].sum())

    def predicted(self, work: float, steps: float) -> float:
        """Predicted seconds of so many steps with so much work."""
        return work + steps * self._sync

    def add(self, work: float, seconds: float) -> None:
        """Count a step in; the first one counts as long as it is the only one, since it warms up."""
        before = self._sums[-1] if len(self._sums) > 1 else (0.0, 0.0)
        self._sums = [*self._sums[:1], (before[0] + seconds, before[1] + self.predicted(work, 1))]

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds of the steps so far; 1 before the first."""
        measured, predicted = self._sums[-1] if self._sums else (1.0, 1.0)
        return measured / predicted if predicted > 0 else 1.0
