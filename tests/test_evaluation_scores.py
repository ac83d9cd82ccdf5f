"""Validation and test give what a single process gives: logged values and metrics, whatever ranks and groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.evaluating import CASE, EvaluatedData, Scored, assert_same_scores, dcp_trainer, numbered, single
from tests.fitting import Case
from tests.pool import Pool

SIZES = tuple(range(1, 10))


def _validated(
    case: Case, sizes: tuple[int, ...], world_size: int, tokens: int | None, stage: str, batch: int
) -> Any:
    module = Scored(case)
    trainer = dcp_trainer(case, world_size, tokens)
    data = EvaluatedData(case, sizes, eval_batch_size=batch)
    return getattr(trainer, stage)(module, datamodule=data, verbose=False), module.calls, module.found


@pytest.mark.feature(
    "Trainer", "`validate` and `test` with several loaders", "each sample once on any number of ranks"
)
@pytest.mark.parametrize(
    ("world_size", "tokens", "stage"),
    [(2, None, "validate"), (4, None, "test"), (4, 12, "validate"), (3, 20, "test")],
)
def test_scores_equal_a_single_process(pool: Pool, world_size: int, tokens: int | None, stage: str) -> None:
    """pytorch/torchtitan#1618, Lightning-AI/pytorch-lightning#12354, modelscope/ms-swift#9152: uneven sizes, any p."""
    results = pool.run(_validated, world_size, CASE, SIZES, world_size, tokens, stage, 2, timeout=60.0)
    module = Scored(CASE)
    expected = single(module, [numbered(CASE, size) for size in SIZES], stage)
    used = {p for _, calls, _ in results for *_, p in calls}
    assert (max(used) > 1) == (tokens is not None)
    for got, _, found in results:
        assert_same_scores(got, expected)
        assert found == sorted(i for size in SIZES for i in range(size))
    assert len({len(calls) for _, calls, _ in results}) == 1
    ids = [
        (k, i)
        for _, calls, _ in results
        for k, _, indices, copy, p in calls
        if not copy and p == 1
        for i in indices
    ]
    assert len(ids) == len(set(ids)), "a sample was evaluated twice"
    if tokens is None:
        assert len(ids) == sum(SIZES)


def test_one_sample_on_four_ranks(pool: Pool) -> None:
    """facebookresearch/ParlAI#3367, axolotl-ai-cloud/axolotl#3026: it ends, counts once, and shards may be masked."""
    case = replace(CASE, masked="equal")
    for tokens in (None, 2):
        results = pool.run(_validated, 4, case, (1,), 4, tokens, "validate", 1)
        expected = single(Scored(case), [numbered(case, 1)])
        for got, calls, found in results:
            assert_same_scores(got, expected)
            assert found == [0]
            assert len(calls) == 1
        groups = [calls[0][4] for _, calls, _ in results]
        copies = [calls[0][3] for _, calls, _ in results]
        assert (groups, copies) == (
            ([1] * 4, [False, True, True, True]) if tokens is None else ([4] * 4, [False] * 4)
        )
