"""Recomputing the first layers of each family, switched per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_dcp.recompute.families import LayerFamily, RecomputeError, class_of, reentrant_part

# What a forward raises that meets its own changed state a second time. Not Exception: torch leaves a finished
# recompute by an exception of its own.
_SYMPTOMS = (RuntimeError, ValueError, IndexError, KeyError, AttributeError, TypeError)
_OTHER_CAUSES = (
    "out of memory",
    "allocate memory",
    "timed out",
    "connection closed",
    "connection reset",
    "cuda error",
    "nccl error",
)


class RecomputeSwitch:
    """Runs the first ``r`` layers of each family under non-reentrant activation checkpointing (Eq. 5 and 6).

    The first layers, not the last: their recompute happens at the end of the backward, when the activations of
    the other layers are gone, so that it adds nothing to the peak.

    A layer gets an instance attribute (``forward``, or the compiled call of ``layer.compile()``) while a context
    is open and its old one back afterwards. Modules, hooks, parameters and the keys of ``state_dict()`` never
    change. Without gradients enabled nothing is recomputed. Random numbers repeat in the recompute (those of
    torch's global generators; a layer's own ``torch.Generator`` does not rewind).

    Compile the layers (``layer.compile()`` or ``layers[i] = torch.compile(layer)``) rather than the model: a
    compiled model gets one graph for each ``r``.

    Args:
        families: the repeated layers.

    Raises:
        RecomputeError: a layer checkpoints itself with ``use_reentrant=True``.
    """

    def __init__(self, families: Sequence[LayerFamily]) -> None:
        self.families = tuple(families)
        for family in self.families:
            for index, layer in enumerate(family.layers):
                part = reentrant_part(layer)
                if part is not None:
                    raise RecomputeError(
                        f"layer {index} of {family.name!r} checkpoints itself with use_reentrant=True ({part}), "
                        "silently wrong under sequence parallelism; pass use_reentrant=False, or leave its own "
                        "checkpointing out: the strategy recomputes layers where memory needs it"
                    )

    @property
    def num_layers(self) -> tuple[int, ...]:
        """Layers of each family, ``L``."""
        return tuple(len(family.layers) for family in self.families)

    @contextmanager
    def depth(self, counts: tuple[int, ...]) -> Iterator[None]:
        """Recompute the first ``counts[i]`` layers of family ``i`` while the context is open.

        Forward and backward of a micro-batch both happen inside.

        Args:
            counts: one count per family; empty means none.

        Raises:
            ValueError: a count is negative or above the number of layers, or their number is wrong.
            RecomputeError: a layer behaved otherwise in its recompute than in its forward.
        """
        running: list[str] = []
        with ExitStack() as stack:
            for family, count in zip(self.families, self._checked(counts), strict=True):
                for index, layer in enumerate(family.layers[:count]):
                    name = f"layer {index} of {family.name!r} ({class_of(layer).__name__})"
                    stack.enter_context(_recomputed(layer, name, running))
            try:
                yield
            except CheckpointError as error:
                if not running:
                    raise
                raise _changed_state(running[-1], error) from error

    def _checked(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        wanted = counts or (0,) * len(self.families)
        if len(wanted) != len(self.families) or any(
            not 0 <= r <= n for r, n in zip(wanted, self.num_layers, strict=True)
        ):
            raise ValueError(f"recompute is {counts}; allowed are counts from 0 up to {self.num_layers}")
        return wanted


@contextmanager
def instance_attribute(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Set an attribute in the module's own ``__dict__`` and put back exactly what stood there before.

    Not ``setattr``: modules made by ``torch.compile`` would pass it on to the module inside.
    """
    there = name in module.__dict__
    before = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if there:
            module.__dict__[name] = before
        else:
            module.__dict__.pop(name, None)


def replaced_call(layer: nn.Module, function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Run ``function`` in the place of a layer while the context is open.

    A layer compiled in place (``layer.compile()``) is replaced outside of its compiled code, so that its graphs do
    not depend on the function.
    """
    compiled = layer.__dict__.get("_compiled_call_impl")
    return instance_attribute(layer, "forward" if compiled is None else "_compiled_call_impl", function)


def call_of(layer: nn.Module) -> Callable[..., Any]:
    """What :func:`replaced_call` replaces."""
    call: Callable[..., Any] = layer.__dict__.get("_compiled_call_impl") or layer.forward
    return call


def _recomputed(layer: nn.Module, name: str, running: list[str]) -> AbstractContextManager[None]:
    return replaced_call(layer, _checkpointing(call_of(layer), name, running))


def _checkpointing(original: Callable[..., Any], name: str, running: list[str]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        # Bound beforehand, since checkpoint() has keyword arguments of its own.
        region: Callable[..., Any] = partial(original, **kwargs)
        if not torch.compiler.is_compiling():
            region = _Region(region, name, running)
        return checkpoint(region, *args, use_reentrant=False, preserve_rng_state=True)

    return forward


class _Region:
    """A layer's call: the first time it is the forward, every further time a recompute."""

    def __init__(self, function: Callable[..., Any], name: str, running: list[str]) -> None:
        self.function = function
        self.name = name
        self.running = running
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            return self.function(*args)
        self.running.append(self.name)
        try:
            return self.function(*args)
        except _SYMPTOMS as error:
            if isinstance(error, RecomputeError | dist.DistError) or any(
                words in str(error).lower() for words in _OTHER_CAUSES
            ):
                raise
            raise _changed_state(self.name, error) from error


def _changed_state(name: str, error: Exception) -> RecomputeError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return RecomputeError(
        f"{name} did something else in its recompute than in its forward: {lines[0]} ... "
        "Its forward seems to change state that it reads again (a cache, a counter, a random generator of its "
        "own). Switch the cache off for training (Hugging Face: use_cache=False), make the forward free of side "
        "effects, choose other layers (layers=[...]), or train without recomputation (recompute='none')"
    )
