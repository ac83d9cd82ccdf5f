"""The contract: whatever the plan, the optimizer step is the one of a single process (design 3).

``Trainer.fit`` under DCPStrategy with random plans, over several ranks, against plain Lightning on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_dcp.plan import IterationPlan
from tests.fitting import (
    Case,
    Data,
    Module,
    Result,
    SingleProcess,
    assert_same_updates,
    fit_dcp,
    fit_single,
    make_strategy,
    make_trainer,
    weights_of,
)
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
    case = Case(returns=returns, weighting=weighting, seed=seed, clip=0.05 if seed % 2 else None)
    plans = [IterationPlan.from_json(text) for text in _compare(pool, case)[0].plans]
    rows = [m for plan in plans for m in plan.micro_batches]
    assert {m.sp_size for m in rows} == {1, 2, 4}, "the plans are not mixed"
    assert len({m.recompute for m in rows}) > 2
    assert len({m.batch_size for m in rows}) > 2
    assert any(len({len(plan.of_rank(rank)) for rank in range(4)}) > 1 for plan in plans)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_other_worlds_with_uneven_groups(pool: Pool, world_size: int) -> None:
    """Lightning-AI/pytorch-lightning#12607: DeepSpeed on CPU ranks, one of them or several."""
    _compare(pool, Case(world_size=world_size, seed=20 + world_size, clip=0.05))


@pytest.mark.parametrize("sp_sizes", [(1,), (2,), (4,)])
def test_forced_sizes(pool: Pool, sp_sizes: tuple[int, ...]) -> None:
    """One size beside 1; with p = W the reduce spans every rank (ByteDance-Seed/VeOmni#1115)."""
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


class _Dressed(Module):
    """Two parameter groups, a frozen and a tied weight, a buffer, and a parameter that no optimizer has."""

    scale: torch.Tensor

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.position.weight.requires_grad_(False)
        self.net.heads[0].weight = self.net.embedding.weight
        self.outside = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.tensor([2.0]))

    def values(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        values_BS, mask_BS = super().values(batch)
        return values_BS * self.outside * self.scale, mask_BS

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = {n: p for n, p in self.net.named_parameters() if p.requires_grad}
        layers = [p for n, p in trained.items() if "layers" in n]
        others = [p for n, p in trained.items() if "layers" not in n]
        groups = [{"params": layers, "lr": 0.3}, {"params": others, "lr": 0.1, "weight_decay": 0.01}]
        return torch.optim.SGD(groups, lr=0.5)


class _DressedSingle(_Dressed, SingleProcess):
    """The same in one process."""


@pytest.mark.feature("Trainer", "parameter groups, frozen and tied parameters")
@pytest.mark.parametrize("clip", [None, 0.2])
def test_groups_frozen_tied_and_foreign_parameters(pool: Pool, clip: float | None) -> None:
    case = Case(seed=60, clip=clip)
    results = pool.run(fit_dcp, case.world_size, case, _Dressed, timeout=120.0)
    expected = fit_single(case, results[0].plans, make=_DressedSingle)
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
        assert_same_updates(result, expected)
    assert torch.equal(results[0].weights["net.position.weight"], results[0].start["net.position.weight"])


def _fit_in_parts(parts: Sequence[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Calls fit once for each number of steps, with the same trainer, module and data."""
    case = Case(world_size=2, seed=61, samples=24, batch=8, steps=parts[0])
    module, data = Module(case), Data(case)
    trainer = make_trainer(make_strategy(case), case, devices=2)
    for steps in parts:
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(module, datamodule=data)
    return module.losses, weights_of(module)


@pytest.mark.feature("Trainer", "a second fit of the same module")
def test_a_second_fit_goes_on_with_a_clean_module(pool: Pool) -> None:
    """An epoch of three steps and then two more are five steps: the first engine leaves nothing behind."""
    whole = pool.run(_fit_in_parts, 2, [5], timeout=120.0)
    again = pool.run(_fit_in_parts, 2, [3, 5], timeout=120.0)
    for (losses, weights), (expected_losses, expected) in zip(again, whole, strict=True):
        assert len(losses) == 5
        assert losses == expected_losses
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_a_gradient_wrong_by_a_thousandth_is_caught(pool: Pool) -> None:
    """One rank's gradient is 0.1 % too large; a comparison that does not see it proves nothing."""
    case = Case(seed=50, broken=1e-3, masked="none")
    results = pool.run(fit_dcp, case.world_size, case, timeout=120.0)
    expected = fit_single(Case(seed=50, masked="none"), results[0].plans)
    with pytest.raises(AssertionError, match="error .* allowed"):
        assert_same_updates(results[0], expected)
