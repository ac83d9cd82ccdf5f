"""The reference cost model that planners are compared on: a 7B model on A100 GPUs, written down, not measured.

Published schedulers were measured on this model too, so it must not change from one comparison to the next.

- 32 layers, hidden size 4,096, 32 heads, 6.7e9 parameters (the shape of LLaMA-7B, arXiv:2302.13971).
- Matrix products at half of the A100's 312 TFLOP/s in bfloat16, attention at 40 % of them (FlashAttention-2,
  arXiv:2307.08691, reports 50 to 73 % forward and less backward).
- Every micro-batch costs 30 ms more (launches, Python, the loss), whatever it holds.
- Ulysses exchanges query, key, value and output in each layer, forward and backward: 200 GB/s per GPU inside a node
  of 8 (NVLink 3), 25 GB/s between nodes (one 200 Gbit/s adapter per GPU), 20 and 50 microseconds to start.
- A micro-batch holds up to 6,000 tokens per GPU; memory is no other limit.
"""

from __future__ import annotations

import numpy as np

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.planners import Limits, PlanRequest
from lightning_dcp.profile import Measurement, Profile
from lightning_dcp.topology import World

TOKENS_PER_GPU = 6_000
SP_SIZES = (1, 2, 4, 8, 16, 32)
RANKS_PER_NODE = 8

_LAYERS, _HIDDEN, _PARAMETERS = 32, 4_096, 6.7e9
_MATRIX_RATE, _ATTENTION_RATE = 0.5 * 312e12, 0.4 * 312e12
_FIXED_NANOSECONDS = 30_000_000
_BATCH_SIZES = (1, TOKENS_PER_GPU)


def forward_nanoseconds(batch_size: int, tokens: int, sp_size: int) -> int:
    """Forward of one layer on each of ``p`` ranks; the backward takes twice the products and as many exchanges."""
    products = 2 * _PARAMETERS / _LAYERS * tokens / _MATRIX_RATE
    attention = 2 * _HIDDEN * tokens**2 / _ATTENTION_RATE
    return round(1e9 * batch_size * (products + attention) / sp_size) + _exchange(batch_size * tokens, sp_size)


def _exchange(tokens: int, sp_size: int) -> int:
    if sp_size == 1:
        return 0
    inside = sp_size <= RANKS_PER_NODE
    rate, start = (200e9, 20e-6) if inside else (25e9, 50e-6)
    sent = 4 * 2 * _HIDDEN * tokens / sp_size * (sp_size - 1) / sp_size
    return round(1e9 * (sent / rate + 2 * start))


def reference_profile() -> Profile:
    """The model as a profile, like one that was measured."""
    longest = TOKENS_PER_GPU * max(SP_SIZES)
    tokens = np.unique(np.geomspace(16, longest, 64).round().astype(int)).tolist()
    rows = [_measurement(b, s, p) for p in SP_SIZES for s in tokens for b in _BATCH_SIZES]
    return Profile(
        identity={"model": "reference 7B", "device": "A100"},
        num_layers=(_LAYERS,),
        static_bytes=0,
        measurements=tuple(rows),
    )


def _measurement(batch_size: int, tokens: int, sp_size: int) -> Measurement:
    exchange = _exchange(batch_size * tokens, sp_size)
    forward = forward_nanoseconds(batch_size, tokens, sp_size)
    return Measurement(
        batch_size=batch_size,
        shape=(tokens,),
        sp_size=sp_size,
        forward=(forward,),
        backward=(2 * (forward - exchange) + exchange,),
        recompute=(forward,),
        activation_bytes=(0,),
        input_bytes=(0,),
        constant_time=_FIXED_NANOSECONDS,
        constant_bytes=0,
    )


def reference_request(
    world_size: int, lengths: IntArray, *, packing: bool, cost: CostModel | None = None
) -> PlanRequest:
    """A step of samples of these lengths, tokens ``[n]``.

    Args:
        world_size: ``W``, in nodes of 8.
        lengths: tokens of each sample.
        packing: whether micro-batches may hold mixed lengths in one row.
        cost: the cost model of :func:`reference_profile`, if at hand.
    """
    return PlanRequest(
        sample_ids=np.arange(len(lengths)),
        shapes=lengths[:, None],
        cost=cost or CostModel(reference_profile()),
        world=World.build(world_size, [p for p in SP_SIZES if p <= world_size], RANKS_PER_NODE),
        limits=Limits(memory_bytes=2**40, max_tokens=TOKENS_PER_GPU, packing=packing),
    )


def lognormal_lengths(count: int, median: int, sigma: float, seed: int, world_size: int) -> IntArray:
    """Seeded lognormal lengths, from 16 tokens to the longest that the world can hold."""
    drawn = np.random.default_rng([seed, median, round(10 * sigma)]).lognormal(np.log(median), sigma, count)
    longest = TOKENS_PER_GPU * min(world_size, max(SP_SIZES))
    return np.clip(drawn.round().astype(np.int64), 16, longest)
