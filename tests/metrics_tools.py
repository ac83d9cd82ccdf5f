"""Forced plans and a clock that stands still, for tests of what is logged."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl

from lightning_dcp.callback import DCPCallback
from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.protocol import PlanRequest
from tests.fitting import Case, Data, Module, make_strategy, make_trainer


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Pairs of samples, padded beyond need, on groups of ``p``; the last group of several stays empty."""

    sp_size: int = 1
    recompute: tuple[int, ...] = (0,)
    name: str = "layout"
    draws: bool = False
    lockstep: bool = False

    def plan(self, request: PlanRequest) -> IterationPlan:
        world, p = request.world.world_size, self.sp_size
        firsts = list(range(0, world, p))[: max(1, world // p - 1)]
        rows = list(zip(request.ids, request.sizes, strict=True))
        pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
        return IterationPlan(
            world_size=world,
            micro_batches=tuple(
                MicroBatch(
                    sample_ids=tuple(i for i, _ in pair),
                    shapes=tuple(shape for _, shape in pair),
                    padded_shape=((max(shape[0] for _, shape in pair) // p + 1) * p,),
                    first_rank=firsts[k % len(firsts)],
                    sp_size=p,
                    # Only some of the groups recompute.
                    recompute=(self.recompute[k % len(self.recompute)],),
                    nanoseconds=1000 + k,
                    bytes=10_000 + k,
                )
                for k, pair in enumerate(pairs)
            ),
        )


class Ticks(pl.Callback):
    """The callback's clock: it moves by one more second in each step, and not otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.now += trainer.global_step

    def __enter__(self) -> Ticks:
        self._names = vars(importlib.import_module("lightning_dcp.callback.callback"))
        self._before = self._names["time"]
        self._names["time"] = SimpleNamespace(perf_counter=lambda: self.now)
        return self

    def __exit__(self, *args: object) -> None:
        self._names["time"] = self._before


def fit_logged(case: Case, layout: Layout, dcp: DCPCallback | None = None, **kwargs: Any) -> dict[str, Any]:
    """Train under a forced plan with the clock of :class:`Ticks`; what was logged in each step, and more."""
    dcp = dcp or DCPCallback(window=2, peak_flops=1e9)
    seen: list[dict[str, float]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            seen.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    with Ticks() as ticks:
        settings = {"callbacks": [ticks, dcp, Watch()], "devices": case.world_size, **kwargs}
        trainer = make_trainer(make_strategy(case, planner=layout), case, **settings)
        trainer.fit(Module(case), datamodule=Data(case))
    strategy: Any = trainer.strategy
    return {
        "logged": seen,
        "metrics": dcp.metrics,
        "plans": [record.plan.to_json() for record in dcp.records],
        "losses": [record.loss for record in dcp.records],
        "receipts": dcp.receipts,
        "waterfall": dcp.waterfall(),
        "static": strategy.profile.static_bytes,
        "consumed": (dcp.metrics[-1]["consumed_samples"], dcp.metrics[-1]["consumed_tokens"]),
    }
