"""The self-check inside ``Trainer.fit``: a run that begins with it is the run without it, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fitting import Case, fit_dcp
from tests.pool import Pool


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_checked_run_is_bit_equal(pool: Pool, precision: str) -> None:
    case = Case(world_size=2, steps=3, precision=precision, dropout=0.1)
    plain = pool.run(fit_dcp, 2, case, timeout=120)
    checked = pool.run(fit_dcp, 2, replace(case, self_check=True), timeout=120)
    for before, after in zip(plain, checked, strict=True):
        assert any(not torch.equal(before.start[name], before.weights[name]) for name in before.start)
        assert after.plans == before.plans
        assert after.losses == before.losses
        assert all(torch.equal(after.weights[name], before.weights[name]) for name in before.weights)
