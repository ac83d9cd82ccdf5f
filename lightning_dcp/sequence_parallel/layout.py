"""Which sample, and which place in it, each token of this rank's shard is."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dcp.sequence_parallel.context import MicroBatchContext


def token_positions(context: MicroBatchContext, device: torch.device) -> Tensor:
    """Index of each token in its sample, ``[B, s]`` (``[1, s]`` if packed), pads included.

    Along the first axis of ``padded_shape``: frames in two-dimensional data.
    """
    place_s = _places(context, device)
    if not context.packed:
        return place_s.expand(len(context.sample_ids), -1)
    starts = torch.tensor(_starts(context), device=device)
    return (place_s - starts[_rows(place_s, starts)]).unsqueeze(0)


def token_samples(context: MicroBatchContext, device: torch.device) -> Tensor:
    """Row of each token's sample in ``sample_ids``, ``[B, 1]``; ``[1, s]`` if packed (pads: the last one)."""
    if not context.packed:
        return torch.arange(len(context.sample_ids), device=device).unsqueeze(1)
    starts = torch.tensor(_starts(context), device=device)
    return _rows(_places(context, device), starts).unsqueeze(0)


def _places(context: MicroBatchContext, device: torch.device) -> Tensor:
    part = context.padded_shape[0] // context.group.size
    first = context.group.rank * part
    return torch.arange(first, first + part, device=device)


def _starts(context: MicroBatchContext) -> list[int]:
    starts = [0]
    for shape in context.shapes[:-1]:
        starts.append(starts[-1] + shape[0])
    return starts


def _rows(place_s: Tensor, starts: Tensor) -> Tensor:
    return torch.searchsorted(starts, place_s, right=True) - 1
