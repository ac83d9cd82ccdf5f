"""Items from what can only be read one after the other: every rank reads all and keeps every ``W``-th batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from lightning_dcp.agreement import of_all_ranks
from lightning_dcp.data.evaluation.item import EvaluationItem
from lightning_dcp.data.evaluation.place import Place
from lightning_dcp.data.evaluation.rounds import Assignment
from lightning_dcp.data.randomness import isolated, seed_global
from lightning_dcp.seeding import seed_from


class StreamSource:
    """Evaluates a stream: a ``DataLoader`` over an ``IterableDataset``, or any iterable of batches.

    Args:
        loader: gives the same batches on all ranks.
        place: see :class:`Place`.
    """

    hooks = None
    dataset = None
    sampler = None

    def __init__(self, loader: Iterable[Any], place: Place) -> None:
        self._loader = loader
        self._place = place

    def __len__(self) -> int:
        raise TypeError("the length of a stream is not known")

    def items(self) -> Iterator[EvaluationItem]:
        """One pass; one small gather over the world for every ``W`` batches.

        Raises:
            ValueError: on all ranks, if the ranks read different batches.
        """
        place = self._place
        reading = self._read()
        while group := list(islice(reading, place.world_size)):
            self._check(group)
            is_copy = place.rank >= len(group)
            mine = group[0 if is_copy else place.rank]
            yield EvaluationItem(mine, Assignment(ids=(), first_rank=place.rank, is_copy=is_copy))

    def _read(self) -> Iterator[Any]:
        with isolated():
            seed_global(seed_from(self._place.seed))
            reading = iter(self._loader)
        number = 0
        while True:
            with isolated():
                seed_global(seed_from(self._place.seed, number))
                try:
                    batch = next(reading)
                except StopIteration:
                    break
            yield batch
            number += 1
        self._check([])

    def _check(self, group: Sequence[Any]) -> None:
        digest = hashlib.blake2b(digest_size=8)
        _add(digest, group)
        if len(set(of_all_ranks(digest.hexdigest(), self._place.world_size))) > 1:
            raise ValueError(
                f"the loader {type(self._loader).__name__} gives other batches on other ranks; allowed is a stream "
                "that is the same on every rank: each keeps every W-th batch of it. Leave out what divides the "
                "stream by rank, seed what is random, or use a dataset with __len__ and __getitem__"
            )


def _add(digest: Any, value: Any) -> None:
    """What of a batch is the same in all processes: numbers and text, not the addresses of objects."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(str(key).encode())
            _add(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, str | int | float | bool):
        digest.update(repr(value).encode())
