"""Conditions under which gradients of different plans are comparable: no dropout, float32, no hidden rounding.

What :func:`still` changes on a module is undone by :func:`~lightning_dcp.profiling.snapshot.untouched`, in which
every run of the self-check is wrapped; what :func:`conditions` changes outside of it is undone at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

HALF = (torch.bfloat16, torch.float16)

_DROPOUTS = (
    "dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
)  # fmt: skip


def still(module: nn.Module, *, upcast: bool) -> None:
    """Switch dropout off, and hold half-precision weights and buffers in float32.

    Not ``module.eval()``: batch norm and user code that asks for ``self.training`` must run as they train. Every
    probability is set to zero where it is kept: ``p`` of the ``nn.Dropout`` family and every float attribute with
    "drop" in its name (``nn.MultiheadAttention.dropout``, ``nn.LSTM.dropout``, ``attention_dropout``,
    ``drop_prob``). Probabilities that reach a function otherwise are ignored by :func:`conditions`.

    Weights in float32 let the same tolerance find the same errors in every precision: a wrong position moves the
    gradient of a fresh model by less than bfloat16 rounds. The engine's parameters are replaced, not written to.
    """
    copies: dict[int, nn.Parameter] = {}
    for part in list(module.modules()):
        for name, value in list(vars(part).items()):
            dropped = "drop" in name.lower() or (name == "p" and isinstance(part, nn.modules.dropout._DropoutNd))
            if dropped and type(value) is float:
                setattr(part, name, 0.0)
        if upcast:
            _hold_in_float32(part, copies)


def _hold_in_float32(part: nn.Module, copies: dict[int, nn.Parameter]) -> None:
    for name, parameter in list(part._parameters.items()):
        if parameter is not None and parameter.dtype in HALF:
            if id(parameter) not in copies:
                copy = parameter.detach().float()
                copies[id(parameter)] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
            # Not through the dict: recurrent layers keep a second list of their weights up to date in setattr.
            setattr(part, name, copies[id(parameter)])
    for name, buffer in list(part._buffers.items()):
        if buffer is not None and buffer.dtype in HALF:
            part._buffers[name] = buffer.float()


def in_float32(value: Any) -> Any:
    """A batch with its half-precision tensors in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, dict):
        return {key: in_float32(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(in_float32(item) for item in value)
    return value


@contextmanager
def conditions(*, upcast: bool) -> Iterator[None]:
    """Gradients enabled, the dropout functions switched off, float32 products not rounded to TF32 or bfloat16.

    Args:
        upcast: leave autocast off, also where the model asks for it.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for name in _DROPOUTS:
            _replace(stack, functional, name, _same)
        attention = "scaled_dot_product_attention"
        _replace(stack, functional, attention, _undropped(functional.scaled_dot_product_attention))
        if upcast:
            _replace(stack, torch.autocast, "__enter__", _enter_nothing)
            _replace(stack, torch.autocast, "__exit__", _exit_nothing)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        if torch.cuda.is_available():
            _replace(stack, torch.backends.cudnn, "allow_tf32", False)
        yield


def _enter_nothing(context: Any) -> Any:
    return context


def _exit_nothing(_context: Any, *_exception: Any) -> None:
    return None


def _replace(stack: ExitStack, holder: Any, name: str, value: Any) -> None:
    stack.callback(setattr, holder, name, getattr(holder, name))
    setattr(holder, name, value)


def _same(input: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return input


def _undropped(original: Any) -> Any:
    """Attention without dropout; it lies below the exchange, which keeps what it found."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        del dropout_p
        return original(query, key, value, attn_mask, 0.0, is_causal, **options)

    return scaled_dot_product_attention


@contextmanager
def alone() -> Iterator[None]:
    """Let the exchanges of a micro-batch return this rank's own data, without any other rank.

    A rehearsal under it finds what raises on one rank only; in the real exchange the others would wait for it.
    """
    with ExitStack() as stack:
        _replace(stack, dist, "all_to_all_single", _to_itself)
        _replace(stack, dist, "all_gather", _from_itself)
        yield


def _to_itself(output: Tensor, input: Tensor, *_args: Any, **_kwargs: Any) -> None:
    output.copy_(input)


def _from_itself(tensor_list: list[Tensor], tensor: Tensor, *_args: Any, **_kwargs: Any) -> None:
    for part in tensor_list:
        part.copy_(tensor)


@contextmanager
def half_precision(seen: list[torch.dtype]) -> Iterator[None]:
    """Collect the half-precision types that are saved for the backward, under autocast or by the model."""

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype in HALF and tensor.dtype not in seen:
            seen.append(tensor.dtype)
        # Returning the tensor itself would tie it to its own graph for the life of the process.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
