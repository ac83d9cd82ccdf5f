"""The torch loader below an evaluation loader: same workers as the user's, other indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_dcp.data.evaluation.rounds import Assignment
from lightning_dcp.data.randomness import isolated, seed_global
from lightning_dcp.data.reading import Feed
from lightning_dcp.seeding import seed_from


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader reads: its workers and its pinning, not what it reads.

    The generator is a new one: a loader draws a base seed, which must not come from the random numbers of a fit.
    """
    names = ["num_workers", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "in_order"]
    if loader.num_workers:
        names += ["multiprocessing_context", "prefetch_factor", "persistent_workers"]
    found = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    return {**found, "generator": torch.Generator()}


def batches(loader: DataLoader[Any], feed: Feed, coming: Iterable[Any], seed: int) -> Iterator[Any]:
    """One pass over what ``coming`` names, which draws the same numbers each time and none of the run's.

    Args:
        loader: reads what its sampler ``feed`` says.
        feed: see :class:`~lightning_dcp.data.reading.Feed`.
        coming: indices, lists of them, or assignments.
        seed: of what dataset and collate draw in this process.
    """
    feed.coming = coming
    assert loader.generator is not None
    loader.generator.manual_seed(seed)
    with isolated():
        reading = iter(loader)
    number = 0
    while True:
        with isolated():
            seed_global(seed_from(seed, number))
            try:
                batch = next(reading)
            except StopIteration:
                return
        yield batch
        number += 1


def without_copies(own: Sequence[Assignment]) -> list[Assignment]:
    """Items of a rank in prediction: those that count, or one where none does, so that it meets the others."""
    return [item for item in own if not item.is_copy] or list(own[:1])
