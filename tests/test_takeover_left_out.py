"""Samples that fit no setting: found before the first step, by name; and steps that are too small for their ranks."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dcp.cost import INFEASIBLE, CostModel
from lightning_dcp.data.feeding import Planned, tasks
from lightning_dcp.data.leaving import LEFT_OUT_FILE, misfits, write_left_out
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.planning import PlanningContext
from lightning_dcp.planners import InfeasibleError, create
from lightning_dcp.planners.protocol import Limits, PlanRequest
from lightning_dcp.topology import World
from tests.checkpointing import keeper
from tests.data_tools import Tokens as Sized
from tests.data_tools import TokensModule
from tests.fitting import LAYERS, Case, Data, Module, Samples, assert_same_updates, formula_profile, make_strategy
from tests.pool import Pool
from tests.takeover_tools import fit_alone, fit_taken, ids_of

CASE = Case(world_size=2, samples=20, batch=8, steps=-1, seed=4, lr=0.2)
SIZES = Samples(CASE).lengths.reshape(-1, 1).astype(np.int64)


def _context(memory: int, ranks: int = 2, planner: str = "balanced") -> PlanningContext:
    return PlanningContext(
        rank=0,
        planner=create(planner),
        cost=CostModel(formula_profile(ranks, (LAYERS,))),
        world=World.build(ranks, [p for p in (1, 2, 4) if ranks % p == 0]),
        limits=Limits(memory_bytes=memory),
    )


def _memory(tokens: int, ranks: int = 2) -> int:
    """What a sample of so many tokens needs at the most ranks with all layers recomputed."""
    cost = CostModel(formula_profile(ranks, (LAYERS,)))
    return int(cost.settings(ranks, np.asarray(1), np.asarray(tokens), 0).bytes)


MEMORY = _memory(28)
UNFIT = [i for i, size in enumerate(SIZES[:, 0]) if -(-size // 2) * 2 > 28]


@pytest.mark.parametrize("planner", ["balanced", "static", "bucket", "dcp-intra"])
def test_what_is_found_is_what_the_planner_could_not_plan(planner: str) -> None:
    for tokens in (6, 15, 28, 99):
        context = _context(_memory(tokens), planner=planner)
        found = misfits(context, SIZES).tolist()
        for sample in range(len(SIZES)):
            request = PlanRequest(
                sample_ids=[0],
                shapes=SIZES[[sample]],
                cost=context.cost,
                world=context.world,
                limits=context.limits,
            )
            if sample in found:
                with pytest.raises(InfeasibleError):
                    context.planner.plan(request)
            else:
                assert context.planner.plan(request).num_samples == 1
    assert misfits(_context(MEMORY), SIZES).tolist() == UNFIT
    assert 0 < len(UNFIT) < len(SIZES)


def test_they_are_refused_when_the_planner_is_bound() -> None:
    loader = TokensModule(Sized(SIZES[:, 0].tolist()), global_batch_size=8).train_dataloader()
    longest = int(SIZES[:, 0].argmax())
    sentence = (
        rf"{len(UNFIT)} of 20 samples fit no setting; the longest are sample {longest} of {SIZES.max()} tokens.*"
        rf"the limit is {MEMORY} bytes.*higher memory_limit.*too_long=\"leave_out\""
    )
    with pytest.raises(InfeasibleError, match=sentence):
        loader.bind(_context(MEMORY))
    assert loader.refused_ids.tolist() == []
    with pytest.raises(ValueError, match='too_long is "drop"|too_long is \'drop\'; allowed are "raise" and'):
        TokensModule(Sized([1]), global_batch_size=1, too_long="drop")


def test_all_samples_too_long() -> None:
    loader = TokensModule(Sized([30, 31]), global_batch_size=8, too_long="leave_out").train_dataloader()
    with pytest.raises(ValueError, match="all 2 samples of the dataset are left out"):
        loader.bind(_context(MEMORY))


def test_the_list_appears_whole_and_again(tmp_path: Path) -> None:
    for samples in ([3, 5], [5]):
        path = write_left_out(tmp_path / "new", SIZES, np.asarray(samples))
        assert path is not None
        content = json.loads(path.read_text())
        assert content == {
            "samples_of_dataset": 20,
            "left_out": [{"index": i, "size": SIZES[i].tolist()} for i in samples],
        }
        assert [p.name for p in path.parent.iterdir()] == [LEFT_OUT_FILE]
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be listed"):
        assert write_left_out(tmp_path / "file", SIZES, np.asarray([1])) is None


class Scheduled(Module):
    """Asks for the number of steps before it is known what is left out."""

    def configure_optimizers(self) -> Any:
        self.asked = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()

    def on_train_epoch_end(self) -> None:
        loader: Any = self.trainer.strategy._loader  # type: ignore[attr-defined]
        counts = loader.counts()
        assert (counts.planned, counts.trained, counts.left, counts.left_out) == (
            20 - len(UNFIT), 20 - len(UNFIT), 0, len(UNFIT),
        )  # fmt: skip


def _fit(folder: str, tokens: int = 28, resume: str | None = None) -> Any:
    case = replace(CASE, batch=4)
    strategy = make_strategy(case, planner="balanced", memory_limit=f"{_memory(tokens)}B")
    fresh: dict[str, Any] = {"callbacks": [keeper(folder)], "enable_checkpointing": True}
    return fit_taken(
        case,
        None,
        Scheduled if resume is None else Module,
        strategy,
        datamodule=Data(case, too_long="leave_out"),
        max_epochs=2,
        default_root_dir=folder,
        ckpt_path=resume,
        **(fresh if resume is None else {}),
    )


@pytest.mark.feature("Data", "samples that fit no setting", '`DCPDataModule(too_long="leave_out")`, else an error')
def test_left_out_samples_are_in_no_step_of_a_fit(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(_fit, 2, str(tmp_path), timeout=120.0)[0]
    steps = ids_of(whole.plans)
    kept = sorted(set(range(20)) - set(UNFIT))
    half = -(-len(kept) // 4)
    assert len(steps) == 2 * half
    for epoch in range(2):
        assert sorted(i for step in steps[epoch * half : (epoch + 1) * half] for i in step) == kept
    listed = json.loads((tmp_path / LEFT_OUT_FILE).read_text())["left_out"]
    assert [row["index"] for row in listed] == UNFIT
    assert_same_updates(whole, fit_alone(CASE, Samples(CASE), steps, max_epochs=1, max_steps=-1))

    same = pool.run(_fit, 2, str(tmp_path), 28, str(tmp_path / "step=1.ckpt"), timeout=120.0)[0]
    assert ids_of(same.plans) == steps[1:]
    assert all(torch.equal(same.weights[n], whole.weights[n]) for n in whole.weights)
    more = pool.run(_fit, 2, str(tmp_path), 99, str(tmp_path / "step=1.ckpt"), timeout=120.0)[0]
    rest = ids_of(more.plans)
    assert sorted(i for step in rest[:-5] for i in step) == sorted(set(range(20)) - set(steps[0]))
    assert sorted(i for step in rest[-5:] for i in step) == list(range(20))


@pytest.mark.parametrize("planner", ["balanced", "static", "floating", "bucket", "dcp-inter", "dcp-intra"])
def test_every_number_of_samples_is_planned_or_refused_before_the_first_step(planner: str) -> None:
    """radixark/miles#2197: an infeasible schedule fails in setup, or is none."""
    generator = np.random.default_rng(0)
    for count in range(1, 21):
        for batch in (1, 3, 8):
            data = TokensModule(Sized(generator.integers(1, 34, size=count).tolist()), global_batch_size=batch)
            loader = data.train_dataloader()
            assert isinstance(loader, DCPLoader)
            loader.bind(_context(2**40, ranks=4, planner=planner))
            planned: deque[Planned] = deque()
            for _ in tasks(loader._bound(), loader.sampler, loader.shapes, planned):
                pass
            assert [item.error for item in planned if item.error is not None] == []
            ids = [i for item in planned if item.plan is not None for i in item.plan.sample_ids]
            assert sorted(ids) == list(range(count))


def test_infeasible_is_what_the_cost_model_calls_so() -> None:
    cost = CostModel(formula_profile(2, (LAYERS,)))
    for tokens, fits in ((28, True), (30, False)):
        found = cost.settings(2, np.asarray(1), np.asarray(tokens), MEMORY)
        assert (int(found.nanoseconds) < INFEASIBLE) is fits
