"""What a worker does: read the samples of micro-batches and collate them.

A failure becomes text: an exception on one rank would leave the others waiting in their next exchange.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_dcp.data.batch import Batch
from lightning_dcp.data.checks import check_integer
from lightning_dcp.data.leaving import TooLong, check_too_long
from lightning_dcp.data.randomness import isolated, seed_global
from lightning_dcp.plan import MicroBatch
from lightning_dcp.seeding import seed_from


class Collate(Protocol):
    """Turns samples into one batch."""

    def __call__(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Batch:
        """Collate ``samples``, which stand in the order of ``micro_batch.sample_ids``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How samples are read.

    Attributes:
        num_workers: processes that read samples; 0 reads in the main process.
        prefetch_steps: steps that are planned and read ahead. With more workers than that, one step each.
        pin_memory: copy batches to page-locked memory.
        worker_init_fn: called in each worker with its number. It cannot change the draws of ``__getitem__`` and
            collate, which are seeded for each sample.
        multiprocessing_context: start method of the workers (``"fork"``, ``"spawn"``, ``"forkserver"``), or a context
            of ``multiprocessing``.
        any_batch: whether collate may return something else than a dict.
        too_long: what becomes of samples that fit no setting: ``"raise"`` refuses them before the first step,
            ``"leave_out"`` leaves them out of every epoch.
    """

    num_workers: int = 0
    prefetch_steps: int = 2
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    any_batch: bool = False
    too_long: TooLong = "raise"

    def __post_init__(self) -> None:
        check_too_long(self.too_long)
        for name, minimum in (("num_workers", 0), ("prefetch_steps", 1)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum=minimum))


class ReadError(RuntimeError):
    """A sample could not be read or collated; the message names it, the cause is the dataset's own error."""


class Task(NamedTuple):
    """What one rank has to read for one step."""

    epoch: int
    step: int
    micro_batches: tuple[MicroBatch, ...]


class Reading(NamedTuple):
    """What came of a task: the batches, or the reason why there are none."""

    data: tuple[Batch, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads micro-batches of a dataset with random numbers that no worker and no rank influences.

    Attributes:
        dataset: has ``__getitem__``.
        size: its number of samples.
        collate: turns samples into a batch.
        seed: seed of the run.
        any_batch: whether a batch may be something else than a dict.
    """

    dataset: Any
    size: int
    collate: Collate
    seed: int
    any_batch: bool = False

    def load(self, micro_batch: MicroBatch, epoch: int, step: int) -> Batch:
        """Read and collate one micro-batch, unsharded.

        Draws in ``__getitem__`` depend on (seed, epoch, sample id) alone; draws in collate on (seed, epoch, step,
        first sample id), so all ranks of a group get the same batch. The global generators keep their state.

        Raises:
            ReadError: the dataset or the collate function raised, or that returned no mapping.
        """
        with isolated():
            samples = [self._sample(sample_id, epoch) for sample_id in micro_batch.sample_ids]
            seed_global(seed_from(self.seed, epoch, step, micro_batch.sample_ids[0]))
            try:
                batch = self.collate(samples, micro_batch)
            except Exception as error:
                raise ReadError(
                    f"samples {list(micro_batch.sample_ids)} could not be collated: {_describe(error)}"
                ) from error
        if not self.any_batch and not isinstance(batch, Mapping):
            raise ReadError(
                f"collate returned {type(batch).__name__} for the samples {list(micro_batch.sample_ids)}; it must "
                "return a dict of tensors"
            )
        return batch

    def perform(self, task: Task) -> Reading:
        """Read all micro-batches of a step; never raises an ``Exception``."""
        try:
            return Reading(tuple(self.load(m, task.epoch, task.step) for m in task.micro_batches))
        except Exception as error:
            text = f"step {task.step} of epoch {task.epoch}: {error}\n{traceback.format_exc()}"
            return Reading((), text)

    def _sample(self, sample_id: int, epoch: int) -> Any:
        seed_global(seed_from(self.seed, epoch, sample_id))
        try:
            # The seed takes the id, so that a sample that the epoch has again is drawn anew; see EpochOrder.
            return self.dataset[sample_id % self.size]
        except Exception as error:
            raise ReadError(f"sample {sample_id} could not be read: {_describe(error)}") from error


class TaskDataset(Dataset[Reading]):
    """A dataset whose indices are tasks, for a ``DataLoader`` with ``batch_size=None``."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, task: Task) -> Reading:
        """Perform a task in the process that asks."""
        reading = self.reader.perform(task)
        if get_worker_info() is None:
            return reading
        reason = _cannot_be_sent(reading.data)
        return reading if reason is None else Reading((), f"step {task.step} of epoch {task.epoch}: {reason}")


class Feed:
    """A sampler, or a batch sampler, whose next pass is set from outside."""

    def __init__(self) -> None:
        self.coming: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.coming)


def torch_loader(reader: Reader, feed: Iterable[Task], options: LoaderOptions) -> DataLoader[Reading]:
    """The loader that performs tasks, in workers where these are asked for, in the order of ``feed``."""
    workers: dict[str, Any] = {}
    if options.num_workers:
        workers = {
            "num_workers": options.num_workers,
            "prefetch_factor": -(-options.prefetch_steps // options.num_workers),
            "persistent_workers": True,
            "worker_init_fn": options.worker_init_fn,
            "multiprocessing_context": options.multiprocessing_context,
        }
    # Its own generator: a DataLoader draws a base seed, which must not come from the user's numbers.
    generator = torch.Generator().manual_seed(seed_from(reader.seed))
    return DataLoader(
        TaskDataset(reader),
        batch_size=None,
        sampler=feed,
        collate_fn=_unchanged,
        pin_memory=options.pin_memory,
        generator=generator,
        **workers,
    )


def _unchanged(reading: Any) -> Any:
    return reading


class _WithoutTensors(pickle.Pickler):
    """Pickles into nothing all but the tensors, which workers hand over in shared memory."""

    def persistent_id(self, obj: Any) -> str | None:
        return "tensor" if isinstance(obj, torch.Tensor) else None


def _cannot_be_sent(data: Sequence[Batch]) -> str | None:
    """Why a worker could not hand over its batches: torch would lose them, and the run would wait for ever."""
    for batch in data:
        for key, value in batch.items() if isinstance(batch, Mapping) else [("the whole", batch)]:
            try:
                _WithoutTensors(io.BytesIO()).dump(value)
            except Exception as error:
                return (
                    f'"{key}" of a batch cannot be sent from a worker process: {_describe(error)}. Leave it out in '
                    "__getitem__ or collate, or set num_workers=0"
                )
    return None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
