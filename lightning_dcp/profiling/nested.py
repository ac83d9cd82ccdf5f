"""Arguments and results of a layer as flat lists: tensors may stand in tuples, lists, mappings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a nested value, in a fixed order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    replace_tensors(value, note)
    return found


def replace_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A copy of a nested value with every tensor replaced; objects of unknown kind stay the same objects."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [replace_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [replace_tensors(item, function) for item in value]
    if type(value) is dict:
        return {key: replace_tensors(item, function) for key, item in value.items()}
    if isinstance(value, Mapping):
        return _replace_in_mapping(value, function)
    return value


def _replace_in_mapping(value: Mapping[Any, Any], function: Callable[[Tensor], Any]) -> Any:
    """Mappings with a constructor of their own, such as the outputs of Hugging Face models."""
    items = {key: replace_tensors(item, function) for key, item in value.items()}
    try:
        return type(value)(**items)
    except TypeError:
        return items


def substitutes(tensors: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A function for :func:`replace_tensors` that puts the given tensors in, one after the other."""
    waiting: Iterator[Tensor] = iter(tensors)
    return lambda _: next(waiting)
