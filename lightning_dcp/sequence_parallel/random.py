"""Random numbers that belong to a sample and a token, whatever the plan.

Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011):
the bits are a function of seed, epoch, sample id, token and element alone. A sequential generator would have to
draw all tokens before a shard's first, and torch's normal numbers depend on how many are drawn at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_dcp.sequence_parallel.context import MicroBatchContext, current
from lightning_dcp.sequence_parallel.layout import token_positions, token_samples

Distribution = Literal["uniform", "normal"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NO_TOKEN = 1 << 31


def rand_per_sample(
    shape: Sequence[int] = (),
    *,
    per: Literal["token", "sample"] = "token",
    distribution: Distribution = "normal",
    stream: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Noise by (seed, epoch, sample id, token), cut to this rank's shard; the same for every plan and padding.

    Call it in ``training_step`` instead of ``torch.randn`` and ``torch.rand``. No generator is involved, so it
    also repeats under recompute. Equal arguments give equal numbers: a second draw of the same kind needs another
    ``stream``.

    Args:
        shape: shape of one token's noise, or of one sample's. For data of (frames, patches) a token is a frame.
        per: ``"token"`` for ``[B, S / p, *shape]``, ``"sample"`` for ``[B, *shape]`` (a noise level), alike on all
            ranks of the group. In a packed micro-batch ``[1, S / p, *shape]`` and ``[samples, *shape]``.
        distribution: ``"uniform"`` on [0, 1) with 32 bits, fewer in shorter dtypes, or standard ``"normal"``.
        stream: 0 to 127.
        dtype: of the result.
        device: of the result.

    Raises:
        RuntimeError: no micro-batch is running.
        ValueError: an argument is out of range.
    """
    context = current()
    if not context.sample_ids:
        raise RuntimeError(
            "rand_per_sample draws for the samples of a running micro-batch, and none is running; "
            "call it in training_step under DCPStrategy"
        )
    if not 0 <= stream < 128 or distribution not in ("uniform", "normal") or per not in ("token", "sample"):
        raise ValueError(
            f"stream {stream!r}, distribution {distribution!r}, per {per!r}; allowed are streams 0 to 127, "
            "'uniform' or 'normal', 'token' or 'sample'"
        )
    device = torch.device(device)
    rows, tokens = _who(context, per, device)
    size = math.prod(shape)
    key_stream = 2 * stream + (distribution == "normal")
    words = _words(context, (rows, tokens), (size, key_stream))
    values = _normal(words) if distribution == "normal" else _uniform(words, dtype)
    return values[..., :size].reshape(*values.shape[:-1], *shape).to(dtype)


def _who(context: MicroBatchContext, per: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row of the sample and token index, two tensors that broadcast to the leading axes of the result."""
    if per == "sample":
        return torch.arange(len(context.sample_ids), device=device), torch.tensor([_NO_TOKEN], device=device)
    return token_samples(context, device), token_positions(context, device)


def _words(context: MicroBatchContext, who: tuple[Tensor, Tensor], what: tuple[int, int]) -> Tensor:
    """Random 32-bit words ``[*leading, 4 * ceil(size / 4)]`` as int64.

    The counter is (element block and stream, token, sample id, epoch and high bits of the sample id): no two draws
    of a run share one.
    """
    (rows, tokens), (size, stream) = who, what
    blocks = -(-size // 4)
    if blocks >= 1 << 24 or not 0 <= context.epoch < 1 << 16 or max(context.sample_ids) >= 1 << 48:
        raise ValueError(
            f"{size} elements each, epoch {context.epoch}, sample id {max(context.sample_ids)}; allowed are up to "
            "2**26 elements, epochs below 2**16 and sample ids below 2**48"
        )
    device = tokens.device
    ids = torch.tensor(context.sample_ids, device=device)[rows].unsqueeze(-1)
    block = torch.arange(blocks, device=device) | (stream << 24)
    counter = (block, tokens.unsqueeze(-1), ids & _WORD, (ids >> 32 << 16) | context.epoch)
    words = philox(counter, (context.seed & _WORD, context.seed >> 32 & _WORD))
    return torch.stack(words, dim=-1).flatten(-2)


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of four counter words, int64 tensors with values below 2**32 that broadcast."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap, but all 64 bits are right; the mask undoes the sign of the shift.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = (second >> 32 & _WORD) ^ b ^ k0, (first >> 32 & _WORD) ^ d ^ k1
        b, d = second & _WORD, first & _WORD
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return a, b, c, d


def _uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    # Bits that the dtype cannot hold are cut off, not rounded, so that 1.0 never appears.
    bits = min(32, round(1 - math.log2(torch.finfo(dtype).eps)))
    return (words >> (32 - bits)).double() * 2.0**-bits


def _normal(words: Tensor) -> Tensor:
    """Box-Muller on pairs of words, in float64: rounding to shorter dtypes hides the last bit of log and cos."""
    pairs = torch.unflatten(words, -1, (-1, 2)).double()
    radius = ((pairs[..., 0] + 0.5) * 2.0**-32).log_().mul_(-2).sqrt_()
    angle = pairs[..., 1] * (2 * math.pi * 2.0**-32)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(-2)
