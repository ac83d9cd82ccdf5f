"""The contract: whatever the plan, the optimizer step is the one of a single process (design 3).

``Trainer.fit`` under DCPStrategy with random plans, over several ranks, against plain Lightning on one device.
"""

from __future__ import annotations

import pytest
import torch

from tests.fitting import Case, Result, assert_same_updates, fit_dcp, fit_single
from tests.pool import Pool


def _compare(pool: Pool, case: Case) -> list[Result]:
    results = pool.run(fit_dcp, case.world_size, case, timeout=120.0)
    for result in results[1:]:
        assert result.plans == results[0].plans
        assert result.losses == results[0].losses, "the reported loss differs between ranks"
        for name, value in result.weights.items():
            assert torch.equal(value, results[0].weights[name]), f"ranks differ in {name}"
    expected = fit_single(case, results[0].plans)
    assert len(results[0].losses) == case.steps
    assert results[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert_same_updates(results[0], expected)
    return results


WAYS = [("mean", "token"), ("sum", "token"), ("dict", "token"), ("loss_sum", "token"), ("loss_sum", "sample")]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("returns", "weighting"), WAYS)
def test_random_plans_on_four_ranks(pool: Pool, returns: str, weighting: str, seed: int) -> None:
    """Thirty plans of 5 steps each: mixed p, b, g, r in a step, heads used on some ranks only, shards without a label.

    huggingface/transformers#37766, #34191, #34242; verl-project/verl#2857; deepspeedai/DeepSpeed#5248, #1355;
    Qihoo360/360-LLaMA-Factory#72; PrimeIntellect-ai/prime-rl#1957; allenai/OLMo-core#657; NVIDIA/Megatron-LM#673
    """
    _compare(pool, Case(returns=returns, weighting=weighting, seed=seed, clip=0.05 if seed % 2 else None))


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_other_worlds_with_uneven_groups(pool: Pool, world_size: int) -> None:
    _compare(pool, Case(world_size=world_size, seed=20 + world_size, clip=0.05))


@pytest.mark.parametrize("sp_sizes", [(1,), (2,), (4,), (1, 4)])
def test_forced_sizes(pool: Pool, sp_sizes: tuple[int, ...]) -> None:
    """p = 1 throughout, and p = W among others: the reduce spans every rank (ByteDance-Seed/VeOmni#1115)."""
    _compare(pool, Case(sp_sizes=sp_sizes, seed=30))


@pytest.mark.parametrize("returns", ["mean", "dict"])
def test_a_rank_without_a_micro_batch(pool: Pool, returns: str) -> None:
    results = _compare(pool, Case(returns=returns, empty_rank=True, seed=40))
    assert all('"first_rank":3' not in text for text in results[0].plans)


def test_fewer_samples_than_ranks(pool: Pool) -> None:
    _compare(pool, Case(samples=3, batch=3, seed=41))


@pytest.mark.parametrize(("returns", "masked"), [("mean", "equal"), ("sum", "equal")])
def test_plain_numbers_may_be_weighted_by_sample_where_counts_are_equal(
    pool: Pool, returns: str, masked: str
) -> None:
    _compare(pool, Case(returns=returns, weighting="sample", masked=masked, seed=42))


def test_a_gradient_wrong_by_a_thousandth_is_caught(pool: Pool) -> None:
    """One rank's gradient is 0.1 % too large; a comparison that does not see it proves nothing."""
    case = Case(seed=50, broken=1e-3, masked="none")
    results = pool.run(fit_dcp, case.world_size, case, timeout=120.0)
    expected = fit_single(Case(seed=50, masked="none"), results[0].plans)
    with pytest.raises(AssertionError, match="error .* allowed"):
        assert_same_updates(results[0], expected)
