"""Bytes that a rank holds whatever micro-batch runs: DeepSpeed ZeRO-1 with Adam."""

from __future__ import annotations

from torch import nn

from lightning_dcp.memory import DEFAULT_BUCKET


def static_bytes(module: nn.Module, world_size: int) -> int:
    """Bytes per rank while micro-batches run, from the second step on (optimizer states exist then).

    Per trainable parameter, with ``s`` bytes of its dtype and ``W`` ranks: weight ``s``, gradient ``s``, master
    weight and two Adam states ``12 / W``. Float32 weights add the reduce bucket, ``s`` per element of it,
    allocated whole; half-precision weights are accumulated in float32, ``4`` more and no bucket. Frozen parameters
    and buffers add their own size. (Found by running DeepSpeed 0.19, where float32 and W = 2 took 14.5
    without the bucket.)

    Args:
        module: the model after ``deepspeed.initialize``, so in the dtype that it trains in.
        world_size: ranks ``W`` that share the optimizer states.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    fixed = [p for p in module.parameters() if not p.requires_grad] + list(module.buffers())
    number = sum(p.numel() for p in trained)
    weights = sum(p.numel() * p.element_size() for p in trained)
    total = 2 * weights + -(-12 * number // world_size) + sum(t.numel() * t.element_size() for t in fixed)
    half = any(p.element_size() < 4 for p in trained)
    extra = (
        4 * number if half else min(DEFAULT_BUCKET, number) * max((p.element_size() for p in trained), default=0)
    )
    return total + extra
