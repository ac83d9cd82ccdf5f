"""Counting live bytes: what a forward keeps and what the peak of a backward is, without a device's allocator."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Books every storage that is made while the mode is on, until it is freed.

    Unlike hooks on saved tensors it sees everything that lives (also what a custom function keeps in its context,
    or an inner checkpoint hides) and it knows the peak. Storages that existed before, such as weights and inputs,
    are not booked, nor is the scratch memory inside a single operator.

    Attributes:
        live: bytes of the booked storages that are alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self._events: list[tuple[int, int]] = []
        self._numbers: dict[int, int] = {}
        self._foreign: dict[int, weakref.ref[Any]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __enter__(self) -> Ledger:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and book the storages of its outputs that none of its inputs has."""
        for tensor in _tensors((args, kwargs)):
            self._know(tensor)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._book(tensor)
        return result

    def peak(self, without: Iterable[Tensor] = ()) -> int:
        """Most bytes alive at a time, had the given tensors taken no room (gradients are counted elsewhere)."""
        left_out = {self._numbers.get(_key(tensor)) for tensor in without}
        live = highest = 0
        for number, change in self._events:
            if number not in left_out:
                live += change
                highest = max(highest, live)
        return highest

    def _know(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key not in self._numbers and key not in self._foreign:
            # An address may be given to a new storage when this one is gone.
            self._foreign[key] = weakref.ref(tensor.untyped_storage(), lambda _: self._foreign.pop(key, None))

    def _book(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if tensor.is_meta or key in self._numbers or key in self._foreign:
            return
        storage = tensor.untyped_storage()
        number, size = len(self._events), storage.nbytes()
        self._numbers[key] = number
        self._change(number, size)
        self._alive[number] = weakref.ref(storage, lambda _: self._free(key, number, size))

    def _free(self, key: int, number: int, size: int) -> None:
        del self._alive[number]
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._change(number, -size)

    def _change(self, number: int, size: int) -> None:
        self.live += size
        self._events.append((number, size))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
