"""A virtual cluster of H200 GPUs: analytic profiles of the paper's two models, to plan on without any GPU.

The rates and their sources stand in :mod:`lightning_dcp.virtual.hardware`, what the models do in
:mod:`~lightning_dcp.virtual.layers` and :mod:`~lightning_dcp.virtual.models`. Nothing was measured here.
"""

from __future__ import annotations

import numpy as np

from lightning_dcp.interpolation import IntArray
from lightning_dcp.lengths.distributions import PATCHES_PER_FRAME
from lightning_dcp.plan import Shape
from lightning_dcp.profile import Measurement, Profile
from lightning_dcp.topology import legal_sp_sizes, nested_sizes
from lightning_dcp.virtual.hardware import MEMORY_BYTES, RANKS_PER_NODE
from lightning_dcp.virtual.layers import (
    Load,
    activation_bytes,
    backward_bytes,
    backward_seconds,
    forward_seconds,
    input_bytes,
    recompute_seconds,
)
from lightning_dcp.virtual.models import MODELS, Model

__all__ = ["MEMORY_BYTES", "PROFILES", "RANKS_PER_NODE", "profile", "shapes", "sp_sizes"]

PROFILES = tuple(MODELS)
"""Names of the built-in profiles."""

_LARGEST_SP_SIZE = 64
_LONGEST = 2**21
_BATCHES = ((1, _LONGEST), (1024, _LONGEST), (65_536, 32_768))
"""Batch sizes and the longest samples they are written down for. For one length every quantity is a line in the
batch size, so two are exact; the largest holds more short samples than any memory does."""


def profile(name: str, world_size: int) -> Profile:
    """The profile of a model on ``world_size`` GPUs, as if it had been measured at many sizes.

    Lengths follow each other by a sixth, so attention (quadratic) comes out at most 0.6 % too dear in between.

    Args:
        name: one of :data:`PROFILES`.
        world_size: ``W``; ZeRO-1's share of the memory, the time of a step's end and the largest ``p`` depend on it.

    Raises:
        ValueError: an unknown name, or ``world_size`` below 1.
    """
    model = _model(name)
    sizes = sp_sizes(name, world_size)
    lengths = _lengths(model)
    return Profile(
        identity={"model": name, "device": "virtual NVIDIA H200 (analytic)", "world_size": str(world_size)},
        num_layers=model.num_layers,
        static_bytes=model.static_bytes(world_size),
        measurements=tuple(
            _measurement(model, b, shape, p)
            for p in sizes
            for shape in lengths
            for b, longest in _BATCHES
            if _tokens(shape) <= longest
        ),
        sync_time=_nanoseconds(model.sync_seconds(world_size)),
    )


def sp_sizes(name: str, world_size: int) -> tuple[int, ...]:
    """Sequence-parallel sizes of a model: the longest chain of divisors that its heads allow, up to 64 ranks.

    Raises:
        ValueError: an unknown name, or ``world_size`` below 1.
    """
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; it must be an integer from 1")
    return nested_sizes(legal_sp_sizes(min(world_size, _LARGEST_SP_SIZE), _model(name).heads))


def shapes(name: str, lengths: IntArray) -> IntArray:
    """Shapes of samples of these lengths for a model, int64 ``[n, axes]``.

    Transformer-1D takes the tokens as they are. For Transformer-2D a sample is a clip of frames of 256 patches: the
    number of frames is ``lengths / 256`` rounded, so the tokens change by at most 128; a sample below 256 tokens is
    one frame of that many patches. Shapes that are given with as many axes as the model has stay as they are.

    Args:
        name: one of :data:`PROFILES`.
        lengths: tokens ``[n]``, or shapes ``[n, axes]``; integers from 1.

    Raises:
        ValueError: an unknown name, no samples, a size below 1, or another number of axes.
    """
    model, sizes = _model(name), np.asarray(lengths)
    if sizes.dtype.kind not in "iu" or not sizes.size or sizes.min() < 1:
        raise ValueError(f"lengths are of type {sizes.dtype}, shape {sizes.shape}; allowed are integers from 1")
    sizes = sizes.astype(np.int64)
    if sizes.ndim == 2 and sizes.shape[1] == model.axes:
        return sizes
    if sizes.ndim == 2 and sizes.shape[1] == 1:
        sizes = sizes[:, 0]
    if sizes.ndim != 1:
        raise ValueError(
            f"lengths have the shape {sizes.shape}; {name} takes tokens [n] or sizes on {model.axes} axes [n, axes]"
        )
    if model.axes == 1:
        return sizes[:, None]
    frames = np.maximum((sizes + PATCHES_PER_FRAME // 2) // PATCHES_PER_FRAME, 1)
    return np.stack([frames, np.where(sizes < PATCHES_PER_FRAME, sizes, PATCHES_PER_FRAME)], axis=-1)


def _model(name: str) -> Model:
    if name not in MODELS:
        raise ValueError(f"no virtual profile is named {name!r}; allowed are {', '.join(PROFILES)}")
    return MODELS[name]


def _lengths(model: Model) -> list[Shape]:
    """Sizes that are written down, each a sixth above the one before."""
    if model.axes == 1:
        return [(s,) for s in _by_sixths(16, _LONGEST)]
    frames = _by_sixths(1, _LONGEST // PATCHES_PER_FRAME)
    return [
        *((1, s) for s in _by_sixths(16, PATCHES_PER_FRAME - 1)),
        *((f, PATCHES_PER_FRAME) for f in frames),
    ]


def _by_sixths(first: int, last: int) -> list[int]:
    found = [first]
    while found[-1] < last:
        found.append(min(found[-1] + max(found[-1] // 6, 1), last))
    return found


def _tokens(shape: Shape) -> int:
    return int(np.prod(shape))


def _measurement(model: Model, batch_size: int, shape: Shape, sp_size: int) -> Measurement:
    tokens = batch_size * _tokens(shape) / sp_size
    loads = [Load(tokens=tokens, length=length, sp_size=sp_size) for length in model.lengths(shape)]
    families = list(zip(model.families, loads, strict=True))
    temporary = max(backward_bytes(layer, tokens) for layer in model.families)
    # The last norm's input and output are held; the loss is over before the backward of the layers begins.
    outer = 4 * model.hidden * tokens + max(10 * model.outputs * tokens, temporary)
    return Measurement(
        batch_size=batch_size,
        shape=shape,
        sp_size=sp_size,
        forward=tuple(_nanoseconds(forward_seconds(layer, load)) for layer, load in families),
        backward=tuple(_nanoseconds(backward_seconds(layer, load)) for layer, load in families),
        recompute=tuple(_nanoseconds(recompute_seconds(layer, load)) for layer, load in families),
        activation_bytes=tuple(round(activation_bytes(layer, tokens)) for layer in model.families),
        input_bytes=tuple(round(input_bytes(layer, tokens)) for layer in model.families),
        constant_time=_nanoseconds(model.outer_seconds(tokens)),
        constant_bytes=round(outer),
    )


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
