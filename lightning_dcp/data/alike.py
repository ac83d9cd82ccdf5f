"""Ranks compare what they are going to read: each takes its part of one dataset, not a dataset of its own."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from lightning_dcp.agreement import of_all_ranks
from lightning_dcp.data.loader import DCPLoader

_DO = (
    "Every rank must be given the whole dataset, the same on all of them, and DCPStrategy gives each its part. Leave "
    "out what divides by rank, and check files, arguments and seeds"
)


def check_alike(loader: DCPLoader, world_size: int) -> None:
    """Refuse to train on data, order or sizes of steps that are not those of the other ranks.

    One small gather, called by every rank.

    Args:
        loader: of this rank.
        world_size: number of ranks; with one nothing is communicated.

    Raises:
        ValueError: on all ranks; the sentence names a field and its values.
    """
    if world_size == 1:
        return
    mine = {key: value for key, value in loader.sampler.state_dict().items() if key != "left_out"}
    lengths = np.ascontiguousarray(loader.shapes).tobytes()
    mine["digest of lengths"] = hashlib.blake2b(lengths, digest_size=8).hexdigest()
    everyones = of_all_ranks(mine, world_size)
    for name in dict.fromkeys(name for other in everyones for name in other):
        values = [other.get(name) for other in everyones]
        if any(value != values[0] for value in values):
            raise ValueError(f"the ranks have different train data: {name} = {_differing(values)}. {_DO}")


def check_same_size(size: int | None, dataset: Any, world_size: int) -> None:
    """Refuse to evaluate a dataset that has another number of samples on another rank.

    One small gather, called by every rank.

    Args:
        size: samples, or batches of a batch sampler of the user's own, on this rank.
        dataset: for the sentence.
        world_size: number of ranks; with one nothing is communicated.

    Raises:
        ValueError: on all ranks, with both numbers.
    """
    sizes = of_all_ranks(size, world_size)
    if len(set(sizes)) > 1:
        first, other = _differing(sizes).split(" ", 1)
        raise ValueError(
            f"the ranks evaluate different data: {type(dataset).__name__} gives {first} samples {other}, so some would "
            f"be evaluated twice and others never. {_DO}"
        )


def _differing(values: list[Any]) -> str:
    """The value of rank 0 and the first other one."""
    rank = next(rank for rank, value in enumerate(values) if value != values[0])
    return f"{values[0]} on rank 0 and {values[rank]} on rank {rank}"
