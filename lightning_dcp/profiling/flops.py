"""Counting the operations of the user's own model, once, on a few short samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_dcp.agreement import of_all_ranks
from lightning_dcp.data.batch import Batch
from lightning_dcp.execution import MicroBatchRunner
from lightning_dcp.metrics.flops import AttentionCall, FlopCount, Observation, causal_pairs, fitted
from lightning_dcp.plan import MicroBatch, Shape
from lightning_dcp.profiling.snapshot import untouched
from lightning_dcp.sequence_parallel.backend import SDPA
from lightning_dcp.sequence_parallel.interception import replaced_attention


def count_flops(
    runner: MicroBatchRunner,
    rank: int,
    world_size: int,
    samples: Sequence[tuple[int, Shape]],
    load: Callable[[MicroBatch], Batch],
) -> FlopCount | None:
    """What a sample's forward computes, by its shape; called by every rank, with one small gather.

    Each sample runs alone, unpadded, at ``p = 1`` and without recompute, under torch's counter of operations. That
    one does not see attention on every device, so attention is counted from its calls. The module is left bit-equal.

    Args:
        runner: runs ``training_step`` on single ranks.
        rank: this rank.
        world_size: number of ranks.
        samples: positions and shapes of a few samples of different shapes.
        load: a collated micro-batch on the device.

    Returns:
        ``None``, with a warning, where it cannot be counted on any of the ranks.
    """
    found: FlopCount | str
    try:
        with untouched(runner.module), _eager(runner.module):
            observations = [_observed(runner, rank, sample, load) for sample in samples]
        found = fitted(observations)
    except Exception as error:  # user code on one rank; operations are no reason to end a training
        found = f"{type(error).__name__}: {error}"
    reasons = [answer for answer in of_all_ranks(found, world_size) if isinstance(answer, str)]
    if reasons or isinstance(found, str):
        rank_zero_warn(
            f"The model's operations could not be counted, so neither MFU nor FLOP/s are logged ({reasons[0]})"
        )
        return None
    if not found.exact:
        rank_zero_warn(
            "The model's operations do not follow from the number of tokens alone (a head over the valid labels only "
            "is such a case), so MFU and FLOP/s are counted with the mean of a token of a few samples"
        )
    return found


def _observed(
    runner: MicroBatchRunner, rank: int, sample: tuple[int, Shape], load: Callable[[MicroBatch], Batch]
) -> Observation:
    position, shape = sample
    micro_batch = MicroBatch(
        sample_ids=(position,), shapes=(shape,), padded_shape=shape, first_rank=rank, sp_size=1, nanoseconds=0,
        bytes=0,
    )  # fmt: skip
    batch = load(micro_batch)
    counter = FlopCounterMode(display=False)
    watched = _WatchedAttention(counter)
    with (
        replaced_attention(watched.wrap),
        counter,
        torch.no_grad(),
        runner.step(micro_batch, batch),
    ):
        pass
    dense = counter.get_total_flops() - watched.seen
    return Observation(shape=shape, dense=dense, calls=tuple(watched.calls))


class _WatchedAttention:
    """Notes the calls of attention, and what the counter of operations saw of them."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter
        self.calls: list[AttentionCall] = []
        self.seen = 0

    def wrap(self, original: SDPA) -> SDPA:
        """The function to put in the place of attention."""

        def scaled_dot_product_attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            **options: Any,
        ) -> Tensor:
            self.calls.append(_call(query, key, value, _pairs(query, key, attn_mask, is_causal=is_causal)))
            before = self._counter.get_total_flops()
            output = original(query, key, value, attn_mask, dropout_p, is_causal, **options)
            self.seen += self._counter.get_total_flops() - before
            return output

        return scaled_dot_product_attention


def _call(query: Tensor, key: Tensor, value: Tensor, pairs: int) -> AttentionCall:
    heads = query.shape[-3] if query.dim() > 3 else 1
    return AttentionCall(
        sequences=prod(query.shape[:-2]) // heads,
        queries=query.shape[-2],
        keys=key.shape[-2],
        pairs=pairs,
        flops_per_pair=2 * heads * (query.shape[-1] + value.shape[-1]),
    )


def _pairs(query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool) -> int:
    """Pairs of a query and a key that may attend; a mask that is not causal everywhere counts as none."""
    queries, keys = query.shape[-2], key.shape[-2]
    every, causal = queries * keys, causal_pairs(queries, keys)
    if is_causal:
        return causal
    if mask is None:
        return every
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    allowed = allowed.expand(*allowed.shape[:-2], queries, keys)
    lower = torch.ones(queries, keys, dtype=torch.bool, device=allowed.device).tril()
    return causal if bool((allowed == lower).all()) else every


def _eager(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Run eagerly where something is compiled: the counter sees no compiled code."""
    compiled = any(
        hasattr(part, "_orig_mod") or part.__dict__.get("_compiled_call_impl") is not None
        for part in module.modules()
    )
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
