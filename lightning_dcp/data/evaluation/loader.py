"""The loader that the Trainer's loops of evaluation see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from lightning_dcp.data.evaluation.item import EvaluationItem


class Source(Protocol):
    """Where the items of this rank come from."""

    dataset: Any
    sampler: Any

    def __len__(self) -> int:
        """Items of this rank in one pass; raises a TypeError where that is not known."""
        ...

    def items(self) -> Iterator[EvaluationItem]:
        """One pass."""
        ...


class EvaluationLoader:
    """Gives one micro-batch of this rank at a time, and each sample to exactly one of the ranks (or groups).

    It is no ``torch.utils.data.DataLoader``, so the Trainer puts no sampler into it. All ranks get the same number
    of items; in prediction, where every group has one rank, those that do not count are left out.

    Args:
        source: see :class:`Source`.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.batch_sampler: Any = Indices(source)
        """Holds the sampler, which the Trainer tells the epoch; in prediction wrapped by Lightning's recorder."""

    @property
    def dataset(self) -> Any:
        """The user's dataset; ``None`` for a stream."""
        return self.source.dataset

    def __len__(self) -> int:
        """Items in one pass.

        Raises:
            TypeError: the source is a stream of unknown length.
        """
        return len(self.source)

    def __iter__(self) -> Iterator[EvaluationItem]:
        """One pass; nothing is read before its first item is asked for."""
        seen: list[list[int]] = []
        self.batch_sampler.seen_batch_indices = seen
        for item in self.source.items():
            if item.ids:
                seen.append(list(item.ids))
            yield item


class Indices:
    """What Lightning's recorder of indices wraps; the loader writes them down itself.

    Args:
        source: whose samples they are.
    """

    def __init__(self, source: Source) -> None:
        self.sampler = source.sampler
        self.seen_batch_indices: list[list[int]] = []
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(())
