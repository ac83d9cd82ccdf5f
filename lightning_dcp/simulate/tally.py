"""What is added up over the steps of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.plan import IterationPlan

_KEYS = (
    "planner",
    "tokens_per_second",
    "seconds_per_step",
    "optimizer_steps",
    "idle_ratio",
    "padding_ratio",
    "gap",
    "planning_ms",
    "planning_ms_worst",
    "samples_dropped",
    "samples_repeated",
    "ratio_to_bucket",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One planner over the samples of a simulation.

    Attributes:
        planner: name of the planner.
        tokens_per_second: tokens of all samples over the seconds of all steps, over the whole cluster.
        seconds_per_step: mean of makespan and what ends a step.
        optimizer_steps: number of steps.
        idle_ratio: share of ``W * makespan``, over all steps, in which ranks wait.
        padding_ratio: share of all computed tokens that are padding.
        gap: mean over the steps of ``makespan / lower_bound - 1``; ``None`` where a step has no bound.
        planning_ms: median milliseconds of planning a step, on this machine.
        planning_ms_worst: those of the slowest step.
        samples_dropped: samples of the simulation that no plan holds, counted from the plans.
        samples_repeated: samples that plans hold more often than the simulation does.
        ratio_to_bucket: tokens per second over those of the planner ``bucket``; ``None`` where it did not run.
        useful_ratio: share of the paid time (``W`` times all seconds) that is the samples' own work
            (:meth:`CostModel.useful_time`): no idle time, padding, exchange, recompute, fixed costs or end of a step.
        work: rank-nanoseconds of the samples' own work.
        samples: samples in the plans.
        tokens: their tokens.
        seconds: seconds of all steps.
        peak_bytes: most memory that a micro-batch needs, per rank.
    """

    planner: str
    tokens_per_second: float
    seconds_per_step: float
    optimizer_steps: int
    idle_ratio: float
    padding_ratio: float
    gap: float | None
    planning_ms: float
    planning_ms_worst: float
    samples_dropped: int
    samples_repeated: int
    ratio_to_bucket: float | None = None
    useful_ratio: float
    work: int
    samples: int
    tokens: int
    seconds: float
    peak_bytes: int

    def as_json(self) -> dict[str, Any]:
        """The documented keys of ``lightning-dcp simulate --json``, in their order."""
        return {name: getattr(self, name) for name in _KEYS}

    def against(self, bucket: Simulation | None) -> Simulation:
        """The same with :attr:`ratio_to_bucket` filled in."""
        ratio = self.tokens_per_second / bucket.tokens_per_second if bucket else None
        return replace(self, ratio_to_bucket=ratio)


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over the steps; nanoseconds are Python integers, which do not wrap.

    Attributes:
        counts: how often each sample of the dataset should be trained, int64 ``[size]``.
        sync_time: nanoseconds of what ends every step.
    """

    counts: IntArray
    sync_time: int
    trained: IntArray = field(init=False)
    planning: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    makespans: int = 0
    paid: int = 0
    worked: int = 0
    useful: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self.trained = np.zeros(len(self.counts), dtype=np.int64)

    def add(self, plan: IterationPlan, sample_ids: IntArray, useful: int, planning_seconds: float) -> None:
        """Count one step.

        Args:
            plan: the step.
            sample_ids: those of its micro-batches, in any order.
            useful: rank-nanoseconds of the samples' own work.
            planning_seconds: how long the planning took.
        """
        self.planning.append(planning_seconds)
        self.useful += useful
        self.gaps.append(plan.gap)
        self.makespans += plan.world_size * plan.makespan
        self.paid += plan.world_size * (plan.makespan + self.sync_time)
        for m in plan.micro_batches:
            self.worked += m.nanoseconds * m.sp_size
            self.tokens += m.num_tokens
            self.padded_tokens += m.padded_tokens
            self.peak_bytes = max(self.peak_bytes, m.bytes)
        np.add.at(self.trained, sample_ids % len(self.counts), 1)

    def result(self, label: str, world_size: int) -> Simulation:
        """The ratios over all steps.

        Raises:
            ValueError: nothing was trained.
        """
        steps, seconds = len(self.planning), self.paid / world_size / 1e9
        if not self.tokens or not seconds:
            raise ValueError(
                f"planner {label} trained nothing in {steps} steps that last {seconds} s; there is no throughput"
            )
        difference = self.counts - self.trained
        return Simulation(
            planner=label,
            tokens_per_second=self.tokens / seconds,
            seconds_per_step=seconds / steps,
            optimizer_steps=steps,
            idle_ratio=1.0 - self.worked / self.makespans if self.makespans else 0.0,
            padding_ratio=1.0 - self.tokens / self.padded_tokens,
            gap=sum(self.gaps) / steps if np.isfinite(self.gaps).all() else None,
            planning_ms=1e3 * median(self.planning),
            planning_ms_worst=1e3 * max(self.planning),
            samples_dropped=int(np.maximum(difference, 0).sum()),
            samples_repeated=int(np.maximum(-difference, 0).sum()),
            useful_ratio=self.useful / self.paid,
            work=self.useful,
            samples=int(self.trained.sum()),
            tokens=self.tokens,
            seconds=seconds,
            peak_bytes=self.peak_bytes,
        )
