"""The train loader: plans each step in the main process, reads this rank's part of it ahead in workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.cost import IntArray
from lightning_dcp.data.ahead import ReadAhead, StepPass
from lightning_dcp.data.batch import Batch, DCPBatch
from lightning_dcp.data.counts import EpochCounts
from lightning_dcp.data.drawing import Stray
from lightning_dcp.data.feeding import Planned, tasks
from lightning_dcp.data.leaving import misfits, refuse, write_left_out
from lightning_dcp.data.lengths import check_shapes, dataset_size
from lightning_dcp.data.planning import PlanningContext, request_of, samples_of
from lightning_dcp.data.reading import LoaderOptions, Reader, Task
from lightning_dcp.data.sampler import StepSampler
from lightning_dcp.data.sizing import check_size
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.adapting import for_dataset
from lightning_dcp.planners.protocol import Planner, PlanRequest
from lightning_dcp.sequence_parallel.context import SPGroup

__all__ = ["DCPLoader", "DataHooks", "PlanningContext"]


class DataHooks(Protocol):
    """What a dataset's owner knows about its batches; :class:`DCPDataModule` satisfies it."""

    def collate(self, samples: Sequence[Any], micro_batch: MicroBatch) -> Batch:
        """One batch of the samples of a micro-batch, before sharding."""
        ...

    def shard(self, batch: Batch, group: SPGroup) -> Batch:
        """The part of a batch that one rank of a group trains on."""
        ...

    def loss_items(self, batch: Batch) -> int:
        """Items of a shard that the loss averages over."""
        ...


class DCPLoader:
    """Yields one :class:`DCPBatch` per optimizer step of this rank.

    It is no ``torch.utils.data.DataLoader``, so the Trainer leaves it and its sampler alone. Nothing is decided
    before the first ``next``: planner, epoch and position may be set until then, also after ``iter``.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        shapes: size of each sample, int64 ``[n, axes]``.
        sampler: the steps.
        hooks: collate, shard, loss_items.
        options: how samples are read.

    Raises:
        ValueError: the dataset is empty, or shapes and dataset do not fit each other.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shapes: IntArray,
        sampler: StepSampler,
        hooks: DataHooks,
        options: LoaderOptions | None = None,
    ) -> None:
        # Not named "dataset": the Trainer would take it for a DataLoader that it may build anew.
        self.source = dataset
        self.shapes = check_shapes(shapes, dataset_size(dataset))
        self.sampler = sampler
        self.hooks = hooks
        self.options = options or LoaderOptions()
        self.started = False
        """Whether a step was asked for since the loader was made."""
        self._context: PlanningContext | None = None
        self._reader = Reader(
            dataset=dataset,
            size=len(self.shapes),
            collate=hooks.collate,
            seed=sampler.seed,
            any_batch=self.options.any_batch,
        )
        self._ahead = ReadAhead(self._reader, self.options)

    def announce(self, planner: Planner) -> None:
        """Say who will plan, as soon as that is known.

        Whether steps have a size, and an epoch a length, depends on it, and is asked before there is a profile to
        plan with.

        Raises:
            ValueError: the planner plans the samples that it is given, and nothing says how many these are; or it draws
                them, and does not say among how many.
        """
        in_vain = check_size(planner, self.sampler)
        if in_vain is not None and not self.sampler.drawing:
            rank_zero_warn(in_vain)
        self.sampler.drawing = planner.draws

    def bind(self, context: PlanningContext) -> None:
        """Give the loader its planner; takes effect at the next iteration.

        What the planner leaves open (length groups, bounds of a step) is taken from the dataset and the run.

        Raises:
            ValueError: as :meth:`announce`.
            InfeasibleError: samples fit no setting, and are not to be left out.
        """
        self.announce(context.planner)
        unfit = misfits(context, self.shapes)
        if len(unfit) and self.options.too_long == "raise":
            refuse(context, self.shapes, unfit)
        self.sampler.leave_out(unfit)
        kept = np.delete(self.shapes, unfit, axis=0) if len(unfit) else self.shapes
        planner = for_dataset(context.planner, kept, self.sampler.global_batch_size)
        self._context = replace(context, planner=planner)

    def list_left_out(self, folder: str | Path) -> None:
        """Say which samples are left out, in a warning and a file; on rank 0, where they may be left out."""
        if self.options.too_long == "leave_out":
            path, count = write_left_out(folder, self.shapes, self.refused_ids), len(self.refused_ids)
            if count and path is not None:
                rank_zero_warn(
                    f"{count} of {len(self.shapes)} samples fit no setting and are left out of every epoch; they are "
                    f"listed in {path}"
                )

    @property
    def stray(self) -> Stray:
        """How far the last consumed step strayed from the order of the epoch."""
        return self.sampler.stray

    @property
    def refused_ids(self) -> IntArray:
        """Samples of the dataset that fit no setting and are left out of every epoch, ascending."""
        return self.sampler.left_out

    def left_samples(self) -> IntArray:
        """Samples of the dataset that the steps to come of the epoch have, in its order; one may stand twice."""
        return self.sampler.left_ids() % len(self.shapes)

    def counts(self) -> EpochCounts:
        """What became of the samples of the running epoch, or of the last one before the next one begins."""
        return self.sampler.counts()

    @property
    def waited_seconds(self) -> float:
        """Seconds spent in ``next`` so far: reading, collating and planning that were not ready in time."""
        return self._ahead.waited_seconds

    @property
    def consumed_samples(self) -> int:
        """Samples trained on since the first epoch, on all ranks."""
        return self.sampler.consumed_samples

    @property
    def consumed_tokens(self) -> int:
        """Tokens trained on since the first epoch, without padding, on all ranks."""
        return self.sampler.consumed_tokens

    def __len__(self) -> int:
        """Steps of an epoch.

        Raises:
            TypeError: the number differs between epochs.
        """
        return len(self.sampler)

    def __iter__(self) -> Iterator[DCPBatch]:
        """An iterator from the first step that was not consumed; see the class."""
        return StepPass(self._ahead, self._begin, self.sampler)

    def mark_consumed(self, batch: DCPBatch) -> None:
        """A step was trained on; to be called after the optimizer step."""
        self.sampler.mark_consumed(batch.epoch, batch.step, samples_of(batch.plan.iteration))

    def state_dict(self) -> dict[str, Any]:
        """Position behind the last consumed step, whatever was read ahead; the same on every rank.

        A dataset with ``state_dict`` and ``load_state_dict`` adds its own state as it is in this process: that of
        rank 0 gets into a checkpoint, and every rank gets it back.
        """
        state = self.sampler.state_dict()
        return {**state, "dataset": self.source.state_dict()} if has_state(self.source) else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue behind a saved position, on any number of ranks and with any planner.

        Raises:
            ValueError: the state belongs to other data or another batch size; the sentence names the field.
        """
        self.sampler.load_state_dict(state_dict)
        if "dataset" in state_dict and has_state(self.source):
            self.source.load_state_dict(state_dict["dataset"])
            self.close()  # workers hold copies of the dataset

    def load(self, micro_batch: MicroBatch, epoch: int = 0, step: int = 0) -> Batch:
        """Read and collate one micro-batch in this process, unsharded, on the CPU.

        Raises:
            ReadError: the dataset or the collate function raised.
        """
        return self._reader.load(micro_batch, epoch, step)

    def upcoming(self, count: int) -> list[IterationPlan]:
        """Plans of the next steps of the epoch, at most ``count``; nothing is read, and no step is consumed.

        Raises:
            PlanError: a step cannot be planned; as it would be when its turn comes.
        """
        planned: deque[Planned] = deque()
        for _ in islice(tasks(self._bound(), self.sampler, self.shapes, planned), count):
            pass
        for step in planned:
            if step.error is not None:
                raise step.error
        return [step.plan for step in planned if step.plan is not None]

    def close(self) -> None:
        """Stop the workers; a later iteration starts new ones."""
        self._ahead.close()

    def _begin(self, planned: deque[Planned]) -> Iterator[Task]:
        """Start planning for one pass, from the position of the sampler."""
        context = self._bound()
        self.started = True
        self.sampler.begin()
        return tasks(context, self.sampler, self.shapes, planned)

    def request_of(self, plan: IterationPlan) -> PlanRequest:
        """What a planner is asked for the samples of a plan."""
        return request_of(self._bound(), samples_of(plan), self.shapes)

    def _bound(self) -> PlanningContext:
        if self._context is None:
            raise RuntimeError(
                "the loader has no planner yet; DCPStrategy binds it in setup. Under another strategy a "
                "DCPDataModule does not train: give a DataLoader. If configure_optimizers asks for "
                "trainer.estimated_stepping_batches: the number of steps of an epoch is not known where the planner "
                "draws their samples, or with global_batch_tokens, so set Trainer(max_steps=...) and use that number"
            )
        return self._context


def has_state(dataset: Any) -> bool:
    """Whether a dataset keeps a state that belongs into checkpoints."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
