"""Drawn steps under a real Trainer: whole epochs, resume at every place, schedules, and DCPStrategy itself."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dcp.data import DCPLoader
from tests.data_tools import LENGTHS, BindingStrategy, Recorder, Tokens, TokensModule, context, trainer
from tests.drawing_tools import Drawing
from tests.fitting import Case, Data, Module, make_strategy, make_trainer
from tests.pool import Pool

EPOCHS = 3
KEPT: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}


class DrawingStrategy(BindingStrategy):
    """Binds a planner that draws."""

    def __init__(self, restore_late: bool = False, planner: Any = None) -> None:
        super().__init__(restore_late)
        self.planner = planner or Drawing()

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, DCPLoader):
            dataloader.bind(context(planner=self.planner))
        return dataloader


def _fit(folder: Path, **arguments: Any) -> Recorder:
    model = Recorder()
    ckpt_path, workers = arguments.pop("ckpt_path", None), arguments.pop("num_workers", 0)
    module = TokensModule(Tokens(LENGTHS), num_workers=workers, **arguments.pop("size", {}))
    settings: dict[str, Any] = {"max_epochs": EPOCHS, "strategy": DrawingStrategy(), **arguments}
    trainer(folder, **settings).fit(model, datamodule=module, ckpt_path=ckpt_path)
    return model


def _once(steps: list[list[int]]) -> bool:
    return sorted(chain(*steps)) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_epoch_runs_to_its_end(tmp_path: Path, num_workers: int) -> None:
    """Lightning-AI/pytorch-lightning#18023: no epoch is cut short to the number of steps of the first."""
    model = _fit(tmp_path, max_epochs=6, num_workers=num_workers, strategy=DrawingStrategy(planner=Varied()))
    found = model.epochs()
    assert sorted(found) == list(range(6))
    assert all(_once(steps) for steps in found.values())
    counts = [len(steps) for steps in found.values()]
    assert counts[0] < max(counts), "guards the assertions above: numbers of steps differ between epochs"


class Varied(Drawing):
    """How many samples it draws depends on the first of them."""

    def plan(self, request: Any) -> Any:
        self.most = 1 + (request.ids[0] * 5) % 3
        return super().plan(request)


@pytest.mark.parametrize("late", [False, True])
def test_resume_after_every_step(tmp_path: Path, late: bool) -> None:
    """lhotse-speech/lhotse#417, verl-project/verl#7401."""
    whole = _fit(tmp_path, callbacks=[ModelCheckpoint(tmp_path / "kept", **KEPT)], enable_checkpointing=True)
    for step in range(1, len(whole.seen)):
        path = tmp_path / "kept" / f"step={step}.ckpt"
        rest = _fit(tmp_path, ckpt_path=path, strategy=DrawingStrategy(late), num_workers=2 * (step == 3))
        assert rest.seen == whole.seen[step:], step


def test_a_fixed_run_resumes_a_drawing_one_and_the_other_way_round(tmp_path: Path) -> None:
    kept = {"callbacks": [ModelCheckpoint(tmp_path / "drawn", **KEPT)], "enable_checkpointing": True}
    drawn = _fit(tmp_path, **kept)
    kept = {"callbacks": [ModelCheckpoint(tmp_path / "fixed", **KEPT)], "enable_checkpointing": True}
    fixed = _fit(tmp_path, **kept, strategy=BindingStrategy(), size={"global_batch_size": 3})
    for name, first, strategy in (("drawn", drawn, BindingStrategy), ("fixed", fixed, DrawingStrategy)):
        for step in (1, 2, 3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                rest = _fit(
                    tmp_path,
                    ckpt_path=tmp_path / name / f"step={step}.ckpt",
                    strategy=strategy(),
                    size={"global_batch_size": 3} if strategy is BindingStrategy else {},
                )
            done = [ids for _, ids in first.seen[:step]]
            epochs = rest.epochs()
            assert _once(done + epochs[0])
            assert all(_once(epochs[epoch]) for epoch in range(1, EPOCHS))
            assert any("The steps of the saved run were" in str(w.message) for w in caught)


def test_reloaded_loaders_go_on(tmp_path: Path) -> None:
    model = _fit(tmp_path, reload_dataloaders_every_n_epochs=1)
    assert model.seen == _fit(tmp_path).seen


def test_limited_epochs_and_steps(tmp_path: Path) -> None:
    whole = _fit(tmp_path)
    assert _fit(tmp_path, limit_train_batches=2).epochs() == {e: s[:2] for e, s in whole.epochs().items()}
    assert _fit(tmp_path, max_epochs=-1, max_steps=7).seen == whole.seen[:7]
    assert _fit(tmp_path, fast_dev_run=True).seen == whole.seen[:1]


class Scheduled(Module):
    """Asks for the number of steps before there is a profile."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        self.total_steps = steps
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)]


def _scheduled(limits: dict[str, int], batch: int | None) -> tuple[str, int]:
    case = Case(world_size=1, batch=batch)  # type: ignore[arg-type]
    module = Scheduled(case)
    strategy = make_strategy(case, planner=Drawing(lookahead=8))
    one = make_trainer(strategy, case, devices=1, **limits)
    try:
        one.fit(module, datamodule=Data(case))
    except RuntimeError as error:
        return str(error), one.global_step
    return "", module.total_steps


def _scheduled_everywhere() -> list[Any]:
    return [
        _scheduled({"max_epochs": 2, "max_steps": -1}, None),
        _scheduled({"max_epochs": 2, "max_steps": -1}, 6),
        _scheduled({"max_steps": 3}, None),
    ]


@pytest.mark.feature(
    "Trainer", "`estimated_stepping_batches`", "refused where the number of steps is not known: set `max_steps`"
)
def test_a_schedule_over_an_unknown_number_of_steps_is_refused_with_advice(pool: Pool) -> None:
    """Also where a size is given: without the planner's word the loader would answer with a number of fixed steps."""
    without_size, with_size, with_steps = pool.run(_scheduled_everywhere, 1, timeout=100.0)[0]
    for message, trained in (without_size, with_size):
        assert "draws" in message
        assert "set Trainer(max_steps=...) and use that number" in message
        assert trained == 0
    assert with_steps == ("", 3)
