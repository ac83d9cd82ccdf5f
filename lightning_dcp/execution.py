"""Run one micro-batch: the one path that training, profile and self-check share.

Between :meth:`MicroBatchRunner.open` and the end of its block, forward and backward see the micro-batch's
sequence-parallel group, its recompute depth and its random numbers. Only that group communicates inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_dcp.collectives import WorldCalls
from lightning_dcp.data.batch import Batch, UncountedError, labels_of
from lightning_dcp.plan import MicroBatch
from lightning_dcp.recompute import RecomputeSwitch
from lightning_dcp.seeding import seed_from
from lightning_dcp.sequence_parallel.context import LossWeighting, MicroBatchContext, SPGroup, activate
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.sequence_parallel.interception import patched_attention

LossReduction = Literal["mean", "sum"]

NO_EXCHANGE = (
    "no call of torch.nn.functional.scaled_dot_product_attention was seen at sequence-parallel size {size}, so each "
    "rank attended to its shard only. Call it through the module (F.scaled_dot_product_attention), or "
    "lightning_dcp.sequence_parallel.attention, use need_weights=False in nn.MultiheadAttention and "
    "attn_implementation='sdpa' in Hugging Face models, or set sp_sizes=[1]"
)
"""Why a result at ``p > 1`` is void."""


class BatchHooks(Protocol):
    """What the data side knows about a batch; :class:`~lightning_dcp.data.DCPDataModule` has both."""

    def shard(self, batch: Batch, group: SPGroup) -> Batch:
        """Part of an unsharded micro-batch that this rank computes."""
        ...

    def loss_items(self, batch: Batch) -> int:
        """Items (valid labels) of a shard that the loss averages over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """How a step's losses combine.

    Attributes:
        weighting: the objective is the mean over items (``"token"``) or over samples of the mean over their items.
        reduction: whether ``training_step`` returns the mean or the sum over the items of its shard.
        labels_key: key of the labels ``[B, S]``; needed by sample weighting only.
        ignore_index: label of positions that do not count.
    """

    weighting: LossWeighting = "token"
    reduction: LossReduction = "mean"
    labels_key: str = "labels"
    ignore_index: int = -100


@dataclass(slots=True, kw_only=True)
class RunningMicroBatch:
    """An opened micro-batch.

    Attributes:
        micro_batch: its plan.
        shard: what ``training_step`` gets, on the device.
        items: items that this rank answers for when ``training_step`` returns a plain number.
        context: what is published through the slot.
        one_item_count: under sample weighting, whether all samples have equally many items, so that a plain
            mean over items is a mean over samples.
    """

    micro_batch: MicroBatch
    shard: Batch
    items: float
    context: MicroBatchContext
    one_item_count: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a ``training_step`` returned, in the terms of the objective.

    Attributes:
        loss: the scalar as the user returned it, detached; 0 for a shard without an item whose value was not finite.
        objective: sum over this rank's items, with its graph. Summed over ranks and micro-batches and divided by
            the step's count it is the objective of a single process.
        count: items (or, weighted by sample, samples) that this rank answers for.
        suspicious: the shard has no item and its value was not finite; its gradient must be looked at.
        context: the micro-batch's context, with failures and interceptions.
    """

    loss: Tensor
    objective: Tensor
    count: float | Tensor
    suspicious: bool
    context: MicroBatchContext


class MicroBatchRunner:
    """Opens micro-batches and reads what ``training_step`` returns.

    Args:
        module: the LightningModule.
        groups: process groups of the run.
        recompute: the switch over the module's repeated layers.
        hooks: sharding and counting.
        seed: seed of the run's random numbers.
        loss: how losses combine.
        world_calls: refuses collectives of all ranks inside; by default none.
    """

    def __init__(
        self,
        *,
        module: torch.nn.Module,
        groups: ProcessGroups,
        recompute: RecomputeSwitch,
        hooks: BatchHooks,
        seed: int,
        loss: LossSettings | None = None,
        world_calls: WorldCalls | None = None,
    ) -> None:
        self.module = module
        self.groups = groups
        self.recompute = recompute
        self.hooks = hooks
        self.seed = seed
        self.loss = loss or LossSettings()
        self._uncounted = False
        self.world_calls = world_calls or WorldCalls(1)
        # Asked now: whoever watches training_step for a while may replace it by something that takes anything.
        step: Callable[..., Any] | None = getattr(module, "training_step", None)
        self._takes_index = step is not None and is_param_in_hook_signature(step, "batch_idx", min_args=2)

    @contextmanager
    def open(
        self,
        micro_batch: MicroBatch,
        batch: Batch,
        *,
        epoch: int = 0,
        step: int = 0,
        counted: tuple[float, bool] | None = None,
    ) -> Iterator[RunningMicroBatch]:
        """Publish the micro-batch until its backward is done.

        Args:
            micro_batch: its plan.
            batch: collated and unsharded, on the device of the module.
            epoch: epoch of the permutation.
            step: step of the epoch; with the samples and the rank in the group it seeds dropout.
            counted: what :meth:`count_unsharded` gave; counting on a device would wait for it.
        """
        group = self.groups.of(micro_batch.first_rank, micro_batch.sp_size)
        context = self._context(micro_batch, batch, epoch, group)
        with ExitStack() as stack:
            stack.enter_context(activate(context))
            if group.size > 1:
                stack.enter_context(patched_attention())
            stack.enter_context(self.recompute.depth(micro_batch.recompute))
            stack.enter_context(seeded(seed_from(self.seed, epoch, step, micro_batch.sample_ids[0], group.rank)))
            stack.enter_context(self.world_calls.inside(context))
            shard = self.hooks.shard(batch, group)
            items, one_item_count = counted or self.count(shard, context)
            yield RunningMicroBatch(
                micro_batch=micro_batch,
                shard=shard,
                items=items,
                context=context,
                one_item_count=one_item_count,
            )

    @contextmanager
    def step(
        self, micro_batch: MicroBatch, batch: Batch, *, epoch: int = 0, step: int = 0
    ) -> Iterator[StepOutcome]:
        """Run ``training_step`` outside of the Trainer's loop; the backward belongs inside the block."""
        index = (0,) if self._takes_index else ()
        with self.open(micro_batch, batch, epoch=epoch, step=step) as running:
            result = self.module.training_step(running.shard, *index)  # type: ignore[operator]
            yield self.outcome(running, result)

    def count(self, shard: Batch, context: MicroBatchContext) -> tuple[float, bool]:
        """Items (weighted by sample: samples) of a shard, and whether a plain mean over items may stand for it."""
        if self.loss.weighting == "token":
            try:
                items = float(self.hooks.loss_items(shard))
            except UncountedError:
                # An error only where training_step returns no count of its own; what it logs counts by samples.
                self._uncounted = True
                return len(context.sample_ids) / context.group.size, True
            if not 0 <= items < math.inf:
                raise ValueError(f"loss_items returned {items}; it must be the number of items, 0 or more")
            return items, True
        totals_B = context.items_per_sample_B
        labels = labels_of(shard, self.loss.labels_key)
        if totals_B is None or not isinstance(labels, Tensor):
            return 0.0, False
        here_B = valid_per_sample(labels, self.loss.ignore_index).to(totals_B)
        share = torch.where(totals_B > 0, here_B / totals_B.clamp(min=1), torch.zeros_like(totals_B)).sum()
        counted = totals_B[totals_B > 0]
        return float(share), counted.numel() == 0 or bool((counted == counted[0]).all())

    def count_unsharded(self, micro_batch: MicroBatch, batch: Batch) -> tuple[float, bool]:
        """:meth:`count` of this rank's shard of a micro-batch that is not running yet; nothing is communicated.

        The group need not exist yet: its rank and size are enough.
        """
        group = self.groups.shape_of(micro_batch.first_rank, micro_batch.sp_size)
        context = self._context(micro_batch, batch, 0, group)
        with activate(context):
            return self.count(self.hooks.shard(batch, context.group), context)

    def _context(self, micro_batch: MicroBatch, batch: Batch, epoch: int, group: SPGroup) -> MicroBatchContext:
        """What code inside the micro-batch may ask about it."""
        return MicroBatchContext(
            group=group,
            sample_ids=micro_batch.sample_ids,
            shapes=micro_batch.shapes,
            padded_shape=micro_batch.padded_shape,
            packed=micro_batch.packed,
            seed=self.seed,
            epoch=epoch,
            weighting=self.loss.weighting,
            items_per_sample_B=self._items_per_sample(batch),
        )

    def outcome(self, running: RunningMicroBatch, result: Any) -> StepOutcome:
        """Translate what ``training_step`` returned.

        Raises:
            ValueError: it is neither a scalar nor a mapping with a scalar ``"loss"``.
        """
        context = running.context
        if context.group.size > 1 and context.interceptions == 0:
            context.failures.append(NO_EXCHANGE.format(size=context.group.size))
        mapping = isinstance(result, Mapping)
        loss = result.get("loss") if mapping else result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                f"training_step returned {_describe(result)}; return a scalar tensor, or a mapping with a scalar "
                '"loss" (and "count" where the loss is a sum over that many items)'
            )
        count: float | Tensor = running.items
        if mapping and "count" in result:
            count, objective = _checked_count(result["count"]), loss
        else:
            if self._uncounted:
                self.hooks.loss_items(running.shard)  # raises, with the ways out
            self._check_plain(running)
            # In float32 at least: the weight of a bf16 loss would be rounded to 8 bits.
            objective = loss.to(torch.promote_types(loss.dtype, torch.float32)) * self._plain_factor(running)
        suspicious = running.items == 0 and not isinstance(count, Tensor) and not bool(torch.isfinite(loss))
        if suspicious:
            objective = torch.where(torch.isfinite(objective), objective, torch.zeros_like(objective))
            loss = torch.zeros_like(loss)
        return StepOutcome(
            loss=loss.detach().reshape(()),
            objective=objective.reshape(()),
            count=count,
            suspicious=suspicious,
            context=context,
        )

    def _plain_factor(self, running: RunningMicroBatch) -> float:
        """What turns a plain number that ``training_step`` returned into the sum of this rank's weighted losses."""
        if self.loss.reduction == "mean":
            return running.items
        if self.loss.weighting == "token":
            return 1.0
        return running.items / max(self.hooks.loss_items(running.shard), 1)

    def _check_plain(self, running: RunningMicroBatch) -> None:
        if not running.one_item_count:
            running.context.failures.append(
                f"samples {running.micro_batch.sample_ids} have different numbers of valid labels, so the number that "
                'training_step returned cannot be weighted by sample. With loss_weighting="sample" return '
                "lightning_dcp.sequence_parallel.loss_sum(values_BS, mask_BS)"
            )

    def _items_per_sample(self, batch: Batch) -> Tensor | None:
        labels = labels_of(batch, self.loss.labels_key) if self.loss.weighting == "sample" else None
        if not isinstance(labels, Tensor):
            return None
        return valid_per_sample(labels, self.loss.ignore_index)


def valid_per_sample(labels: Tensor, ignore_index: int) -> Tensor:
    """Labels of each sample that count, float64 ``[B]``, of labels ``[B]`` or ``[B, S, ...]``."""
    return (labels != ignore_index).reshape(len(labels), -1).sum(1).to(torch.float64)


def _checked_count(count: Any) -> float | Tensor:
    """A count that can be added up. The value of a tensor is checked after the step: reading it would wait for it."""
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
        return count.detach().reshape(())
    if isinstance(count, Real) and 0 <= float(count) < math.inf:
        return float(count)
    raise ValueError(
        f'training_step returned the "count" {_describe(count)}; it must be one number, 0 or more: the items that '
        '"loss" is the sum over'
    )


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return f"a mapping with the keys {sorted(map(str, result))}" if isinstance(result, Mapping) else repr(result)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generators for a micro-batch and give the old state back afterwards.

    Restoring keeps what users draw between steps independent of the plan.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield
