"""SIGTERM to one rank while it validates: it is told to the others with the next step, so none is left alone."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.fitting import Case, Data, Module, make_strategy, make_trainer
from tests.pool import Pool

CASE = Case(world_size=2, samples=8, batch=4, steps=-1, masked="none", seed=8)


class _Validated(Module):
    """Rank 1 gets the signal in the first batch of the validation after so many steps."""

    def __init__(self, case: Case, after: int) -> None:
        super().__init__(case)
        self.after = after

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        values_BS, mask_BS = self.values(batch)
        self.log("val_loss", (values_BS * mask_BS).sum() / mask_BS.sum())
        if self.trainer.global_rank == 1 and self.global_step == self.after and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)


class _ValidatedData(Data):
    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.val_dataset = self.train_dataset


def _fit(after: int) -> tuple[str, int, bool]:
    """How the fit ended, after how many steps, and whether this rank knows of the signal."""
    trainer = make_trainer(make_strategy(CASE), CASE, devices=2, max_epochs=3)
    try:
        trainer.fit(_Validated(CASE, after), datamodule=_ValidatedData(CASE, eval_batch_size=1))
    except SIGTERMException:
        return "stopped", trainer.global_step, trainer.received_sigterm
    return "ended", trainer.global_step, trainer.received_sigterm


def _fits() -> list[tuple[str, int, bool]]:
    return [_fit(2), _fit(6)]


@pytest.mark.feature("Launchers", "SIGTERM during a validation", "all ranks end after the next step")
def test_all_ranks_stop_after_the_step_behind_the_validation(pool: Pool) -> None:
    within, last = zip(*pool.run(_fits, 2, timeout=120.0), strict=True)
    assert within == (("stopped", 3, True), ("stopped", 3, True))
    # No step follows the last validation: the fit ends by itself, and the rank still says that it was asked to.
    assert last == (("ended", 6, False), ("ended", 6, True))
