"""The lengths of a dataset in terms of GPU time: what is long, what it costs, and what is paid for nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners import Balanced, Planner
from lightning_dcp.planners.grouped.bucket import Bucket
from lightning_dcp.simulate import (
    Cluster,
    LongestSample,
    Simulation,
    compare,
    for_dataset,
    longest_sample,
    own_work,
    tuned_static,
)
from lightning_dcp.simulate.run import check_shapes

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
"""Shares of the samples that are no longer than the quantile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile:
    """A length, and what one sample of it costs.

    Attributes:
        share: share of the samples that are no longer.
        tokens: the length; a length that occurs.
        milliseconds: GPU time that such a sample is trained for: its own work without padding, exchange, recompute.
        work_share: share of the GPU time of all samples that those no longer take.
    """

    share: float
    tokens: int
    milliseconds: float
    work_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What :func:`audit` found.

    Attributes:
        samples: number of samples.
        tokens: their tokens.
        quantiles: see :data:`QUANTILES`.
        longest_count: samples of the longest 1 %, at least one.
        longest_tokens: their share of all tokens.
        longest_pairs: their share of all attention pairs (tokens squared; with several axes the pairs along each).
        longest_work: their share of the GPU time.
        longest: the longest sample against the memory.
        planners: simulations of ``plain``, ``bucket`` and ``balanced`` on the same samples.
        steps: ``balanced`` with half and twice the samples in a step, by that number.
    """

    samples: int
    tokens: int
    quantiles: tuple[Quantile, ...]
    longest_count: int
    longest_tokens: float
    longest_pairs: float
    longest_work: float
    longest: LongestSample
    planners: tuple[Simulation, ...]
    steps: Mapping[int, Simulation]


def audit(
    shapes: IntArray,
    cluster: Cluster,
    *,
    global_batch_size: int,
    steps: int = 4,
    seed: int = 0,
    progress: bool = False,
) -> Audit:
    """Look at lengths as a cluster sees them.

    Args:
        shapes: sizes of the dataset's samples, ``[n]`` or ``[n, axes]``.
        cluster: what they are to run on.
        global_batch_size: ``N``.
        steps: ``K``; the planners are simulated on ``K * N`` samples.
        seed: seed of the permutation.
        progress: show progress bars on standard error.

    Raises:
        InfeasibleError: a sample fits no setting.
        ValueError: an argument is out of range.
    """
    table = check_shapes(shapes)
    tokens = np.asarray(table.prod(axis=1), dtype=np.int64)
    order = np.argsort(tokens, kind="stable")
    work = own_work(cluster.cost, table)
    count = -(-len(tokens) // 100)
    top = order[-count:]
    pairs = (table.astype(np.float64) * tokens[:, None]).sum(axis=1)

    def run(planners: Mapping[str, Planner], k: int, n: int) -> list[Simulation]:
        return compare(table, cluster, planners, steps=k, global_batch_size=n, seed=seed, progress=progress)

    plain = tuned_static(table, cluster, global_batch_size=global_batch_size, seed=seed, progress=progress)
    bucket = for_dataset(Bucket(), table)
    candidates: dict[str, Planner] = {"plain": plain, "bucket": bucket, "balanced": Balanced()}
    return Audit(
        samples=len(tokens),
        tokens=int(tokens.sum()),
        quantiles=_quantiles(tokens[order], work[order]),
        longest_count=count,
        longest_tokens=float(tokens[top].sum() / tokens.sum()),
        longest_pairs=float(pairs[top].sum() / pairs.sum()),
        longest_work=float(work[top].sum(dtype=np.float64) / work.sum(dtype=np.float64)),
        longest=longest_sample(table, cluster),
        planners=tuple(run(candidates, steps, global_batch_size)),
        steps=_other_steps(run, steps, global_batch_size),
    )


def _quantiles(tokens: IntArray, work: IntArray) -> tuple[Quantile, ...]:
    """Quantiles of samples in rising order."""
    summed = np.cumsum(work.astype(np.float64))
    positions = [max(-(-round(q * 1000) * len(tokens) // 1000), 1) - 1 for q in QUANTILES]
    return tuple(
        Quantile(
            share=share,
            tokens=int(tokens[position]),
            milliseconds=float(work[position] / 1e6),
            work_share=float(summed[position] / summed[-1]),
        )
        for share, position in zip(QUANTILES, positions, strict=True)
    )


def _other_steps(
    run: Callable[[Mapping[str, Planner], int, int], list[Simulation]], steps: int, batch_size: int
) -> dict[int, Simulation]:
    """Half and twice the samples in a step, on about the same samples."""
    pairs = ((2 * steps, batch_size // 2), (max(steps // 2, 1), 2 * batch_size))
    return {n: run({"balanced": Balanced()}, k, n)[0] for k, n in pairs if n}
