"""Drawn steps train for real: the updates are those of one process on the samples that each step drew."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dcp.callback import DCPCallback
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import Balanced, Planner, Static
from lightning_dcp.planners.floating import Floating
from lightning_dcp.planners.grouped import Bucket, DCPInter, DCPIntra, PackedBaseline
from tests.drawing_tools import Alternate
from tests.fitting import (
    Case,
    Data,
    Module,
    Result,
    assert_same_updates,
    fit_single,
    make_strategy,
    make_trainer,
    weights_of,
)
from tests.pool import Pool, RemoteError

Trained = tuple[list[list[int]], list[str]]

CASE = Case(samples=26, batch=None, steps=8, seed=3)  # type: ignore[arg-type]
MEMORY = "1250KB"
"""So little that long samples need several ranks or recomputed layers."""


def planners() -> list[Planner]:
    drawing: list[Planner] = [Bucket(window=20), DCPInter(window=20), DCPIntra(window=20), Alternate(9, most=4)]
    return [*drawing, Floating(min_samples=3, max_samples=6)]


def _fit(case: Case, planner: Planner, **settings: Any) -> tuple[Result, list[dict[str, float]], dict[str, Any]]:
    module, callback = Module(case), DCPCallback()
    start = weights_of(module)
    strategy = make_strategy(case, planner=planner, **{"memory_limit": MEMORY, **settings})
    trainer = make_trainer(strategy, case, devices=case.world_size, callbacks=[callback])
    trainer.fit(module, datamodule=Data(case))
    plans = [record.plan.to_json() for record in callback.records]
    result = Result(start=start, weights=weights_of(module), losses=module.losses, plans=plans)
    counters = {"samples": strategy.consumed_samples, "tokens": strategy.consumed_tokens}
    return (
        result,
        callback.metrics,
        {**counters, "logged": {k: float(v) for k, v in trainer.logged_metrics.items()}},
    )


def _fit_all(case: Case) -> list[tuple[Result, list[dict[str, float]], dict[str, Any]]]:
    return [_fit(case, planner) for planner in planners()]


@pytest.mark.parametrize("world_size", [2, 4])
def test_updates_equal_those_of_one_process(pool: Pool, world_size: int) -> None:
    case = replace(CASE, world_size=world_size)
    everyone = pool.run(_fit_all, world_size, case, timeout=170.0)
    for index, planner in enumerate(planners()):
        results = [rank[index] for rank in everyone]
        first, metrics, facts = results[0]
        for other, others_metrics, others_facts in results[1:]:
            assert other.plans == first.plans
            assert other.losses == first.losses
            assert all(torch.equal(value, first.weights[name]) for name, value in other.weights.items())
            assert [m["stray"] for m in others_metrics] == [m["stray"] for m in metrics]
            assert others_facts["samples"] == facts["samples"]
        expected = fit_single(case, first.plans)
        assert first.losses == pytest.approx(expected.losses, rel=1e-5)
        assert_same_updates(first, expected)
        plans = [IterationPlan.from_json(text) for text in first.plans]
        _check_content(planner, plans, metrics, facts)


def _check_content(
    planner: Planner, plans: list[IterationPlan], metrics: list[dict[str, float]], facts: dict[str, Any]
) -> None:
    """The plans are mixed, no sample came twice in an epoch, and what was logged is what was trained."""
    rows = [m for plan in plans for m in plan.micro_batches]
    assert {m.sp_size for m in rows} >= ({2} if isinstance(planner, Bucket) else {1, 2})
    assert any(any(m.recompute) for m in rows)
    trained = [i for plan in plans for m in plan.micro_batches for i in m.sample_ids]
    assert len(plans) == CASE.steps
    epochs = [trained[k : k + CASE.samples] for k in range(0, len(trained), CASE.samples)]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    assert facts["samples"] == len(trained)
    assert facts["tokens"] == sum(plan.num_tokens for plan in plans)
    assert facts["logged"]["dcp/stray"] == metrics[-1]["stray"]
    assert facts["logged"]["dcp/stray_max"] == metrics[-1]["stray_max"]
    assert all(0 <= m["stray"] <= m["stray_max"] < CASE.samples for m in metrics)
    if isinstance(planner, Floating):
        assert {m["stray"] for m in metrics} == {0.0}
    if isinstance(planner, Bucket | DCPInter | DCPIntra):
        assert max(m["stray"] for m in metrics) > 0
    if isinstance(planner, Alternate):
        # [0 2 4 6] of the order are trained as 0 1 2 3.
        assert (metrics[0]["stray"], metrics[0]["stray_max"]) == (1.5, 3.0)


RESUMED = replace(CASE, world_size=2, samples=14, steps=-1, lr=0.05, masked="none")


def _resumed(folder: str, planner: Planner, step: int | None, size: int | None = None) -> Trained:
    """Samples of the trained steps, and what was said about steps that change."""
    case = replace(RESUMED, batch=size)  # type: ignore[arg-type]
    module, callback = Module(case), DCPCallback()
    kept = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = make_trainer(
        make_strategy(case, planner=planner, memory_limit=MEMORY),
        case,
        devices=2,
        max_epochs=2,
        callbacks=[callback, *([kept] if step is None else [])],
        enable_checkpointing=step is None,
    )
    path = None if step is None else str(Path(folder, f"step={step}.ckpt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=Data(case), ckpt_path=path)
    said = [str(w.message) for w in caught if "the rest of the epoch is trained" in str(w.message)]
    return [[i for m in record.plan.micro_batches for i in m.sample_ids] for record in callback.records], said


def _stop_and_go(folder: str) -> dict[str, Trained]:
    found = {"whole": _resumed(folder, DCPInter(window=6), None)}
    for step in (1, 4):
        found[f"same {step}"] = _resumed(folder, DCPInter(window=6), step)
    found["other 4"] = _resumed(folder, Floating(min_samples=2, max_samples=4), 4)
    found["fixed 4"] = _resumed(folder, "balanced", 4, size=3)  # type: ignore[arg-type]
    return found


def test_a_run_resumes_with_the_same_steps_or_another_planner(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(_stop_and_go, 2, str(tmp_path), timeout=170.0)[0]
    whole = found["whole"][0]
    assert sorted(i for ids in whole for i in ids) == sorted([*range(RESUMED.samples)] * 2)
    for name, (steps, said) in found.items():
        done = whole[: int(name.split()[1])] if " " in name else []
        trained = [i for ids in [*done, *steps] for i in ids]
        for epoch in (trained[: RESUMED.samples], trained[RESUMED.samples :]):
            assert sorted(epoch) == list(range(RESUMED.samples)), name
        if name.startswith("same"):
            assert steps == whole[len(done) :], name
            assert said == []
        if name.startswith("other"):
            assert len(said) == 1
            assert 'planner "floating" draws the samples of each step by settings, profile' in said[0]
        if name.startswith("fixed"):
            assert {text[:62] for text in said} == {
                "The steps of the saved run were drawn by the planner, those of"
            }


def test_the_packed_baseline_is_refused_at_once() -> None:
    from lightning_dcp.strategy import DCPStrategy

    for planner in (PackedBaseline(), "packed"):
        with pytest.raises(ValueError, match=r'planner "packed" puts several samples into one row.*simulated'):
            DCPStrategy(planner=planner)


def test_lockstep_is_refused_at_once() -> None:
    from lightning_dcp.strategy import DCPStrategy

    with pytest.raises(ValueError, match=r"plans in lockstep, for engines that communicate in every micro-batch"):
        DCPStrategy(planner=Balanced(lockstep=True))


class Rows:
    """Its micro-batches are packed rows of one sample."""

    name, draws, lockstep = "rows", False, False

    def plan(self, request: Any) -> IterationPlan:
        plan = Static().plan(request)
        return replace(plan, micro_batches=tuple(replace(m, packed=True) for m in plan.micro_batches))


def _rows() -> None:
    _fit(replace(CASE, world_size=2, batch=4), Rows(), memory_limit=0.9)


def test_packed_plans_are_refused_before_the_first_step(pool: Pool) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(_rows, 2, timeout=100.0)
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert "a packed row of several samples; such plans can be made and simulated but not trained yet" in text


class Slow:
    """Gives all samples of a step to rank 0."""

    name, draws, lockstep = "slow", False, False

    def __init__(self, bounded: bool) -> None:
        self.bounded = bounded

    def plan(self, request: Any) -> IterationPlan:
        from lightning_dcp.planners import lower_bound
        from lightning_dcp.planners.assembly import Placement, assemble

        alone = [Placement((i,), 0, 1) for i in range(len(request.sample_ids))]
        return assemble(request, alone, lower_bound(request) if self.bounded else 0)


def _explained(steps: int, bounded: bool) -> tuple[list[str], list[str]]:
    case = Case(world_size=2, samples=32, batch=8, steps=steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, callback = Module(case), DCPCallback()
        trainer = make_trainer(make_strategy(case, planner=Slow(bounded)), case, devices=2, callbacks=[callback])
        trainer.fit(module, datamodule=Data(case))
    texts = [str(w.message) for w in caught if "longer than their lower bound" in str(w.message)]
    assert all(m["stray"] == m["stray_max"] == 0.0 for m in callback.metrics)
    return texts, [json.dumps(metrics, allow_nan=False) for metrics in callback.metrics]


def _explained_all() -> list[tuple[list[str], list[str]]]:
    return [_explained(21, True), _explained(2, False)]


def test_a_gap_that_stays_is_explained(pool: Pool) -> None:
    """On rank 0, at the end of a window of 20 steps; a plan without a bound has no gap to log."""
    everyone = pool.run(_explained_all, 2, timeout=170.0)
    (texts, logged), (unbounded, bare) = everyone[0]
    assert len(texts) == 1
    assert "In the worst of them: too few samples in a step: 8 samples on 2 ranks" in texts[0]
    assert all('"gap"' in text for text in logged)
    assert unbounded == []
    assert not any('"gap"' in text for text in bare)
    assert everyone[1][0][0] == [], "one rank says it"
