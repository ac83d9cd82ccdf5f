"""What ``self.log`` writes to, and who reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor

ResultCollection = _ResultCollection
"""What ``self.log`` writes to; it weights by a batch size that it guesses, and counts a value when it is logged."""


ListKind = tuple[torch.dtype, tuple[int, ...]]
"""Element type of a list of tensors that a torchmetrics object keeps, and the shape behind the first axis."""


def kept_lists(metric: Any) -> dict[str, ListKind]:
    """The lists of values that a torchmetrics object keeps and has something in, to be gathered over the ranks."""
    lists = {
        name: getattr(metric, name) for name, default in metric._defaults.items() if isinstance(default, list)
    }
    return {name: (kept[0].dtype, tuple(kept[0].shape[1:])) for name, kept in lists.items() if kept}


def fill_lists(metric: Any, kinds: dict[str, ListKind]) -> None:
    """Put an empty tensor of the right kind into empty lists.

    torchmetrics sends an empty float32 tensor for an empty list. Where the others send integers, gloo ends the process.
    """
    for name, (dtype, shape) in kinds.items():
        kept = getattr(metric, name)
        if isinstance(kept, list) and not kept:
            kept.append(torch.empty(0, *shape, dtype=dtype, device=metric.device))


class LoggedAs(NamedTuple):
    """The arguments of ``self.log`` that must be the same at every call of a key; plain values, to be sent."""

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduction: str
    enable_graph: bool
    add_dataloader_idx: bool
    dataloader_idx: int | None
    metric_attribute: str | None
    sync_dist: bool

    def described(self, is_metric: bool) -> str:
        """As a user wrote it."""
        names = ("on_step", "on_epoch", "prog_bar", "logger", "sync_dist")
        text = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"{text}, reduce_fx={self.reduction!r}, {'a metric' if is_metric else 'a value'} in {self.fx}"


def logged_as(meta: Any) -> LoggedAs:
    """What a key was logged with, out of Lightning's own record of it."""
    return LoggedAs(
        fx=meta.fx,
        name=meta.name,
        prog_bar=meta.prog_bar,
        logger=meta.logger,
        on_step=meta.on_step,
        on_epoch=meta.on_epoch,
        reduction=meta.reduce_fx.__name__,
        enable_graph=meta.enable_graph,
        add_dataloader_idx=meta.add_dataloader_idx,
        dataloader_idx=meta.dataloader_idx,
        metric_attribute=meta.metric_attribute,
        sync_dist=meta.sync.should,
    )


def new_result(arguments: LoggedAs, trainer: pl.Trainer, *, is_tensor: bool) -> Any:
    """An empty result, as Lightning would make it at the first call of ``self.log`` with these arguments."""
    plain = arguments._asdict()
    sync_dist, reduction = plain.pop("sync_dist"), plain.pop("reduction")
    meta = _Metadata(**plain, reduce_fx=reduction)
    meta.sync = _Sync(_should=sync_dist, fn=trainer.strategy.reduce)
    return _ResultMetric(meta, is_tensor)


def watched_at_step(trainer: pl.Trainer) -> frozenset[str]:
    """Keys that a callback or a schedule reads after the running optimizer step; the same on all ranks."""
    step = trainer.global_step + 1
    names = {
        callback.monitor
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
        and (callback._train_time_interval is not None or _is_due(step, callback._every_n_train_steps))
    }
    names |= {c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step"}
    return frozenset(name for name in names if name is not None)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def results_of(trainer: pl.Trainer) -> Any:
    """The results of the loop that runs; ``None`` in prediction."""
    return trainer._results


def last_value(metric: Any) -> Any:
    """What the last call gave, of a result or a torchmetrics object; ``None`` of no call, or where nothing is shown."""
    return metric._forward_cache


def show(result: Any, value: Tensor | None) -> None:
    """Let a result's value at this step be another."""
    result._forward_cache = value


def is_settled(result: Any) -> bool:
    """Whether the value of the epoch was computed, or given by :func:`settle`."""
    return result._computed is not None


def settle(result: Any, value: Tensor) -> None:
    """Give a result its value of the epoch; it is computed no more."""
    result._computed = value


def count_as_updated(result: Any) -> None:
    """Have a result computed on a rank that added nothing to it; it would be passed over, and others wait."""
    result._update_count = 1


def replace_results(trainer: pl.Trainer, kind: type[ResultCollection]) -> None:
    """Give every loop that logs another collection of results; the Trainer makes its own with the loops, once.

    Args:
        trainer: before its loops run.
        kind: class of the collections; where a loop has one already it is kept.
    """
    loops: tuple[Any, ...] = (
        trainer.fit_loop.epoch_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
    )
    for loop in loops:
        if not isinstance(loop._results, kind):
            loop._results = kind(training=loop._results.training)


def on_epoch_end(trainer: pl.Trainer, call: Callable[[pl.Trainer], None]) -> None:
    """Have something called on every rank when the steps of an epoch are done, before any hook reads their results.

    No hook of the strategy or of a callback stands there: callbacks before ours could read the results first.
    """
    connector = trainer._logger_connector
    if "epoch_end_reached" in vars(connector):
        return
    original = connector.epoch_end_reached

    def reached() -> None:
        original()
        call(trainer)

    connector.epoch_end_reached = reached  # type: ignore[method-assign]
