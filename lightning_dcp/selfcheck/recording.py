"""What goes into and comes out of every module in a run, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dcp.recompute.switch import instance_attribute
from lightning_dcp.sequence_parallel.context import current

ROOT = ""
"""Name of the module that holds all others; its code outside of submodules is ``training_step``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A tensor that passes the border of a module.

    Attributes:
        module: path of the module.
        call: number of the module's call in the micro-batch.
        side: ``"input"`` or ``"output"``.
        index: number of the tensor among those of that side.
    """

    module: str
    call: int
    side: str
    index: int


@dataclass(slots=True, kw_only=True)
class Recording:
    """A run of one or more micro-batches.

    Attributes:
        rows: events of each micro-batch's forward in order of time, with copies of the tensors.
        repeated: the same for what ran again in its backward (recompute).
        callers: module in whose code each event happened, before it was handed on to the event's module.
        refused: modules in whose code the exchange refused something.
        classes: class of each module.
    """

    rows: list[dict[Event, Tensor]] = field(default_factory=list)
    repeated: list[dict[Event, Tensor]] = field(default_factory=list)
    callers: dict[Event, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)

    def named(self, module: str) -> str:
        """A module for a sentence."""
        return "training_step" if module == ROOT else f"{module!r} ({self.classes[module]})"

    def place(self, event: Event) -> str:
        """Where an event happened, for a sentence."""
        if event.side == "output":
            return f"the output of {self.named(event.module)}"
        return f"what {self.named(self.callers[event])} passes to {self.named(event.module)}"


@contextmanager
def recorded(module: nn.Module, recording: Recording) -> Iterator[None]:
    """Record every submodule while the context is open; hooks and attributes are gone after it."""
    watcher = _Watcher(recording)
    original = module.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        watcher.begin()
        result = original(*args, **kwargs)  # type: ignore[operator]
        watcher.end()
        return result

    with ExitStack() as stack:
        for name, part in module.named_modules():
            recording.classes[name] = type(part).__name__
            if name != ROOT:
                before, after = watcher.hooks(name)
                stack.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(part.register_forward_hook(after).remove)
        stack.enter_context(instance_attribute(module, "training_step", training_step))
        yield


class _Watcher:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._events: dict[Event, Tensor] = {}
        self._calls: dict[str, int] = {}
        self._inside: list[str] = [ROOT]
        self._failures = 0

    def begin(self) -> None:
        """A micro-batch's forward starts."""
        self._recording.rows.append({})
        self._recording.repeated.append({})
        self._restart(self._recording.rows[-1])
        self._failures = 0

    def end(self) -> None:
        """What runs from now on is recompute."""
        self._note_refusals()
        self._restart(self._recording.repeated[-1])

    def hooks(self, name: str) -> tuple[Any, Any]:
        """Hooks before and after a module's forward."""

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note_refusals()
            self._calls[name] = self._calls.get(name, -1) + 1
            self._take(name, "input", (args, kwargs))
            self._inside.append(name)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._note_refusals()
            if self._inside[-1] == name:
                self._inside.pop()
            self._take(name, "output", output)

        return before, after

    def _restart(self, events: dict[Event, Tensor]) -> None:
        self._events, self._calls, self._inside = events, {}, [ROOT]

    def _take(self, name: str, side: str, value: Any) -> None:
        for index, tensor in enumerate(_tensors(value)):
            event = Event(module=name, call=self._calls[name], side=side, index=index)
            # A copy, since later layers may write in place.
            self._events[event] = tensor.detach().clone()
            self._recording.callers.setdefault(event, self._inside[-1])

    def _note_refusals(self) -> None:
        failures = len(current().failures)
        if failures > self._failures:
            self._recording.refused.append(self._inside[-1])
        self._failures = failures


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors with at least one axis, in order; sums and means of a shard are no part of the whole one."""
    if isinstance(value, Tensor):
        if value.dim() > 0 and not value.is_complex() and value.layout == torch.strided:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
