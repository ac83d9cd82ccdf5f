"""Running a model with two layers of each family, and recording how one of them is called (paper 3.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dcp.profiling.nested import replace_tensors, substitutes, tensors_in
from lightning_dcp.recompute import LayerFamily, call_of, replaced_call


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One call of a layer: enough to run it alone, and to skip layers like it.

    Attributes:
        args: positional arguments, detached.
        kwargs: keyword arguments, detached.
        needs_grad: for each tensor among the arguments, whether it had a gradient to receive.
        sources: for each tensor of the output, the index of the argument tensor that a skipped layer returns for
            it; ``None`` where no argument fits.
        output: the output, detached.
        autocast: dtype of autocast on the layer's device, ``None`` when it was off.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs_grad: tuple[bool, ...]
    sources: tuple[int | None, ...]
    output: Any
    autocast: torch.dtype | None


class Recording:
    """The calls of the measured layer of a family.

    It is the second layer, which finds caches and allocator warmed by the first.

    Attributes:
        layer: the measured layer.
        call: its last call; ``None`` as long as it did not run.
        count: calls in the last run of the model.
    """

    def __init__(self, family: LayerFamily) -> None:
        self.family = family
        self.layer = family.layers[min(1, len(family.layers) - 1)]
        self.call: LayerCall | None = None
        self.count = 0

    def recorder(self) -> Callable[..., Any]:
        """The layer's call, which notes how it was called."""
        original = call_of(self.layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self.call = record(args, kwargs, output)
            self.count += 1
            return output

        return forward


def record(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> LayerCall:
    """Describe a call; tensors are kept without their graph."""
    inputs = tensors_in((args, kwargs))
    device_type = inputs[0].device.type if inputs else "cpu"
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return LayerCall(
        args=replace_tensors(args, Tensor.detach),
        kwargs=replace_tensors(kwargs, Tensor.detach),
        needs_grad=tuple(tensor.requires_grad for tensor in inputs),
        sources=_sources(inputs, tensors_in(output)),
        output=replace_tensors(output, Tensor.detach),
        autocast=autocast,
    )


def _sources(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[int | None, ...]:
    """Which argument stands for each output: the same tensor, else the first unused one of its shape and dtype."""
    chosen: list[int | None] = []
    for output in outputs:
        same = [i for i, tensor in enumerate(inputs) if tensor is output]
        alike = [
            i
            for i, tensor in enumerate(inputs)
            if i not in chosen and tensor.shape == output.shape and tensor.dtype == output.dtype
        ]
        fitting = same or alike
        chosen.append(fitting[0] if fitting else None)
    return tuple(chosen)


@contextmanager
def recorded(families: Sequence[LayerFamily]) -> Iterator[tuple[Recording, ...]]:
    """Run only the first two layers of each family, and record the calls of the second."""
    recordings = tuple(Recording(family) for family in families)
    with ExitStack() as stack:
        for recording in recordings:
            stack.enter_context(replaced_call(recording.layer, recording.recorder()))
            for layer in recording.family.layers[2:]:
                stack.enter_context(replaced_call(layer, _skip(layer, recording)))
        yield recordings


@contextmanager
def skipped(recordings: Sequence[Recording]) -> Iterator[None]:
    """Run no layer of the recorded families: what is left is embedding, head and loss."""
    with ExitStack() as stack:
        for recording in recordings:
            for layer in recording.family.layers:
                stack.enter_context(replaced_call(layer, _skip(layer, recording)))
        yield


def _skip(layer: nn.Module, recording: Recording) -> Callable[..., Any]:
    original = call_of(layer)

    def pass_through(*args: Any, **kwargs: Any) -> Any:
        call = recording.call
        if call is None:
            # Called before the layer that it learns from; so it does its own work.
            return original(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        outputs = [
            _stand_in(inputs[source] if source is not None and source < len(inputs) else recorded_output)
            for source, recorded_output in zip(call.sources, tensors_in(call.output), strict=True)
        ]
        return replace_tensors(call.output, substitutes(outputs))

    return pass_through


def _stand_in(tensor: Tensor) -> Tensor:
    """The tensor, able to carry a gradient, so that the head's backward runs even if all before it is frozen."""
    if tensor.requires_grad or not tensor.is_floating_point() or not torch.is_grad_enabled():
        return tensor
    return tensor.detach().requires_grad_()
