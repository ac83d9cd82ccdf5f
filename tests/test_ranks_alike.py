"""Ranks that read different data say so on all of them, instead of waiting for one another or losing samples."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.evaluating import CASE as EVALUATED
from tests.evaluating import EvaluatedData, Scored, collate_numbered, dcp_trainer, numbered
from tests.fitting import Samples
from tests.pool import Pool
from tests.takeover_tools import CASE, NoLengths, fit_taken


def _message(call: Any, error: type[Exception]) -> str:
    with pytest.raises(error) as found:
        call()
    return str(found.value)


def _fit_on_part() -> str:
    # As of a user who divides the files by rank himself: 8 samples here and 9 there make 2 steps and 3.
    samples = Samples(replace(CASE, samples=8 + int(os.environ["RANK"])))
    loader = DataLoader(NoLengths(samples), batch_size=2)
    return _message(lambda: fit_taken(CASE, loader), ValueError)


def _fit_with_other_seeds() -> str:
    data = DataLoader(Samples(CASE), batch_size=2 + int(os.environ["RANK"]))
    return _message(lambda: fit_taken(CASE, data), ValueError)


def test_train_data_of_its_own_on_a_rank_is_refused_before_the_first_step(pool: Pool) -> None:
    """They made different numbers of steps, and one rank waited for the time limit."""
    messages = pool.run(_fit_on_part, 2)
    assert len(set(messages)) == 1
    assert "num_samples = 8 on rank 0 and 9 on rank 1" in messages[0]
    messages = pool.run(_fit_with_other_seeds, 2)
    assert len(set(messages)) == 1
    assert "samples_per_rank = 2 on rank 0 and 3 on rank 1" in messages[0]


def _validate_part(own: bool) -> str:
    size = 5 + 2 * int(os.environ["RANK"])
    module = Scored()
    trainer = dcp_trainer(EVALUATED, 2)
    if own:
        loader = DataLoader(numbered(EVALUATED, size), batch_size=2, collate_fn=collate_numbered)
        return _message(lambda: trainer.validate(module, loader, verbose=False), ValueError)
    data = EvaluatedData(sizes=(size,))
    return _message(lambda: trainer.validate(module, datamodule=data, verbose=False), ValueError)


@pytest.mark.parametrize("own", [True, False])
def test_evaluation_data_of_its_own_on_a_rank_is_refused(pool: Pool, own: bool) -> None:
    """Rank 0 evaluated its samples 0, 1 and 4 of 5, rank 1 its 2, 3 and 6 of 7; nothing was said."""
    messages = pool.run(_validate_part, 2, own)
    assert len(set(messages)) == 1
    assert "5 samples on rank 0 and 7 on rank 1" in messages[0]
