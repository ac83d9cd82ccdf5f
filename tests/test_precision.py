"""bf16: as near to a float32 run as a bf16 single process is, also over many micro-batches."""

from __future__ import annotations

import pytest
import torch

from lightning_dcp.plan import IterationPlan, MicroBatch
from lightning_dcp.planners.protocol import PlanRequest
from tests.fitting import Case, Data, Module, Result, fit_single, make_strategy, make_trainer, weights_of
from tests.pool import Pool

RANKS = 2


class FixedCount:
    """``g`` micro-batches of equal size on each rank."""

    name, draws, lockstep = "fixed-count", False, False

    def __init__(self, count: int) -> None:
        self.count = count

    def plan(self, request: PlanRequest) -> IterationPlan:
        size = len(request.ids) // (RANKS * self.count)
        rows = []
        for index in range(RANKS * self.count):
            part = slice(index * size, (index + 1) * size)
            longest = max(shape[0] for shape in request.sizes[part])
            rows.append(
                MicroBatch(
                    sample_ids=request.ids[part],
                    shapes=request.sizes[part],
                    padded_shape=(longest,),
                    first_rank=index % RANKS,
                    sp_size=1,
                    recompute=(0,),
                    nanoseconds=1,
                    bytes=1,
                )
            )
        return IterationPlan(world_size=RANKS, micro_batches=tuple(rows))


def _fit(case: Case, count: int) -> Result:
    module = Module(case)
    start = weights_of(module)
    trainer = make_trainer(make_strategy(case, planner=FixedCount(count)), case, devices=RANKS)
    trainer.fit(module, datamodule=Data(case))
    plans = [trainer.strategy.plan.to_json()]  # type: ignore[attr-defined]
    return Result(start=start, weights=weights_of(module), losses=module.losses, plans=plans)


def _distance(a: Result, b: Result) -> float:
    squares = [(a.weights[n].float() - b.weights[n].float()).square().sum() for n in b.weights]
    return float(torch.stack(squares).sum().sqrt())


@pytest.mark.feature(
    "Trainer", '`precision="bf16-true"`, `"bf16-mixed"`', "as near to float32 as a single process in bf16"
)
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16_is_as_near_to_float32_as_a_single_process(pool: Pool, precision: str) -> None:
    case = Case(world_size=RANKS, precision=precision, steps=1, samples=32, batch=32, masked="none", lr=2.0)
    runs = {count: pool.run(_fit, RANKS, case, count, timeout=120.0)[0] for count in (1, 16)}
    exact = fit_single(case, runs[1].plans, precision="32-true")
    # DeepSpeed keeps bf16 weights under bf16-mixed too (with float32 masters), so bf16-true is the like for both.
    single = _distance(fit_single(case, runs[1].plans, precision="bf16-true"), exact)
    moved = _distance(Result(start={}, weights=exact.start, losses=[], plans=[]), exact)
    assert moved > 5 * single, "the run is too short for its distance to mean anything"
    for count, run in runs.items():
        assert _distance(run, exact) <= 1.5 * single, f"g = {count}"
