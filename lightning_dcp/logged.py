"""What a value that user code logs counts, where micro-batches hold different numbers of items.

``self.log`` is called while a micro-batch runs; what the micro-batch counts is known when it has run. So the calls are
kept, and added to Lightning's results afterwards: once per key and step, as the mean, sum, least or largest value over
all calls. A call of a micro-batch that counts nothing is left out of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_dcp.sequence_parallel import current
from lightning_dcp.upstream import ResultCollection, last_value, results_of, show


class Call(NamedTuple):
    """One call of ``self.log``.

    Attributes:
        value: copy in float64, of the last batch value for a torchmetrics object; ``None`` where it has none.
        metric: the torchmetrics object.
        batch_size: what the user gave, over the ranks of the sequence-parallel group; ``None`` where nothing.
        part: which micro-batch it belongs to.
    """

    value: Tensor | None
    metric: Any
    batch_size: float | None
    part: int


class Results(ResultCollection):
    """Lightning's results of a loop, which keep calls of ``self.log`` until their weight is known.

    Attributes:
        part: the running micro-batch, for the calls to come.
        kept: calls by key while they are kept; ``None`` outside of that.
        on_log: asked at each kept call with the key and the arguments.
        wide: keys that were logged in float64; the others are shown in float32, as in Lightning.
        uncounted: keys of this epoch with a call that counted nothing.
        step_weights: what each key counted at its last step.
        hook_weight: what a call counts in a hook before the step of an evaluation; ``None`` elsewhere.
    """

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.part = 0
        self.kept: dict[str, list[Call]] | None = None
        self.on_log: Callable[[str, Mapping[str, Any]], None] | None = None
        self.wide: set[str] = set()
        self.uncounted: set[str] = set()
        self.step_weights: dict[str, float] = {}
        self.hook_weight: float | None = None

    def log(self, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        """As in Lightning, but while calls are kept nothing is added up."""
        if self.kept is not None and self.on_log is not None:
            self.on_log(name, kwargs)
        super().log(fx, name, value, **kwargs)

    def _extract_batch_size(self, value: Any, batch_size: float | None, meta: Any) -> Any:  # noqa: ARG002
        # No guess: the first axis of some tensor of a whole step is not what a value counts.
        return batch_size

    def update_metrics(self, key: str, value: Any, batch_size: float | None) -> None:
        """Keep the call; outside of micro-batches count it at once, with what the whole step counts."""
        seen = value if isinstance(value, Tensor) else last_value(value)
        call = Call(
            # A copy: user code may go on counting in the same tensor.
            value=seen.detach().to(torch.float64, copy=True) if isinstance(seen, Tensor) else None,
            metric=None if isinstance(value, Tensor) else value,
            batch_size=None if batch_size is None else float(batch_size) / current().group.size,
            part=self.part,
        )
        if isinstance(seen, Tensor) and seen.dtype == torch.float64:
            self.wide.add(key)
        if not self[key].update_called:
            self[key].has_reset = True  # nothing is counted yet, so there is nothing to show
        if self.kept is None:
            weight = self.hook_weight if self.batch_size is None else float(self.batch_size)
            self.count({key: [call._replace(part=0)]}, (1.0 if weight is None else weight,))
        else:
            self.kept.setdefault(key, []).append(call)

    def count(self, kept: Mapping[str, Sequence[Call]], weights: Sequence[float], *, real: bool = False) -> None:
        """Add kept calls to the results.

        Args:
            kept: calls by key.
            weights: what each micro-batch counts on this rank.
            real: a micro-batch of weight 0 still holds a part of real samples, for which a batch size of the user
                counts unless the value is not finite; else it is a stand-in, of which nothing counts.
        """
        for key, calls in kept.items():
            counted = [(call, _weight(call, weights, real)) for call in calls]
            counted = [(call, weight) for call, weight in counted if weight > 0]
            if calls[-1].metric is not None:
                self._count_metric(key, calls[-1].metric, counted)
            else:
                self._count_values(key, calls[-1], counted)

    def count_step(self, kept: Mapping[str, Sequence[Call]], weights: Sequence[float], total: float) -> None:
        """Add the kept calls of an optimizer step; what hooks log after it counts as the whole step does.

        Args:
            kept: calls by key.
            weights: what each micro-batch of this rank counts.
            total: what all ranks count together.
        """
        if not any(weight > 0 for weight in weights):
            # This rank has nothing to show for the step; the values of an earlier one would be taken for it.
            for result in self.values():
                if result.meta.on_step and result.meta.fx == "training_step":
                    show(result, None)
        self.step_weights.clear()
        self.count(kept, weights, real=True)
        self.batch_size = max(total, 1.0)  # type: ignore[assignment]

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """As in Lightning."""
        super().reset(metrics, fx)
        if metrics is None and fx is None:
            self.uncounted.clear()

    def _count_values(self, key: str, last: Call, counted: Sequence[tuple[Call, float]]) -> None:
        meta = self[key].meta
        shown = value = _combined(meta.reduce_fx.__name__, counted)
        total = self.step_weights[key] = sum(weight for _, weight in counted)
        over_ranks = meta.on_step and meta.sync.should and not meta.sync.rank_zero_only
        if over_ranks:
            assert last.value is not None
            shown = _over_ranks(meta, value, total, last.value.device)
        if value is not None:
            with _unsynchronised(meta.sync, over_ranks):
                super().update_metrics(key, value, torch.tensor(total, dtype=torch.float64, device=value.device))
        else:
            self.uncounted.add(key)
        if meta.on_step:
            self._show(key, shown)

    def _count_metric(self, key: str, metric: Any, counted: Sequence[tuple[Call, float]]) -> None:
        # Also where nothing counts: all ranks have to take part when it is computed.
        super().update_metrics(key, metric, 1)
        if self[key].meta.on_step and all(call.value is not None for call, _ in counted):
            self._show(key, _combined("mean", counted))

    def _show(self, key: str, value: Tensor | None) -> None:
        show(self[key], None if value is None else value.to(self.dtype_of(key)))
        self[key].has_reset &= value is None

    def dtype_of(self, key: str) -> torch.dtype:
        """What a value is shown in: float32, or float64 where it was logged in that."""
        return torch.float64 if key in self.wide else torch.float32


def _weight(call: Call, weights: Sequence[float], real: bool) -> float:
    weight = weights[call.part] if call.part < len(weights) else 0.0
    if call.batch_size is None or call.value is None:
        return weight
    if weight > 0 or (real and bool(call.value.isfinite().all())):
        return call.batch_size
    return 0.0


def _combined(operation: str, counted: Sequence[tuple[Call, float]]) -> Tensor | None:
    """Mean by weight, sum, least or largest of the values, in float64; ``None`` of no value."""
    if not counted:
        return None
    device = counted[-1][0].value.device  # type: ignore[union-attr]
    values = torch.stack([call.value.to(device) for call, _ in counted])  # type: ignore[union-attr]
    if operation == "mean":
        weights = torch.tensor([weight for _, weight in counted], dtype=torch.float64, device=device)
        return (values.movedim(0, -1) * weights).sum(-1) / weights.sum()
    combined: Tensor = values.sum(0) if operation == "sum" else getattr(values, f"a{operation}")(0)
    return combined


def _over_ranks(meta: Any, value: Tensor | None, total: float, device: torch.device) -> Tensor | None:
    """A step's value over all ranks, where all of them log it at the same place; one all-reduce.

    Lightning's own would take the plain mean over ranks, also of those that hold nothing.
    """
    operation = meta.reduce_fx.__name__
    if operation in {"min", "max"}:
        nothing = torch.inf if operation == "min" else -torch.inf
        mine = torch.full((), nothing, dtype=torch.float64, device=device) if value is None else value.clone()
        found: Tensor = meta.sync.fn(mine, reduce_op=operation, group=meta.sync.group)  # may work in place
        return None if bool(found == nothing) else found
    mine = torch.zeros(2, dtype=torch.float64, device=device)
    if value is not None:
        mine[0], mine[1] = value * (total if operation == "mean" else 1.0), total
    summed: Tensor
    summed, weight = meta.sync.fn(mine, reduce_op="sum", group=meta.sync.group)
    if not bool(weight > 0):
        return None
    return summed / weight if operation == "mean" else summed


@contextmanager
def _unsynchronised(sync: Any, switched_off: bool) -> Iterator[None]:
    should, sync.should = sync.should, sync.should and not switched_off
    try:
        yield
    finally:
        sync.should = should


@contextmanager
def kept_logs(
    trainer: pl.Trainer, on_log: Callable[[str, Mapping[str, Any]], None] | None = None
) -> Iterator[Results]:
    """Keep every ``self.log`` inside; yields the results, whose ``part`` says which micro-batch runs.

    After the block, :meth:`Results.count` adds ``Results.kept`` with the weights of the micro-batches.

    Args:
        trainer: whose results are logged to.
        on_log: asked at each call with the key and the arguments.
    """
    results = results_of(trainer)
    assert isinstance(results, Results), "the trainer's results were not taken over"
    outer = results.part, results.kept, results.on_log
    results.part, results.kept, results.on_log = 0, {}, on_log
    try:
        yield results
    finally:
        results.part, results.kept, results.on_log = outer


def weigh_hooks(trainer: pl.Trainer, weight: float | None) -> None:
    """Let what hooks log before the step of an item count with its weight; ``None`` ends it."""
    if isinstance(trainer._results, Results):
        trainer._results.hook_weight = weight


@contextmanager
def weighted_logs(trainer: pl.Trainer, weight: float) -> Iterator[None]:
    """Let every ``self.log`` inside count with a weight instead of a batch size that Lightning guesses.

    The same weight holds for what hooks log until the end of the batch.

    Args:
        trainer: whose results are logged to.
        weight: items that the values are means over; with 0 they do not count, in no reduction.
    """
    if results_of(trainer) is None:
        yield  # prediction logs nothing
        return
    with kept_logs(trainer) as results:
        kept = results.kept
        yield
    assert kept is not None
    results.count(kept, (weight,))
    results.batch_size = weight  # type: ignore[assignment]
