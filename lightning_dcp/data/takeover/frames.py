"""A collection around one loader, and the same collection around each of its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities import CombinedLoader


def unframed(loaders: Any) -> tuple[list[Any], Any]:
    """The loaders of a collection, and its frame: the collection itself, or ``None`` where there is none.

    A ``CombinedLoader`` in the mode "sequential" gives the batches of its loaders as they are.
    """
    frame = loaders
    if isinstance(loaders, CombinedLoader):
        frame = None if loaders._mode == "sequential" else loaders.iterables
        loaders = loaders.iterables
    leaves = list(_leaves(loaders))
    return leaves, frame if isinstance(frame, Mapping | list | tuple) else None


def framed(frame: Any, batch: Any) -> Any:
    """The batch as the Trainer gives it where the loader stands in a collection."""
    if isinstance(frame, Mapping):
        return {key: framed(value, batch) for key, value in frame.items()}
    if isinstance(frame, list | tuple):
        items = [framed(value, batch) for value in frame]
        return type(frame)(*items) if hasattr(frame, "_fields") else type(frame)(items)
    return batch


def skeleton(frame: Any) -> Any:
    """A frame without its loader, which cannot be sent to a worker."""
    return framed(frame, Ellipsis) if frame is not None else None


def inner(frame: Any, batch: Any) -> Any:
    """The batch inside of the collection."""
    while isinstance(frame, Mapping | list | tuple):
        key = next(iter(frame)) if isinstance(frame, Mapping) else 0
        frame, batch = frame[key], batch[key]
    return batch


def _leaves(loaders: Any) -> Iterator[Any]:
    if isinstance(loaders, Mapping | list | tuple):
        for item in loaders.values() if isinstance(loaders, Mapping) else loaders:
            yield from _leaves(item)
    else:
        yield loaders
