"""Receipts: which samples of an epoch were trained, counted from the plans that ran."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_dcp.cost import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of the samples of one epoch in one fit.

    Attributes:
        epoch: epoch of the permutation.
        planned: samples of the epoch.
        before: of these, trained before this fit resumed.
        trained: trained in this fit, as often as the epoch holds them (once, unless its order repeats them).
        repeated: trained more often than that, or trained although they do not belong to it.
        remaining: not trained.
        dropped: of the epoch's samples, those that make up no whole step and that the loader was told to drop.
        refused: samples of the dataset that no epoch trains on.
        refused_file: file that lists the refused ones; ``None`` where there are none.
    """

    epoch: int
    planned: int
    before: int
    trained: int
    repeated: int
    remaining: int
    refused: int
    dropped: int = 0
    refused_file: Path | None = None

    @property
    def complete(self) -> bool:
        """Whether the whole epoch was trained, each sample exactly once."""
        return self.remaining == 0 and self.repeated == 0

    def __str__(self) -> str:
        """One line for the log."""
        before = f", {self.before:,} of them before this run resumed" if self.before else ""
        trained = f"{self.trained + self.before:,} of {self.planned:,} samples trained exactly once"
        parts = [f"epoch {self.epoch}: {trained}{before}"]
        if self.repeated:
            parts.append(f"{self.repeated:,} trained TOO OFTEN")
        if self.remaining:
            parts.append(f"{self.remaining:,} remain")
        if self.dropped:
            parts.append(f"{self.dropped:,} dropped, as they make up no whole step")
        where = f" (listed in {self.refused_file})" if self.refused_file is not None else ""
        parts.append(f"{self.refused:,} refused{where}")
        return ", ".join(parts)


def resume_line(receipt: Receipt, samples: int, tokens: int) -> str:
    """What a resumed run says of what was trained before.

    Args:
        receipt: of the epoch that goes on, before its first step.
        samples: trained in all epochs.
        tokens: trained in all epochs.
    """
    return (
        f"resumed: {samples:,} samples with {tokens:,} tokens were trained before; of epoch {receipt.epoch} "
        f"{receipt.before:,} samples were trained and {receipt.remaining:,} remain"
    )


class EpochLedger:
    """Counts the samples of one epoch as they are trained.

    It is told what the epoch still holds when its first step of this fit is about to run, and from then on only what
    the executed plans hold. So it does not depend on the counters of the sampler that it checks.

    Args:
        epoch: epoch of the permutation.
        size: samples of the dataset.
        left: positions of the samples that the epoch still holds.
        counts: samples of the epoch that were trained before, and that are dropped.
    """

    def __init__(self, epoch: int, size: int, left: IntArray, counts: tuple[int, int] = (0, 0)) -> None:
        self.epoch = epoch
        self.before, self._dropped = counts
        self._left = len(left)
        self._trained = 0
        # How often each sample has still to be trained; one array, since a dataset may have very many.
        self._due = np.zeros(size, dtype=np.int32)
        np.add.at(self._due, left, 1)

    def add(self, ids: IntArray) -> None:
        """A step trained on these samples."""
        np.subtract.at(self._due, ids, 1)
        self._trained += len(ids)

    def receipt(self, refused: int = 0, refused_file: Path | None = None) -> Receipt:
        """What became of the epoch so far."""
        repeated = -int(self._due[self._due < 0].sum())
        return Receipt(
            epoch=self.epoch,
            planned=self.before + self._left,
            before=self.before,
            trained=self._trained - repeated,
            repeated=repeated,
            remaining=int(self._due[self._due > 0].sum()),
            dropped=self._dropped,
            refused=refused,
            refused_file=refused_file if refused else None,
        )
