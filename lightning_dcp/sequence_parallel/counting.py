"""Updates of metrics that must not count: those of copies, and all but one of what a group computes alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_dcp.sequence_parallel.context import current


@contextmanager
def once(*metrics: nn.Module) -> Iterator[None]:
    """Let what every rank of the group computes alike count once: on the group's first rank.

    For metrics that are updated with gathered activations in ``validation_step`` or ``test_step``::

        logits_BSV = sequence_parallel.gather(logits_BsV)
        with sequence_parallel.once(self.accuracy):
            self.accuracy.update(logits_BSV, labels_BS)

    Every rank runs the block; on the others the metrics are afterwards as they were before. Metrics of a shard's
    own values need nothing.

    Args:
        metrics: torchmetrics metrics, collections of them, or modules that hold some.
    """
    if current().group.rank == 0:
        yield
        return
    with uncounted(*metrics):
        yield


@contextmanager
def uncounted(*modules: nn.Module) -> Iterator[None]:
    """Give every metric of the modules back the state that it had: values, number of updates, caches."""
    from torchmetrics import Metric, MetricCollection

    found = {id(m): m for module in modules for m in module.modules() if isinstance(m, Metric | MetricCollection)}
    kept = [_Kept(metric) for metric in found.values()]
    with ExitStack() as stack:
        for one in kept:
            stack.callback(one.restore)
        yield


class _Kept:
    """Everything that a metric holds, with copies of what is changed in place."""

    def __init__(self, metric: nn.Module) -> None:
        self._metric = metric
        self._attributes = dict(vars(metric))
        self._contents = {name: _content(value) for name, value in self._attributes.items()}

    def restore(self) -> None:
        # The same objects, not equal ones: the metrics of a collection may share them.
        types = self._types_of_lists()
        vars(self._metric).clear()
        vars(self._metric).update(self._attributes)
        for name, content in self._contents.items():
            _put_back(self._attributes[name], content)
        for name, nothing in types.items():
            if not self._attributes[name]:
                self._attributes[name].append(nothing)
        if "_computed" in self._attributes:
            # Other ranks have counted, so that they gather in the next compute; a cached value would miss that.
            vars(self._metric)["_computed"] = None

    def _types_of_lists(self) -> dict[str, Tensor]:
        """For each list that is concatenated: no rows of the kind that were added.

        A rank that never adds any would else hand an empty float vector to the gather that ends the evaluation,
        which does not fit what the others hand in.
        """
        from torchmetrics.utilities import dim_zero_cat

        reductions: dict[str, Any] = getattr(self._metric, "_reductions", {})
        found = {}
        for name, reduction in reductions.items():
            value = getattr(self._metric, name, None)
            before = self._attributes.get(name)
            concatenated = reduction is dim_zero_cat and isinstance(before, list) and isinstance(value, list)
            if concatenated and value and isinstance(value[0], Tensor):
                first = value[0].detach()
                found[name] = (first.reshape(1) if first.dim() == 0 else first)[:0].clone()
        return found


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict | set) else None


def _put_back(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        if value.shape == content.shape:
            value.detach().copy_(content)
    elif isinstance(value, list):
        value[:] = content
    elif isinstance(value, dict | set):
        value.clear()
        value.update(content)


__all__: Sequence[str] = ["once", "uncounted"]
