"""Validation, test and prediction: each sample exactly once, whatever the number of ranks."""

from lightning_dcp.data.evaluation.collating import EvaluationCollate, IndexedDataset
from lightning_dcp.data.evaluation.conversion import evaluation_loaders
from lightning_dcp.data.evaluation.item import EvaluationItem
from lightning_dcp.data.evaluation.loader import EvaluationLoader
from lightning_dcp.data.evaluation.place import Place
from lightning_dcp.data.evaluation.rounds import MemoryRule
from lightning_dcp.data.evaluation.samples import SampleSource

__all__ = [
    "EvaluationCollate",
    "EvaluationItem",
    "EvaluationLoader",
    "IndexedDataset",
    "MemoryRule",
    "Place",
    "SampleSource",
    "evaluation_loaders",
]
