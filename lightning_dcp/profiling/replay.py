"""Running one layer alone with its recorded inputs: its times and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_dcp.profiling.clock import Clock
from lightning_dcp.profiling.errors import is_out_of_memory
from lightning_dcp.profiling.ledger import Ledger
from lightning_dcp.profiling.nested import replace_tensors, substitutes, tensors_in
from lightning_dcp.profiling.truncation import LayerCall
from lightning_dcp.recompute import RecomputeSwitch, call_of

_LEAST_RECOMPUTE, _MOST_RECOMPUTE = 0.5, 1.25
"""Shares of the forward between which a recompute lies (found by running): it is a difference of noisy times."""
_RECOMPUTE_OVERHEAD = 1_000_000
"""Nanoseconds that a recompute may cost beyond that, whatever the layer's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer of a family at one size; see :class:`~lightning_dcp.profile.Measurement`."""

    forward: int = 0
    backward: int = 0
    recompute: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0

    def times(self, calls: int) -> LayerCost:
        """The cost of a layer that runs several times in a step."""
        return LayerCost(
            forward=calls * self.forward,
            backward=calls * self.backward,
            recompute=calls * self.recompute,
            activation_bytes=calls * self.activation_bytes,
            input_bytes=calls * self.input_bytes,
        )


class Replay:
    """A layer and one of its calls.

    Args:
        layer: the layer.
        call: its recorded call.
        switch: the switch over the model's layers.
        depth: counts with which the switch recomputes this layer.
    """

    def __init__(self, layer: nn.Module, call: LayerCall, switch: RecomputeSwitch, depth: tuple[int, ...]) -> None:
        self._layer = layer
        self._call = call
        self._switch = switch
        self._depth = depth
        self._parameters = [p for p in layer.parameters() if p.requires_grad]

    def measure(self, clock: Clock, repeats: int) -> LayerCost:
        """Times (median of ``repeats``, the lower one of two, after a warm-up) and bytes of one layer.

        The exchanges of attention run over the group of the running micro-batch; so all its ranks call this
        together, with the same ``repeats``.
        """
        activation = self._held_bytes(nullcontext())
        inputs = self._held_bytes_recomputed()
        plain: list[tuple[int, int]] = []
        recomputed: list[int] = []
        for _ in range(repeats):
            plain.append(self._run(clock, nullcontext()))
            if inputs is not None:
                recomputed.append(sum(self._run(clock, self._switch.depth(self._depth))))
        forward = int(median_low(forward for forward, _ in plain))
        total = int(median_low(sum(run) for run in plain))
        extra = int(median_low(recomputed)) - total if recomputed else forward
        most = int(_MOST_RECOMPUTE * forward) + _RECOMPUTE_OVERHEAD
        return LayerCost(
            forward=forward,
            backward=max(0, total - forward),
            recompute=min(max(extra, int(_LEAST_RECOMPUTE * forward)), most),
            activation_bytes=activation,
            input_bytes=activation if inputs is None else inputs,
        )

    def _held_bytes_recomputed(self) -> int | None:
        """Bytes held when the layer is recomputed; ``None`` for a layer that cannot be.

        Such a layer (one that writes into its input, say) still trains: recomputing it saves nothing, so no plan
        does it.
        """
        try:
            return self._held_bytes(self._switch.depth(self._depth))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            rank_zero_warn(f"Layers of class {type(self._layer).__name__} will not be recomputed: {error}")
            return None

    def _held_bytes(self, depth: AbstractContextManager[None]) -> int:
        """Bytes alive between forward and backward, the output among them, the inputs not; warms up as well."""
        with depth, self._autocast():
            args, kwargs, leaves = self._fresh_inputs()
            with Ledger() as ledger:
                output = call_of(self._layer)(*args, **kwargs)
                held: int = ledger.live
            self._backward(output, leaves)
        return held

    def _run(self, clock: Clock, depth: AbstractContextManager[None]) -> tuple[int, int]:
        with depth:
            args, kwargs, leaves = self._fresh_inputs()
            start = clock.mark()
            with self._autocast():
                output = call_of(self._layer)(*args, **kwargs)
            middle = clock.mark()
            self._backward(output, leaves)
            end = clock.mark()
        return clock.nanoseconds(start, middle), clock.nanoseconds(middle, end)

    def _fresh_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        inputs = tensors_in((self._call.args, self._call.kwargs))
        fresh = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(inputs, self._call.needs_grad, strict=True)
        ]
        # No leaf: a layer may add to its input in place.
        given = [tensor.clone() if tensor.requires_grad else tensor for tensor in fresh]
        args, kwargs = replace_tensors((self._call.args, self._call.kwargs), substitutes(given))
        return args, kwargs, [tensor for tensor in fresh if tensor.requires_grad]

    def _backward(self, output: Any, leaves: list[Tensor]) -> None:
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        inputs = leaves + self._parameters
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._call.autocast is None:
            yield
            return
        tensors = tensors_in((self._call.args, self._call.kwargs))
        with torch.autocast(tensors[0].device.type, dtype=self._call.autocast):
            yield
