"""What the tests of sequence parallelism share; everything runs inside a worker of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dcp.sequence_parallel.context import SPGroup
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.topology import laminar_blocks


def world_group() -> SPGroup:
    """One group of all ranks."""
    size = dist.get_world_size()
    groups = ProcessGroups([(0, size)])
    groups.ensure()
    return groups.of(0, size)


def groups_of_this_rank() -> Iterator[SPGroup]:
    """Every group of the laminar family of all sizes that this rank is in, widest first."""
    size = dist.get_world_size()
    blocks = laminar_blocks(size, range(1, size + 1), size)
    groups = ProcessGroups(blocks)
    groups.ensure()
    for first, length in blocks:
        if first <= dist.get_rank() < first + length:
            yield groups.of(first, length)


def shard_of(whole: Tensor, dim: int, group: SPGroup) -> Tensor:
    """Contiguous part of this rank."""
    return whole.chunk(group.size, dim)[group.rank]


def sum_over(group: SPGroup, tensor: Tensor) -> Tensor:
    """Sum over the ranks of a group, as the gradient reduction of a training step does."""
    total = tensor.detach().clone()
    if group.handle is not None:
        dist.all_reduce(total, group=group.handle)
    return total


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that are alike on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Names of the collectives that this rank calls meanwhile, in order."""
    names = [
        "all_to_all_single", "all_to_all", "all_gather", "all_gather_into_tensor", "all_reduce", "broadcast",
        "reduce_scatter_tensor", "reduce_scatter", "barrier", "send", "recv", "batch_isend_irecv",
    ]  # fmt: skip
    called: list[str] = []
    originals = {name: getattr(dist, name) for name in names}

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(dist, name, wrap(name, original))
    try:
        yield called
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
