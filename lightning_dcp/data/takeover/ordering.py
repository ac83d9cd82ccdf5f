"""What a torch ``DataLoader`` decides about the order of the samples and the size of the steps."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_dcp.data.own_order import given_order
from lightning_dcp.data.steps import Given


def given_of(loader: DataLoader[Any], world_size: int) -> Given:
    """Order and steps of a loader's epochs.

    Args:
        loader: with a dataset that has a length.
        world_size: ranks of the run; with a user's batch sampler, so many of its batches are a step.

    Raises:
        ValueError: see :func:`~lightning_dcp.data.own_order.given_order`.
    """
    dataset: Any = loader.dataset
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler:
        own = given_order(batches, len(dataset), seed_of(loader), batched=True)
        return replace(own, batches_per_step=world_size, per_rank=1)
    order = (
        Given() if _is_default(batches.sampler) else given_order(batches.sampler, len(dataset), seed_of(loader))
    )
    return replace(order, drop_last=bool(batches.drop_last), per_rank=batch_size_of(loader))


def seed_of(loader: DataLoader[Any]) -> int:
    """Seed of a loader's generator, else that of ``seed_everything``, else 0: the same on every rank."""
    generator = loader.generator or getattr(loader.sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        return int(generator.initial_seed()) % 2**63
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Samples of a batch; 1 where a user's batch sampler decides."""
    size = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size
    return int(size or 1)


def _is_default(sampler: Any) -> bool:
    """Whether a sampler is what ``shuffle=True`` or ``False`` stand for."""
    if type(sampler) is SequentialSampler:
        return True
    whole = type(sampler) is RandomSampler and sampler.num_samples == len(sampler.data_source)
    return whole and not sampler.replacement
