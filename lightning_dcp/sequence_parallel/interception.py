"""Reaching models that call ``torch.nn.functional.scaled_dot_product_attention`` and know nothing of sharding.

The function is replaced in its module, for the whole process: a ``TorchFunctionMode`` is off while a checkpointed
layer is recomputed and never sees the calls inside ``nn.MultiheadAttention``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor
from torch.nn import functional

from lightning_dcp.sequence_parallel.attention import sharded_attention
from lightning_dcp.sequence_parallel.backend import (
    EXCHANGE_ORIGINAL,
    RECORDER_ORIGINAL,
    SDPA,
    AttentionOptions,
    Backend,
    choose_backend,
    exposed_sdpa,
)
from lightning_dcp.topology import legal_sp_sizes


@contextmanager
def patched_attention() -> Iterator[None]:
    """Exchange every ``scaled_dot_product_attention`` of the running micro-batch over its group.

    Must be open from before ``training_step`` to the end of its backward, since recomputed layers call attention
    again. Restores everything on exit. Opening it again inside itself changes nothing.
    """
    original: SDPA = functional.scaled_dot_product_attention
    if hasattr(original, EXCHANGE_ORIGINAL):
        yield
        return
    with _replaced(_exchanging(original)):
        yield


@contextmanager
def _replaced(replacement: SDPA) -> Iterator[None]:
    """Put a function in the place of SDPA and turn off the fused inference path, which would go around it."""
    original = functional.scaled_dot_product_attention
    fast_path = torch.backends.mha.get_fastpath_enabled()
    functional.scaled_dot_product_attention = replacement
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def replaced_attention(wrap: Callable[[SDPA], SDPA]) -> Iterator[None]:
    """Watch every ``scaled_dot_product_attention``, at ``p = 1``.

    Args:
        wrap: makes, from the function that stands there, the one to put in its place.
    """
    original: SDPA = functional.scaled_dot_product_attention
    watching = wrap(original)
    vars(watching)[RECORDER_ORIGINAL] = original
    with _replaced(watching):
        yield


def _exchanging(original: SDPA) -> SDPA:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options = AttentionOptions(
            sdpa=original, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return sharded_attention(query, key, value, attn_mask, options)

    vars(scaled_dot_product_attention)[EXCHANGE_ORIGINAL] = original
    return scaled_dot_product_attention


class AttentionRecorder:
    """Notes the attention calls of a forward with ``p = 1``, to learn which sequence-parallel sizes are legal.

    Sees :func:`attention` and ``scaled_dot_product_attention``, not :func:`local_attention`.

    Attributes:
        calls: number of attention calls.
        heads: pairs (heads, key/value heads) seen; ``(1, 1)`` for tensors that are not ``[B, H, S, D]``.
        cross_attention: whether query and key ever had different lengths, which cannot be sharded.
        backends: kernels that the calls get where they are exchanged.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.heads: set[tuple[int, int]] = set()
        self.cross_attention = False
        self.backends: set[Backend] = set()

    def __enter__(self) -> AttentionRecorder:
        self._context = _replaced(self._recording(functional.scaled_dot_product_attention))
        self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)

    def sp_sizes(self, world_size: int) -> tuple[int, ...]:
        """Sizes that every recorded call allows; ``(1,)`` without a call or with cross-attention."""
        if not self.calls or self.cross_attention:
            return (1,)
        legal = [set(legal_sp_sizes(world_size, *pair)) for pair in self.heads]
        return tuple(sorted(set.intersection(*legal)))

    def _recording(self, original: SDPA) -> SDPA:
        def scaled_dot_product_attention(
            query: Tensor, key: Tensor, value: Tensor, *arguments: object, **options: object
        ) -> Tensor:
            self.calls += 1
            four = query.dim() == key.dim() == 4
            self.heads.add((query.shape[1], key.shape[1]) if four else (1, 1))
            self.cross_attention |= query.shape[-2] != key.shape[-2]
            mask = arguments[0] if arguments else options.get("attn_mask")
            kernel = AttentionOptions(sdpa=exposed_sdpa(recorded=False))
            self.backends.add(
                choose_backend(query, key, value, mask if isinstance(mask, Tensor) else None, kernel)
            )
            return original(query, key, value, *arguments, **options)

        vars(scaled_dot_product_attention)[RECORDER_ORIGINAL] = original
        return scaled_dot_product_attention
