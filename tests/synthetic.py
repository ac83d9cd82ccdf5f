"""Profiles by formula and random valid plans: stand-ins that need no model and no clock."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lightning_dcp.cost import CostModel
from lightning_dcp.plan import IterationPlan, MicroBatch, Shape
from lightning_dcp.profile import Measurement, Profile
from lightning_dcp.topology import World

HIDDEN_BYTES = 256
"""Bytes of one token at the border of a layer (hidden size 64 in float32)."""


def analytic_measurement(batch_size: int, shape: Shape, sp_size: int, families: int = 1) -> Measurement:
    """One probe by formula: launch + tokens + tokens squared, shared by ``p`` ranks, plus communication.

    A layer of family ``k`` costs ``k + 1`` times one of family 0. Times never fall with the length or the batch
    size and are not proportional to ``1 / p``, so wide groups pay.
    """
    tokens = shape[0] * (shape[1] if len(shape) > 1 else 1)
    work = 400 * batch_size * tokens + batch_size * tokens * tokens // 4
    exchange = 0 if sp_size == 1 else 60_000 + 40 * batch_size * tokens * (sp_size - 1) // sp_size**2
    forward = 100_000 + work // sp_size + exchange
    border = HIDDEN_BYTES * batch_size * tokens // sp_size
    scale = range(1, families + 1)
    return Measurement(
        batch_size=batch_size,
        shape=shape,
        sp_size=sp_size,
        forward=tuple(k * forward for k in scale),
        backward=tuple(2 * k * forward for k in scale),
        recompute=tuple(9 * k * forward // 10 for k in scale),
        activation_bytes=tuple((14 + 2 * k) * border for k in scale),
        input_bytes=tuple(border for _ in scale),
        constant_time=300_000 + 200 * batch_size * tokens // sp_size,
        constant_bytes=8 * border,
    )


def analytic_profile(
    sp_sizes: Sequence[int] = (1, 2, 4),
    num_layers: tuple[int, ...] = (4,),
    *,
    shapes: Sequence[Shape] = ((8,), (64,), (256,), (1024,), (4096,), (16384,)),
    batch_sizes: Sequence[int] = (1, 2, 8),
    static_bytes: int = 1 << 20,
) -> Profile:
    """A full grid of :func:`analytic_measurement`, equal in every call with the same arguments.

    Args:
        sp_sizes: profiled sequence-parallel sizes.
        num_layers: layers per family; one number for a 1-D model, two for a 2-D one.
        shapes: probed sizes, ``(tokens,)`` or ``(frames, patches)``.
        batch_sizes: probed batch sizes.
        static_bytes: bytes that no micro-batch changes.
    """
    rows = tuple(
        analytic_measurement(b, shape, p, len(num_layers))
        for p in sp_sizes
        for shape in shapes
        for b in batch_sizes
    )
    return Profile(
        identity={"model": "analytic"}, num_layers=num_layers, static_bytes=static_bytes, measurements=rows
    )


def analytic_cost(sp_sizes: Sequence[int] = (1, 2, 4), num_layers: tuple[int, ...] = (4,)) -> CostModel:
    """The cost model of :func:`analytic_profile` with its default grid."""
    return CostModel(analytic_profile(sp_sizes, num_layers))


def random_plan(
    rng: random.Random,
    sample_ids: Sequence[int],
    shapes: Sequence[Shape],
    world: World,
    num_layers: tuple[int, ...] = (4,),
    *,
    max_batch_size: int = 3,
) -> IterationPlan:
    """Any valid plan of these samples: mixed ``p``, ``b``, ``g``, ``r``, order and superfluous padding.

    Every rank may get any number of micro-batches, none included. Times and bytes are random.

    Args:
        rng: source of all choices; the same state gives the same plan.
        sample_ids: samples to place, each exactly once.
        shapes: size of each sample.
        world: groups that may be used.
        num_layers: layers per family; bounds the recompute counts.
        max_batch_size: most samples in one micro-batch.
    """
    left = list(zip(sample_ids, shapes, strict=True))
    rng.shuffle(left)
    micro_batches = []
    while left:
        size = rng.randint(1, min(max_batch_size, len(left)))
        chosen, left = left[:size], left[size:]
        # First the size, then the group: else single ranks, the most numerous groups, would nearly always win.
        first_rank, sp_size = rng.choice(world.blocks_of(rng.choice(world.sp_sizes)))
        longest = [max(shape[axis] for _, shape in chosen) for axis in range(len(chosen[0][1]))]
        longest[0] = (-(-longest[0] // sp_size) + rng.choice((0, 0, 1))) * sp_size
        micro_batches.append(
            MicroBatch(
                sample_ids=tuple(i for i, _ in chosen),
                shapes=tuple(shape for _, shape in chosen),
                padded_shape=tuple(longest),
                first_rank=first_rank,
                sp_size=sp_size,
                recompute=tuple(rng.randint(0, layers) for layers in num_layers),
                nanoseconds=rng.randint(1, 10**6),
                bytes=rng.randint(1, 10**9),
            )
        )
    return IterationPlan(world_size=world.world_size, micro_batches=tuple(micro_batches))
