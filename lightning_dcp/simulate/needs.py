"""What the samples ask of the memory: the longest one, and those that fit nowhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.interpolation import MAX_TOKENS
from lightning_dcp.plan import Shape
from lightning_dcp.planners import InfeasibleError
from lightning_dcp.planners.assembly import common_sp_sizes, raise_infeasible, settings_within
from lightning_dcp.simulate.cluster import Cluster

_CHUNK = 65_536
"""Samples that are looked at together; the settings of a million at once would take half a gigabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One sample alone on one group.

    Attributes:
        sp_size: ranks of the group.
        bytes: memory per rank with :attr:`recompute`.
        recompute: fewest recomputed layers that fit; those of least memory where it does not fit.
        fits: whether it is within all limits.
    """

    sp_size: int
    bytes: int
    recompute: tuple[int, ...]
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestSample:
    """The sample of most tokens on every group size.

    Attributes:
        position: where it stands in the dataset; the first of several.
        shape: its size.
        fits: one entry for each size, ascending.
    """

    position: int
    shape: Shape
    fits: tuple[Fit, ...]

    @property
    def narrowest(self) -> Fit | None:
        """The smallest group that holds it; ``None`` where none does."""
        return next((fit for fit in self.fits if fit.fits), None)


def longest_sample(shapes: IntArray, cluster: Cluster) -> LongestSample:
    """How the sample of most tokens fits the memory of the cluster.

    Args:
        shapes: sizes of all samples, ``[n, axes]``.
        cluster: its sizes, memory and limits.
    """
    position = int(np.argmax(shapes.prod(axis=1)))
    request = cluster.request(np.asarray([position]), shapes[[position]])
    fits = []
    for p in common_sp_sizes(cluster.world, cluster.cost):
        found = settings_within(request, p, np.asarray(1), request.shapes)
        fits.append(
            Fit(
                sp_size=p,
                bytes=int(found.bytes[0]),
                recompute=tuple(found.recompute[0].tolist()),
                fits=bool(found.nanoseconds[0] < INFEASIBLE),
            )
        )
    return LongestSample(position=position, shape=tuple(shapes[position].tolist()), fits=tuple(fits))


def check_lengths(shapes: IntArray, cluster: Cluster) -> None:
    """Refuse a dataset with a sample that fits no group of the cluster, even alone.

    Args:
        shapes: sizes of all samples, ``[n, axes]``.
        cluster: its sizes, memory and limits.

    Raises:
        InfeasibleError: names the first such sample by its position, its length and the limit.
    """
    sizes = common_sp_sizes(cluster.world, cluster.cost)
    _check_padded(shapes, max(sizes))
    for start in range(0, len(shapes), _CHUNK):
        ids = np.arange(start, min(start + _CHUNK, len(shapes)))
        request = cluster.request(ids, shapes[ids])
        fits = np.zeros(len(ids), dtype=bool)
        for p in reversed(sizes):
            if not fits.all():
                fits |= settings_within(request, p, np.asarray(1), request.shapes).nanoseconds < INFEASIBLE
        if not fits.all():
            raise_infeasible(request, int(np.argmin(fits)), sizes)


def _check_padded(shapes: IntArray, sp_size: int) -> None:
    """Every group pads the first axis to a multiple of its size, and its tokens must still be counted."""
    padded = -(-shapes[:, 0] // sp_size) * sp_size
    tokens = shapes[:, 1:].prod(axis=1) * padded
    if (tokens > MAX_TOKENS).any():
        position = int(np.argmax(tokens > MAX_TOKENS))
        raise InfeasibleError(
            f"sample {position} of shape {tuple(shapes[position].tolist())} has {tokens[position]} tokens where "
            f"sp_size is {sp_size}; allowed are {MAX_TOKENS}. Leave such samples out"
        )
