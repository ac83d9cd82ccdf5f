"""Plain data parallel with padding, as well tuned as it can be: what most people run today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_dcp.cost import IntArray
from lightning_dcp.planners import InfeasibleError, Static
from lightning_dcp.simulate.cluster import Cluster
from lightning_dcp.simulate.needs import longest_sample
from lightning_dcp.simulate.run import simulate

_SAMPLES, _STEPS = 2048, 8
"""Samples on which the settings are compared, in whole steps, and most steps."""


def tuned_static(
    shapes: IntArray, cluster: Cluster, *, global_batch_size: int, seed: int = 0, progress: bool = False
) -> Static:
    """The fixed setting of most tokens per second: one ``p`` for all, one ``b``, samples dealt in their order.

    Every ``p`` that holds the longest sample is tried, with batch sizes of powers of two as long as they gain, on the
    simulation's first 2,048 samples, in at most eight whole steps. A micro-batch over the memory is run in halves.

    Args:
        shapes: sizes of all samples, ``[n, axes]``.
        cluster: what it runs on; samples are padded also where it allows packing.
        global_batch_size: ``N``.
        seed: seed of the permutation.
        progress: show progress bars on standard error.

    Raises:
        InfeasibleError: the longest sample fits no ``p``.
    """
    padded = replace(cluster, limits=replace(cluster.limits, packing=False))
    longest = longest_sample(shapes, padded)

    def speed(planner: Static) -> float:
        result = simulate(
            shapes,
            padded,
            planner,
            steps=min(-(-_SAMPLES // global_batch_size), _STEPS),
            global_batch_size=global_batch_size,
            seed=seed,
            progress=progress,
        )
        return result.tokens_per_second

    most = global_batch_size / cluster.world.world_size
    found = [_best_batch_size(fit.sp_size, most * fit.sp_size, speed) for fit in longest.fits if fit.fits]
    if not found:
        raise InfeasibleError(
            f"sample {longest.position} of shape {longest.shape} fits none of the sequence-parallel sizes "
            f"{tuple(fit.sp_size for fit in longest.fits)}"
        )
    return max(found, key=lambda pair: pair[0])[1]


def _best_batch_size(sp_size: int, most: float, speed: Callable[[Static], float]) -> tuple[float, Static]:
    """Tokens per second and setting of the best batch size up to what a group gets of a step."""
    planner = Static(sp_size=sp_size, batch_size=1, deal="in_order")
    best = speed(planner), planner
    while 2 * best[1].batch_size <= most:
        planner = replace(planner, batch_size=2 * best[1].batch_size)
        found = speed(planner)
        if found <= best[0]:
            break
        best = found, planner
    return best
