"""From a torch ``DataLoader`` to a :class:`~lightning_dcp.data.loader.DCPLoader` of the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, RandomSampler, default_collate

from lightning_dcp.cost import IntArray
from lightning_dcp.data.collate import CollateRules, detect_sequence_axes
from lightning_dcp.data.lengths import check_shapes, dataset_size, known_shapes, read_shapes, shape_of
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.randomness import isolated
from lightning_dcp.data.reading import LoaderOptions
from lightning_dcp.data.sampler import StepSampler
from lightning_dcp.data.takeover.collating import LoaderCollate, is_paddable, sequence_length
from lightning_dcp.data.takeover.frames import skeleton
from lightning_dcp.data.takeover.hooks import LoaderHooks
from lightning_dcp.data.takeover.ordering import batch_size_of, given_of, seed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What surrounds a loader.

    Attributes:
        frame: the collection that it stands in.
        count: the user's ``loss_items``.
        world_size: ranks of the run.
        in_order: take the samples in the order of the dataset, whatever the loader does (``overfit_batches``).
    """

    frame: Any
    count: Callable[[Any], int] | None
    world_size: int
    in_order: bool

    @classmethod
    def of(cls, trainer: pl.Trainer, frame: Any) -> Around:
        """That of a trainer's loader."""
        owners = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]
        counts = (getattr(owner, "loss_items", None) for owner in owners)
        return cls(
            frame=frame,
            count=next((count for count in counts if callable(count)), None),
            world_size=trainer.world_size,
            in_order=bool(trainer.overfit_batches),  # type: ignore[attr-defined]
        )


def taken(loader: DataLoader[Any], around: Around) -> DCPLoader:
    """The loader that trains in the place of a user's; called by every rank.

    ``batch_size`` times the number of ranks are the samples of a step. Order, collate function, workers and pinned
    memory are the user's.

    Raises:
        MisconfigurationException, ValueError: the samples have no lengths, or the order is no function of seed and
            epoch; see also :func:`~lightning_dcp.data.takeover.refusals.check_given`.
    """
    dataset: Any = loader.dataset
    shapes = _shapes(loader)
    collate = LoaderCollate(
        collate_fn=loader.collate_fn,
        rules=_rules(loader, shapes),
        lengths_differ=bool((shapes != shapes[0]).any()),
        frame=skeleton(around.frame),
    )
    _check_collate(loader, shapes)
    given = given_of(loader, around.world_size)
    if around.in_order and given.batches_per_step is None:
        given = replace(given, draw=None, sized=True)
    sampler = StepSampler(
        shapes.prod(axis=1),
        seed=seed_of(loader),
        shuffle=isinstance(loader.sampler, RandomSampler) and not around.in_order,
        global_batch_size=None if given.batches_per_step else batch_size_of(loader) * around.world_size,
        given=given,
    )
    if not sampler.num_steps(0):
        raise MisconfigurationException(
            f"DataLoader(batch_size={batch_size_of(loader)}, drop_last=True) on {around.world_size} ranks needs "
            f"{sampler.global_batch_size} samples for a step, and the dataset has {len(shapes)}, so nothing would be "
            "trained. Use a smaller batch_size, fewer devices, or drop_last=False"
        )
    return DCPLoader(
        dataset, shapes=shapes, sampler=sampler, hooks=LoaderHooks(collate, around.count), options=_options(loader)
    )


def _shapes(loader: DataLoader[Any]) -> IntArray:
    dataset: Any = loader.dataset
    size = dataset_size(dataset)
    known = known_shapes(dataset)
    if known is not None:
        return check_shapes(known, size)
    try:
        return read_shapes(dataset)
    except ValueError as error:
        measured = _collated_lengths(loader, size)
        if measured is None:
            raise ValueError(
                f"{error}. A dataset of a plain DataLoader tells its lengths by an attribute, or a column, lengths or "
                "length: one integer per sample"
            ) from error
        return check_shapes(measured, size)


def _collated_lengths(loader: DataLoader[Any], size: int) -> list[int] | None:
    """Length of each sample when it is collated alone; ``None`` where batches have no sequences by key."""
    lengths = []
    with isolated():
        for index in range(size):
            batch = loader.collate_fn([loader.dataset[index]])
            length = sequence_length(batch) if isinstance(batch, Mapping) else None
            if length is None:
                return None
            lengths.append(length)
    return lengths


def _rules(loader: DataLoader[Any], shapes: IntArray) -> CollateRules:
    rules = CollateRules()
    if loader.collate_fn is not default_collate:
        return rules
    return replace(rules, sequence_axes=detect_sequence_axes(loader.dataset, shapes, rules))


def _check_collate(loader: DataLoader[Any], shapes: IntArray) -> None:
    """Look at the batches of the shortest and of the longest sample.

    Raises:
        MisconfigurationException: torch's default collate would have to stack samples of different lengths.
    """
    tokens = shapes.prod(axis=1)
    ends = [int(tokens.argmin()), int(tokens.argmax())]
    try:
        with isolated():
            samples = [loader.dataset[index] for index in ends]
            batches = [loader.collate_fn([sample]) for sample in samples]
    except Exception:
        # What cannot be read is reported when its turn comes, by name and on all ranks at once.
        return
    if loader.collate_fn is default_collate:
        if not is_paddable(samples[0]) and (shapes != shapes[0]).any():
            raise MisconfigurationException(
                f"the samples of the train dataset are of type {type(samples[0]).__name__} and differ in length, so "
                "torch's default collate cannot stack them, and which of their values are labels is not known; allowed "
                "are dicts of sequences, which are padded. Give the DataLoader a collate_fn that pads, or let the "
                "dataset return dicts"
            )
        return
    lengths = [sequence_length(batch) if isinstance(batch, Mapping) else None for batch in batches]
    _warn_of_other_lengths(ends, [shape_of(shapes[i])[0] for i in ends], lengths)


def _warn_of_other_lengths(ends: Sequence[int], sizes: Sequence[int], lengths: Sequence[int | None]) -> None:
    for sample, size, length in zip(ends, sizes, lengths, strict=True):
        if length is not None and not 0.9 * size - 8 <= length <= 1.1 * size + 64:
            rank_zero_warn(
                f"collate_fn makes a batch of length {length} of sample {sample} alone, whose length is {size}: plans, "
                "times and memory are made for the lengths of the samples. Pad to the longest sample of a batch, not "
                "to a fixed length, and give the dataset the lengths that samples have behind collate_fn (an attribute "
                "lengths)"
            )
            return


def _options(loader: DataLoader[Any]) -> LoaderOptions:
    workers = loader.num_workers
    context: Any = loader.multiprocessing_context
    return LoaderOptions(
        num_workers=workers,
        prefetch_steps=(loader.prefetch_factor or 2) * workers if workers else 2,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=context,
        any_batch=True,
    )
