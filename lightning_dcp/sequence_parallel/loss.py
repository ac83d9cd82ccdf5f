"""Losses as sums with counts, the only form that does not depend on how a step is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dcp.sequence_parallel.context import MicroBatchContext, current
from lightning_dcp.sequence_parallel.layout import token_samples


def loss_sum(values_BS: Tensor, mask_BS: Tensor) -> dict[str, Tensor]:
    """Loss and count of this rank's shard; what ``training_step`` returns.

    Weighting by token: the sum over valid tokens, and their number. Weighting by sample: the sum of each token's
    loss over the number of valid tokens of its *whole* sample, and the part of each sample that this shard holds.
    Summed over all shards the counts are the valid tokens, or the samples with a valid token.

    Values at masked places may be NaN or infinite and get no gradient. (What computed them may still make NaN from
    that zero, as the derivative of ``log`` at 0 does.)

    Args:
        values_BS: loss of each token, without reduction; any shape if weighting by token.
        mask_BS: True where the token counts; same shape.

    Returns:
        ``{"loss": scalar, "count": scalar}``; at least float32, without synchronising the device.

    Raises:
        ValueError: the shapes differ, or are not ``[B, S]`` where samples must be told apart.
        RuntimeError: weighting by sample under ``p > 1`` without the counts of the whole samples.
    """
    if values_BS.shape != mask_BS.shape:
        raise ValueError(
            f"values of shape {tuple(values_BS.shape)} and a mask of shape {tuple(mask_BS.shape)}; "
            "give one loss and one mask entry for each token"
        )
    if values_BS.dtype in (torch.float16, torch.bfloat16):
        values_BS = values_BS.float()
    valid_BS = mask_BS.to(torch.bool)
    kept_BS = torch.where(valid_BS, values_BS, torch.zeros_like(values_BS))
    context = current()
    if context.weighting == "token":
        return {"loss": kept_BS.sum(), "count": valid_BS.sum()}
    rows, items_B = _samples(valid_BS, context)
    items_B = items_B.clamp(min=1)
    here_B = torch.zeros_like(items_B).index_add_(
        0, rows.expand_as(valid_BS).flatten(), valid_BS.flatten().to(items_B.dtype)
    )
    return {"loss": (kept_BS / items_B[rows].to(kept_BS.dtype)).sum(), "count": (here_B / items_B).sum()}


def _samples(valid_BS: Tensor, context: MicroBatchContext) -> tuple[Tensor, Tensor]:
    """Each token's sample, ``[B, 1]`` or ``[1, S]`` if packed, and each whole sample's valid tokens, float64."""
    if valid_BS.dim() != 2:
        raise ValueError(
            f"values of shape {tuple(valid_BS.shape)}; weighting by sample needs [B, S] to tell samples apart"
        )
    items_B = context.items_per_sample_B
    if items_B is None:
        if context.group.size > 1:
            raise RuntimeError(
                "weighting by sample needs the valid tokens of whole samples, but the micro-batch carries none; "
                "they are counted by the data module's loss_items"
            )
        rows = torch.arange(len(valid_BS), device=valid_BS.device).unsqueeze(1)
        return rows, valid_BS.sum(1, dtype=torch.float64)
    num_rows = 1 if context.packed else len(context.sample_ids)
    if valid_BS.shape[0] != num_rows or items_B.shape != (len(context.sample_ids),):
        raise ValueError(
            f"values of shape {tuple(valid_BS.shape)} and {tuple(items_B.shape)} counts for a micro-batch of "
            f"{len(context.sample_ids)} samples in {num_rows} rows; give one row of losses for each row"
        )
    return token_samples(context, valid_BS.device), items_B.to(valid_BS.device, torch.float64)
