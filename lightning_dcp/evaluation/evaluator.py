"""Run one item of validation, test or prediction: what user code sees of it, and what of it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_dcp.data.batch import labels_of
from lightning_dcp.data.evaluation import EvaluationItem
from lightning_dcp.data.randomness import isolated, seed_global
from lightning_dcp.execution import NO_EXCHANGE, LossSettings, seeded, valid_per_sample
from lightning_dcp.logged import weigh_hooks, weighted_logs
from lightning_dcp.seeding import seed_from
from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup, activate
from lightning_dcp.sequence_parallel.counting import uncounted
from lightning_dcp.sequence_parallel.interception import patched_attention
from lightning_dcp.upstream import silent_writers


@dataclass(slots=True, kw_only=True)
class _Running:
    """The item whose hooks and step are running."""

    item: EvaluationItem
    stack: ExitStack
    context: MicroBatchContext
    weight: float = 0.0


class Evaluator:
    """Opens items on this rank.

    Args:
        module: the LightningModule.
        trainer: whose results and writers are meant.
        group_of: first rank and size to the group as seen from this rank.
        transfer: moves a batch of a loader, given by its number, to the device, with the user's hooks.
        seed: of what user code draws.
        loss: what logged values are means over.
    """

    def __init__(
        self,
        *,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        group_of: Callable[[int, int], SPGroup],
        transfer: Callable[[Any, int], Any],
        seed: int,
        loss: LossSettings,
    ) -> None:
        self._module = module
        self._trainer = trainer
        self._group_of = group_of
        self._transfer = transfer
        self._seed = seed
        self._loss = loss
        self._running: _Running | None = None

    def around(self, item: Any, run: Callable[[], None]) -> bool:
        """Run the Trainer's whole step of an item, hooks and logging included.

        Args:
            item: what the loader gave.
            run: the step.

        Returns:
            Whether this rank answers for what was predicted.
        """
        if not isinstance(item, EvaluationItem):
            run()
            return True
        group = self._group_of(item.first_rank, item.sp_size)
        counts = group.rank == 0 and not item.is_copy
        with ExitStack() as stack:
            context = MicroBatchContext(
                group=group,
                sample_ids=item.ids,
                shapes=item.shapes,
                padded_shape=item.padded_shape,
                seed=self._seed if item.hooks is None else item.hooks.seed,
                weighting=self._loss.weighting,
                is_copy=item.is_copy,
            )
            stack.enter_context(_drawing_alike(seed_from(context.seed, 0, *item.ids[:1], group.rank)))
            stack.enter_context(activate(context))
            if group.size > 1:
                stack.enter_context(patched_attention())
            if item.is_copy:
                stack.enter_context(uncounted(self._module))
            if not counts:
                stack.enter_context(silent_writers(self._trainer))
            self._running = _Running(item=item, stack=stack, context=context)
            try:
                run()
            finally:
                self._running = None
                weigh_hooks(self._trainer, None)
        return counts

    def shard(self, item: EvaluationItem, dataloader_idx: int) -> Any:
        """What hooks and steps get: the batch on the device, at ``p > 1`` this rank's part of it."""
        running = self._now()
        batch = self._transfer(item.data, dataloader_idx)
        labels = self._labels(batch) if self._loss.weighting == "sample" else None
        totals_B = None if labels is None else valid_per_sample(labels, self._loss.ignore_index)
        if totals_B is not None and len(totals_B) == len(item.ids):  # else one index, or none, stands for a batch
            running.context.items_per_sample_B = totals_B
        shard = batch if item.hooks is None else item.hooks.shard(batch, running.context.group)
        running.weight = 0.0 if item.is_copy else self._items(item, shard, totals_B)
        weigh_hooks(self._trainer, running.weight)
        return shard

    def step(self, call: Callable[[], Any]) -> Any:
        """Run ``validation_step`` or ``test_step``; what it and the hooks after it log counts by its items.

        Raises:
            RuntimeError: at ``p > 1``, the ranks of the group did not see each other's tokens.
        """
        running = self._running
        if running is None:
            return call()
        with weighted_logs(self._trainer, running.weight):
            result = call()
        _check_exchanged(running.context)
        return result

    def predict(self, call: Callable[[], Any]) -> Any:
        """Run ``predict_step``.

        Raises:
            RuntimeError: as :meth:`step`; or a part of the tokens was to be handed out as the prediction.
        """
        running = self._running
        result = call()
        if running is not None:
            _check_exchanged(running.context)
            _check_gathered(running.context, result)
        return result

    def _now(self) -> _Running:
        if self._running is None:
            raise MisconfigurationException(
                "an item of an evaluation loader came from outside of the Trainer's loops; iterate over the batches "
                "of your own loader instead"
            )
        return self._running

    def _items(self, item: EvaluationItem, shard: Any, totals_B: Tensor | None) -> float:
        """What a value logged for this shard is taken for the mean over: its valid labels, else its samples.

        Args:
            item: what the loader gave.
            shard: this rank's part of it.
            totals_B: weighted by sample, the valid labels of each whole sample.
        """
        labels = self._labels(shard)
        if totals_B is not None and labels is not None:
            here_B = valid_per_sample(labels, self._loss.ignore_index)
            return float((here_B / totals_B.clamp(min=1)).sum())
        if self._loss.weighting == "token" and item.hooks is not None:
            try:
                return float(item.hooks.loss_items(shard))
            except ValueError:
                pass  # neither labels nor a mask: nothing but samples can be counted
        elif self._loss.weighting == "token" and labels is not None:
            return float((labels != self._loss.ignore_index).sum())
        return _samples(item, shard) / item.sp_size

    def _labels(self, batch: Any) -> Tensor | None:
        labels = labels_of(batch, self._loss.labels_key)
        return labels if isinstance(labels, Tensor) and labels.dim() > 0 else None


@contextmanager
def _drawing_alike(seed: int) -> Iterator[None]:
    """The same random numbers whenever a sample is evaluated, and none of the run's."""
    with isolated(), seeded(seed):
        seed_global(seed)
        yield


def _samples(item: EvaluationItem, shard: Any) -> int:
    if item.shapes or len(item.ids) > 1:
        return len(item.ids)
    try:
        # One index, or none, may stand for a whole batch that the dataset made.
        return int(extract_batch_size(shard))
    except MisconfigurationException:
        return max(len(item.ids), 1)


def _check_exchanged(context: MicroBatchContext) -> None:
    if context.group.size == 1:
        return
    problems = list(dict.fromkeys(context.failures))
    if context.interceptions == 0:
        problems.append(NO_EXCHANGE.format(size=context.group.size))
    if context.masks_differ is not None and bool((context.masks_differ > 0).any()):
        problems.append(
            "an attention mask was given on some ranks of a sequence-parallel group only; pass it on every shard"
        )
    if problems:
        raise RuntimeError(f"samples {context.sample_ids}: " + "\n".join(problems))


def _check_gathered(context: MicroBatchContext, prediction: Any) -> None:
    if context.group.size > 1 and context.gathers == 0 and prediction is not None:
        raise RuntimeError(
            f"predict_step ran on 1/{context.group.size} of the tokens of the samples {context.sample_ids} and "
            "returned a prediction without gathering. The group's first rank hands out that of the whole samples: "
            "return lightning_dcp.sequence_parallel.gather(output, dim=1), or set sp_sizes=[1]"
        )
