"""One rank's problem is every rank's error, and nobody is left waiting."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dcp.agreement import Agreement, StepError
from tests.pool import Pool

CPU = torch.device("cpu")


def _begin(digests: list[int], items: list[float], problems: list[list[str]]) -> float | str:
    rank = dist.get_rank()
    try:
        return Agreement(dist.get_world_size(), CPU).begin(digests[rank], items[rank], problems[rank])
    except StepError as error:
        return str(error)


def test_the_number_of_items_is_that_of_the_world(pool: Pool) -> None:
    top = 2**40 - 1
    assert pool.run(_begin, 4, [top] * 4, [1.0, 2.5, 0.0, 4.0], [[]] * 4) == [7.5] * 4


@pytest.mark.parametrize(
    "digests", [[5, 5, 5, 6], [1, 2, 3, 2], [2**20, 2**20 + 1, 2**20, 2**20], [0, 2**39, 0, 2**39], [2, 0, 1, 1]]
)
def test_different_plans_are_an_error_on_every_rank(pool: Pool, digests: list[int]) -> None:
    """The sum of the digests alone would let the ranks whose own digest is the mean go on, and hang."""
    answers = pool.run(_begin, 4, digests, [1.0] * 4, [[]] * 4)
    assert all("different plans" in str(a) for a in answers)


def test_every_rank_raises_with_all_reasons(pool: Pool) -> None:
    answers = pool.run(_begin, 3, [7] * 3, [1.0] * 3, [[], ["disk on fire"], ["no such file"]])
    assert answers == ["rank 1: disk on fire\nrank 2: no such file"] * 3


def _end(problems: list[list[str]], differ: list[float | None]) -> tuple[float, float, tuple[float, ...]] | str:
    rank = dist.get_rank()
    masks = None if differ[rank] is None else torch.tensor(differ[rank])
    try:
        totals = Agreement(dist.get_world_size(), CPU).end(
            (torch.tensor(2), torch.tensor(0.5, dtype=torch.float64), 0.25, 1.0), masks, problems[rank]
        )
    except StepError as error:
        return str(error)
    return totals.count, totals.loss_sum, totals.seconds


def test_totals(pool: Pool) -> None:
    assert pool.run(_end, 3, [[]] * 3, [None, 0.0, None]) == [(6.0, 1.5, (0.75, 3.0))] * 3


def test_masks_that_differ_are_an_error_everywhere(pool: Pool) -> None:
    answers = pool.run(_end, 3, [[]] * 3, [None, 1.0, 0.0])
    assert all("attention mask was given on some ranks" in str(a) for a in answers)


def test_a_void_step_is_an_error_everywhere(pool: Pool) -> None:
    assert pool.run(_end, 2, [["bad mask"], []], [None, None]) == ["rank 0: bad mask"] * 2
