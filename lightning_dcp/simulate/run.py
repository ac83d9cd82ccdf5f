"""One planner over the samples of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_dcp.cost import IntArray
from lightning_dcp.interpolation import MAX_TOKENS
from lightning_dcp.lengths.progress import DELAY
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import Planner
from lightning_dcp.planners.protocol import DrawingPlanner
from lightning_dcp.simulate.cluster import Cluster
from lightning_dcp.simulate.price import own_work
from lightning_dcp.simulate.stream import Stream, Window
from lightning_dcp.simulate.tally import Simulation, Tally

OnStep = Callable[[int, IterationPlan], Any]
"""Called with each step's number and plan."""

MAX_SAMPLES, MAX_STEP_SAMPLES = 2**40, 2**24
"""Most samples of a simulation, and of a step: all of a step are looked at together."""


def simulate(
    shapes: IntArray,
    cluster: Cluster,
    planner: Planner,
    *,
    steps: int,
    global_batch_size: int,
    seed: int = 0,
    on_step: OnStep | None = None,
    progress: bool = False,
) -> Simulation:
    """Let a planner plan the first ``steps * global_batch_size`` samples of the permutation.

    They are the same samples for every planner. A planner of given samples gets ``steps`` steps of
    ``global_batch_size``; one that draws is offered as many of them as it wants to see and cuts its own steps until
    they are used up. Where the dataset has fewer, its further epochs follow. A step lasts its makespan and the
    profile's ``sync_time``.

    Args:
        shapes: sizes of the dataset's samples, integers from 1, ``[n]`` or ``[n, axes]``.
        cluster: what it runs on.
        planner: see :func:`lightning_dcp.planners.create`.
        steps: ``K``.
        global_batch_size: ``N``.
        seed: seed of the permutation, as ``DCPDataModule(seed=...)``.
        on_step: called after each step. Ids of epoch ``e`` are ``e * n`` above the positions in the dataset.
        progress: show a progress bar on standard error.

    Raises:
        InfeasibleError: a sample fits no setting of the planner.
        ValueError: an argument is out of range, or a plan holds other samples or sizes than the dataset, other ranks
            than the cluster, or more memory than the limit.
    """
    table = check_shapes(shapes)
    if min(steps, global_batch_size) < 1:
        raise ValueError(f"steps={steps}, global_batch_size={global_batch_size}: each must be at least 1")
    if global_batch_size > MAX_STEP_SAMPLES or steps * global_batch_size > MAX_SAMPLES:
        raise ValueError(
            f"steps={steps}, global_batch_size={global_batch_size}; allowed are up to {MAX_STEP_SAMPLES} samples in a "
            f"step and {MAX_SAMPLES} in all"
        )
    stream = Stream(len(table), steps * global_batch_size, seed)
    tally = Tally(counts=stream.counts(), sync_time=cluster.cost.profile.sync_time)
    window = Window(stream, _width(planner, cluster, global_batch_size))
    bar = tqdm(
        total=stream.total, desc=planner.name, unit="sample", leave=False, delay=DELAY, disable=not progress
    )
    with bar:
        while len(offered := window.offer()):
            request = cluster.request(offered, table[offered % len(table)])
            start = perf_counter()
            plan = planner.plan(request)
            seconds = perf_counter() - start
            trained = _samples_of(plan, table, cluster, planner.name)
            advanced = window.remove(trained) if planner.draws else window.clear()
            if advanced or len(trained):
                useful = sum(own_work(cluster.cost, table[trained % len(table)]).tolist())
                tally.add(plan, trained, useful, seconds)
                if on_step is not None:
                    on_step(len(tally.planning) - 1, plan)
                bar.update(len(trained))
            if not advanced:
                # It took none of what it was offered and would do so again: what is left counts as dropped.
                break
    return tally.result(planner.name, cluster.world.world_size)


def check_shapes(shapes: Any) -> IntArray:
    """Sizes of samples as int64 ``[n, axes]``.

    Raises:
        ValueError: no sample, or a size that is no integer from 1.
    """
    table = np.asarray(shapes)
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not table.size or table.dtype.kind not in "iu":
        raise ValueError(
            f"the lengths are an array of shape {np.shape(shapes)} and type {table.dtype}; they must be integers, one "
            "number or one row for each of at least one sample"
        )
    wrong = (table < 1).any(axis=1) | (table.astype(np.float64).prod(axis=1) > MAX_TOKENS)
    if wrong.any():
        position = int(np.argmax(wrong))
        raise ValueError(
            f"sample {position} has the size {tuple(table[position].tolist())}; allowed are integers from 1 and up to "
            f"{MAX_TOKENS} tokens"
        )
    return table.astype(np.int64, copy=False)


def _width(planner: Planner, cluster: Cluster, global_batch_size: int) -> int:
    """Samples that a planner is offered at once."""
    if not planner.draws:
        return global_batch_size
    width = planner.lookahead(cluster.world) if isinstance(planner, DrawingPlanner) else 0
    if width < 1:
        raise ValueError(
            f"planner {planner.name} draws, and its lookahead is {width}; it must want to see at least one sample"
        )
    return width


def _samples_of(plan: IterationPlan, table: IntArray, cluster: Cluster, name: str) -> IntArray:
    """Ids in a plan, after a check that it is a plan of this dataset on this cluster."""
    ids = np.asarray(plan.sample_ids, dtype=np.int64)
    sizes = np.asarray([s for m in plan.micro_batches for s in m.shapes], dtype=np.int64)
    if plan.world_size != cluster.world.world_size:
        raise ValueError(
            f"planner {name} gave a plan for {plan.world_size} ranks; the cluster has {cluster.world.world_size}"
        )
    if len(ids) and not np.array_equal(sizes, table[ids % len(table)]):
        raise ValueError(f"planner {name} gave a plan with other sizes than those of its samples")
    peak = max((m.bytes for m in plan.micro_batches), default=0)
    if peak > cluster.limits.memory_bytes:
        raise ValueError(
            f"planner {name} gave a plan that needs {peak} bytes per rank; the limit is {cluster.limits.memory_bytes}"
        )
    return ids
