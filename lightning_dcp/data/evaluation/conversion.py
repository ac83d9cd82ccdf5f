"""From a user's evaluation loaders to ours."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_dcp.data.alike import check_same_size
from lightning_dcp.data.evaluation.batched import BatchSource
from lightning_dcp.data.evaluation.collating import EvaluationCollate
from lightning_dcp.data.evaluation.loader import EvaluationLoader, Source
from lightning_dcp.data.evaluation.place import Place
from lightning_dcp.data.evaluation.samples import SampleSource
from lightning_dcp.data.evaluation.streams import StreamSource


def evaluation_loaders(loaders: Any, place: Place) -> Any:
    """What the Trainer evaluates over in the place of the user's loaders.

    Args:
        loaders: what the user gave or the hook returned: a loader, or lists and dicts of loaders.
        place: see :class:`Place`.

    Raises:
        ValueError: on all ranks, if a dataset has another size on another rank.
    """
    if isinstance(loaders, dict):
        return {key: evaluation_loaders(loader, place) for key, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [evaluation_loaders(loader, place) for loader in loaders]
    if isinstance(loaders, EvaluationLoader) or not hasattr(loaders, "__iter__"):
        return loaders  # what cannot be iterated over is refused by the Trainer
    return EvaluationLoader(_source(loaders, place))


def _source(loader: Any, place: Place) -> Source:
    # A subclass that iterates in a way of its own would be another loader if it were built anew.
    ordinary = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not ordinary or isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, place)
    if isinstance(loader.collate_fn, EvaluationCollate):
        source: SampleSource | BatchSource = SampleSource(loader, place)
    else:
        source = BatchSource(loader, place)
    check_same_size(_size(source), loader.dataset, place.world_size)
    return source


def _size(source: SampleSource | BatchSource) -> int | None:
    """What is dealt out; ``None`` where a sampler does not tell."""
    places: Any = source.dataset if source.sampler is None else source.sampler
    try:
        return len(places)
    except (TypeError, NotImplementedError):
        return None
