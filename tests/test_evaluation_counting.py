"""Updates that must not count leave no trace in metrics of any kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassRecall

from lightning_dcp.sequence_parallel import once
from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup, activate
from lightning_dcp.sequence_parallel.counting import uncounted

SCORES, LABELS = torch.eye(3), torch.tensor([0, 1, 2])
OTHERS = torch.tensor([1, 1, 0])


class Holder(nn.Module):
    """Metrics at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.group = MetricCollection(
            [MulticlassAccuracy(3, average="micro"), MulticlassRecall(3, average="micro")]
        )
        self.inner = nn.ModuleList([MulticlassAUROC(3), CatMetric(), MinMaxMetric(MeanMetric())])

    def update(self, labels: torch.Tensor) -> None:
        self.mean(labels.float())
        self.group(SCORES, labels)
        ranking, seen, extremes = self.inner
        ranking.update(SCORES, labels)  # type: ignore[operator]
        seen.update(labels)  # type: ignore[operator]
        extremes(labels.float())

    def values(self) -> list[float]:
        ranking, seen, extremes = self.inner
        found = [self.mean.compute(), *self.group.compute().values(), ranking.compute()]  # type: ignore[operator]
        found += [*seen.compute().reshape(-1), *extremes.compute().values()]  # type: ignore[operator]
        return [float(value) for value in found]


@pytest.mark.parametrize("first", [False, True])
def test_undone_updates_leave_no_trace(first: bool) -> None:
    module, expected = Holder(), Holder()
    if not first:
        module.update(LABELS)
        expected.update(LABELS)
    with uncounted(module):
        module.update(OTHERS)
    counts = [module.mean.update_count, module.inner[1].update_count]
    assert counts == ([0, 0] if first else [1, 1])
    module.update(OTHERS)
    expected.update(OTHERS)
    assert module.values() == expected.values()


def test_a_rank_without_a_value_hands_in_rows_of_the_right_kind() -> None:
    metric = CatMetric()
    with uncounted(metric):
        metric.update(torch.ones(2, 3))
    assert [tuple(value.shape) for value in metric.value] == [(0, 3)]


def test_an_error_also_leaves_no_trace() -> None:
    metric = MeanMetric()
    with pytest.raises(RuntimeError, match="mine"), uncounted(metric):
        _fails(metric)
    assert metric.update_count == 0


def _fails(metric: MeanMetric) -> None:
    metric.update(1.0)
    raise RuntimeError("mine")


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
def test_what_a_group_computes_alike_counts_once(rank: int, count: int) -> None:
    metric = MeanMetric()
    with activate(MicroBatchContext(group=SPGroup(ranks=(4, 5), rank=rank))), once(metric):
        metric.update(3.0)
    assert metric.update_count == count
