"""A user's sampler as the order of the epochs: drawn by (seed, epoch) alone, the same on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from lightning_dcp.data.order import Drawn
from lightning_dcp.data.randomness import GENERATORS, isolated, reseeded, seed_global
from lightning_dcp.data.steps import Given
from lightning_dcp.seeding import seed_from

OwnSampler = Iterable[int] | Callable[[Any], Iterable[int]]
"""A sampler, or a function of the dataset that returns one."""

_DRAW = 0x5A3
"""Keeps the numbers that a sampler draws apart from those of samples, which are seeded by (seed, epoch, sample)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerDraw:
    """Draws epochs from a user's sampler.

    The global generators (torch, NumPy, ``random``) and those that the sampler holds are seeded for the draw and
    get their state back; ``set_epoch`` is called where it exists.

    Attributes:
        sampler: gives positions in the dataset, or batches of them.
        size: samples of the dataset.
        seed: of the run.
        batched: whether it gives batches.
        length: its ``len``, where it has one; each epoch has so many places (batches).
    """

    sampler: Any
    size: int
    seed: int
    batched: bool = False
    length: int | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return type(self.sampler).__name__

    def __call__(self, epoch: int) -> Drawn:
        """Draw one epoch.

        Raises:
            ValueError: it gives no positions of the dataset, none at all, or another number than it says.
        """
        seed = seed_from(self.seed, epoch, _DRAW)
        with isolated(), reseeded(list(_generators(self.sampler)), seed):
            seed_global(seed)
            _set_epoch(self.sampler, epoch)
            given = list(self.sampler)
        if self.length is not None and len(given) != self.length:
            raise ValueError(
                f"{self.name} says that it has {self.length} places and gave {len(given)} in epoch {epoch}; an epoch "
                "would be cut short, or end too late. Give the same number in every epoch, or remove its __len__ (and "
                "set Trainer(max_steps=...))"
            )
        batches = [list(batch) for batch in given] if self.batched else [given]
        samples = self._checked([sample for batch in batches for sample in batch], epoch)
        if not self.batched:
            return Drawn(samples)
        return Drawn(samples, np.repeat(np.arange(len(batches)), [len(batch) for batch in batches]))

    def _checked(self, given: list[Any], epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        try:
            samples = np.asarray([index(sample) for sample in given], dtype=np.int64)
        except TypeError as error:
            raise ValueError(
                f"{self.name} gave {given[:2]!r:.80} in epoch {epoch}; allowed are integers, positions in the dataset. "
                "A sampler of batches is given as batch_sampler="
            ) from error
        if not len(samples) or samples.min() < 0 or samples.max() >= self.size:
            wrong = samples[(samples < 0) | (samples >= self.size)][:3].tolist() if len(samples) else "nothing"
            raise ValueError(
                f"{self.name} gave {wrong} in epoch {epoch}; allowed are positions from 0 to {self.size - 1} in the "
                "dataset, at least one"
            )
        return samples


def given_by(sampler: OwnSampler | None, dataset: Any, seed: int) -> Given | None:
    """What the sampler of a data module decides; see :func:`given_order`.

    Args:
        sampler: or a function of the dataset that returns one.
        dataset: what it gives positions of.
        seed: of the run.
    """
    if sampler is None:
        return None
    found = sampler if isinstance(sampler, Iterable) else sampler(dataset)
    return given_order(found, len(dataset), seed)


def given_order(sampler: Iterable[Any], size: int, seed: int, *, batched: bool = False) -> Given:
    """What a user's sampler decides about the steps.

    Args:
        sampler: gives positions in the dataset in the order of an epoch, as often as it is iterated.
        size: samples of the dataset.
        seed: of the run.
        batched: whether it gives batches of them.

    Raises:
        ValueError: its order cannot be told by (seed, epoch); or see :class:`SamplerDraw`.
    """
    whole = _of_all_ranks(sampler)
    length = _length_of(whole)
    draw = SamplerDraw(sampler=whole, size=size, seed=seed, batched=batched, length=length)
    first, second = draw(0), draw(0)
    if not np.array_equal(first.samples, second.samples):
        raise ValueError(
            f"{draw.name} gave two orders for the same seed and epoch, so a resumed run, or another rank, could not "
            "find the order again. Let it draw from the global generators of torch, NumPy or random, from a generator "
            "that it keeps as an attribute, or from what set_epoch(epoch) is told"
        )
    return Given(draw=draw, name=draw.name, sized=length is not None)


def _of_all_ranks(sampler: Any) -> Any:
    """The sampler of the whole epoch in the place of one rank's part of it."""
    inside: Any = getattr(sampler, "sampler", None)
    if type(sampler) is BatchSampler and type(inside) is DistributedSampler:
        return BatchSampler(_of_all_ranks(inside), sampler.batch_size, sampler.drop_last)
    if type(sampler) is DistributedSampler:  # no subclass, which may compute its order otherwise
        return _undivided(sampler)
    parts = [part for part in _parts(sampler) if hasattr(part, "num_replicas") and hasattr(part, "rank")]
    if parts:
        raise ValueError(
            f"{type(parts[0]).__name__} gives each rank its part of the samples; allowed is a sampler of all samples, "
            "since the strategy itself divides each step. Give the sampler that it divides (or, for a plain random "
            "order, no sampler and shuffle=True)"
        )
    return sampler


def _undivided(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """Torch's own for one rank: the order that all ranks together have, without the samples that it repeats.

    With ``drop_last`` the same samples are dropped as for its number of ranks.
    """
    whole, size = copy.copy(sampler), len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.drop_last:
        size = min(sampler.total_size, size)
    whole.num_replicas, whole.rank, whole.num_samples, whole.total_size = 1, 0, size, size
    return whole


def _length_of(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _parts(sampler: Any) -> Iterator[Any]:
    """A sampler and those that it is made of."""
    yield sampler
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, Sampler):
            yield from _parts(value)


def _generators(sampler: Any) -> Iterator[Any]:
    for part in _parts(sampler):
        yield from (v for v in getattr(part, "__dict__", {}).values() if isinstance(v, GENERATORS))


def _set_epoch(sampler: Any, epoch: int) -> None:
    for part in _parts(sampler):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
