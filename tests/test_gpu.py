"""The same contracts on CUDA; skipped where there is no device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_dcp.callback import DCPCallback
from lightning_dcp.strategy import DCPStrategy
from tests.fitting import Case, Data, Module, Result, assert_same_updates, fit_single, make_trainer, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASE = Case(world_size=1, samples=32, batch=16, steps=4, seed=11, masked="none")


def _fit(case: Case, **kwargs: Any) -> tuple[Result, DCPCallback]:
    module = Module(case)
    start = weights_of(module)
    callback = DCPCallback()
    trainer = make_trainer(DCPStrategy(**kwargs), case, devices=1, callbacks=[callback], accelerator="cuda")
    trainer.fit(module, datamodule=Data(case))
    plans = [record.plan.to_json() for record in callback.records]
    weights = {name: p.cpu() for name, p in weights_of(module).items()}
    return Result(start=start, weights=weights, losses=module.losses, plans=plans), callback


def test_one_device_equals_a_single_process() -> None:
    result, callback = _fit(CASE)
    assert_same_updates(result, fit_single(CASE, result.plans), tolerance=1e-3)
    for record in callback.records:
        assert all(end > start >= 0.0 for start, end in record.spans)
        assert record.seconds >= max(end for _, end in record.spans) - 1e-3


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16_trains(precision: str) -> None:
    result, _ = _fit(replace(CASE, precision=precision, steps=8))
    assert result.losses[-1] < result.losses[0]


def test_setup_gives_its_memory_back() -> None:
    """Lightning-AI/pytorch-lightning#8028."""
    held: list[int] = []

    class Watch(DCPCallback):
        def on_train_start(self, *args: Any) -> None:
            super().on_train_start(*args)
            held.append(torch.cuda.memory_allocated())

    for check in (False, True):
        module = Module(CASE)
        strategy = DCPStrategy(self_check=check)
        make_trainer(strategy, CASE, devices=1, callbacks=[Watch()], accelerator="cuda").fit(
            module, datamodule=Data(CASE)
        )
        del module, strategy
        torch.cuda.empty_cache()
    assert held[1] <= 1.01 * held[0]
