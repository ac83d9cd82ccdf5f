"""What is logged of a step equals what is counted by hand, whatever the plan."""

from __future__ import annotations

import math
from typing import Any

import pytest
from lightning.fabric.utilities.throughput import Throughput

from lightning_dcp.metrics import Rates
from lightning_dcp.plan import IterationPlan
from tests.fitting import LAYERS, Case, Samples
from tests.metrics_tools import Layout, fit_logged
from tests.pool import Pool
from tests.test_metrics_flops import by_hand_net

CASE = Case(world_size=4, samples=24, batch=8, steps=3, seed=4)
LAYOUTS = (
    Layout(),
    Layout(recompute=(LAYERS,)),
    Layout(sp_size=2, recompute=(1, 0)),
    Layout(sp_size=4),
)
PEAK = 1e9


def _all() -> list[dict[str, Any]]:
    return [fit_logged(CASE, layout) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> list[list[dict[str, Any]]]:
    """For each rank what each layout logged."""
    return pool.run(_all, 4, timeout=120.0)


def _counts(plan: IterationPlan, samples: Samples) -> dict[str, int]:
    rows = [samples[i] for m in plan.micro_batches for i in m.sample_ids]
    return {
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "padded_tokens": sum(m.batch_size * m.padded_shape[0] for m in plan.micro_batches),
        "loss_tokens": sum(int((row["labels"] != -100).sum()) for row in rows),
        "samples": len(rows),
        "flops": 3 * sum(by_hand_net(len(row["input_ids"])) for row in rows),
    }


@pytest.mark.feature(
    "Metrics", "tokens, samples and FLOP/s, MFU", "counted from the plans; the same for every plan"
)
def test_metrics_equal_hand_counts(ranks: list[list[dict[str, Any]]]) -> None:
    """huggingface/trl#7100, meta-pytorch/torcheval#156: one definition, counted once, by a fake clock.

    Steps last 1, 2 and 3 s by it; rates are taken over two steps. With padding, masked labels and an empty rank.
    """
    samples = Samples(CASE)
    for of_rank in ranks:
        for layout, run in zip(LAYOUTS, of_rank, strict=True):
            plans = [IterationPlan.from_json(text) for text in run["plans"]]
            assert layout.sp_size == 4 or any(not plan.of_rank(3) for plan in plans)
            counts = [_counts(plan, samples) for plan in plans]
            for step, logged in enumerate(run["logged"]):
                window, seconds = counts[max(0, step - 1) : step + 1], (1.0, 3.0, 5.0)[step]
                rate = {name: sum(c[name] for c in window) / seconds for name in counts[0]}
                assert logged["dcp/seconds"] == step + 1
                for name in ("tokens", "padded_tokens", "loss_tokens", "samples"):
                    assert logged[f"dcp/{name}_per_second"] == pytest.approx(rate[name], rel=1e-12)
                assert logged["dcp/tflops_per_device"] == pytest.approx(rate["flops"] / 4e12, rel=1e-12)
                assert logged["dcp/mfu"] == pytest.approx(rate["flops"] / (4 * PEAK), rel=1e-12)
                done = counts[: step + 1]
                total = (1.0, 3.0, 6.0)[step]
                assert logged["dcp/tokens_per_second_mean"] == pytest.approx(
                    sum(c["tokens"] for c in done) / total
                )
                assert logged["dcp/mfu_mean"] == pytest.approx(sum(c["flops"] for c in done) / total / (4 * PEAK))
                assert logged["dcp/consumed_samples"] == sum(c["samples"] for c in done)
                assert logged["dcp/consumed_tokens"] == sum(c["tokens"] for c in done)
                padding = 1 - counts[step]["tokens"] / counts[step]["padded_tokens"]
                assert logged["dcp/padding"] == pytest.approx(padding, rel=1e-12)


def test_counts_do_not_depend_on_the_plan(ranks: list[list[dict[str, Any]]]) -> None:
    """huggingface/trl#7100, Qihoo360/360-LLaMA-Factory#72: p = 1, 2 and 4 log the same tokens, loss and MFU.

    All layers recomputed or none: MFU is the same.
    """
    names = ["tokens", "loss_tokens", "samples"]
    keys = [
        *(f"dcp/{name}_per_second" for name in names),
        "dcp/mfu",
        "dcp/consumed_samples",
        "dcp/consumed_tokens",
    ]
    first = ranks[0][0]["logged"]
    for of_rank in ranks:
        for run in of_rank:
            for logged, expected in zip(run["logged"], first, strict=True):
                assert [logged[key] for key in keys] == [expected[key] for key in keys]
                assert logged["loss"] == pytest.approx(expected["loss"], rel=1e-5)
                assert logged["dcp/loss"] == logged["loss"]
            assert run["losses"] == [logged["loss"] for logged in run["logged"]]


def test_one_set_of_finite_values_on_all_ranks(ranks: list[list[dict[str, Any]]]) -> None:
    """Lightning-AI/pytorch-lightning#19106: also with an empty rank, and where only some groups recompute."""
    keys = {frozenset(logged) for of_rank in ranks for run in of_rank for logged in run["logged"]}
    assert len(keys) == 1
    for of_rank in ranks:
        for run in of_rank:
            assert all(math.isfinite(value) for logged in run["logged"] for value in logged.values())
    assert {"dcp/seconds_left", "dcp/time_idle", "dcp/stray", "dcp/mean_recompute"} <= next(iter(keys))
    assert "dcp/memory_peak" not in next(iter(keys)), "on a CPU no allocator knows the peak"


def test_predictions_beside_what_was_measured(ranks: list[list[dict[str, Any]]]) -> None:
    for rank, of_rank in enumerate(ranks):
        for run in of_rank:
            plans = [IterationPlan.from_json(text) for text in run["plans"]]
            for plan, logged in zip(plans, run["logged"], strict=True):
                mine = [m.bytes for m in plan.of_rank(rank)]
                assert logged["dcp/memory_predicted"] == max(mine, default=run["static"])
                assert logged["dcp/seconds_planned"] == plan.makespan / 1e9
                assert logged["dcp/seconds_measured"] > 0
            # max_steps is reached
            assert run["logged"][-1]["dcp/seconds_left"] == 0
            assert run["logged"][0]["dcp/seconds_left"] > 0


def test_epochs_are_receipted(ranks: list[list[dict[str, Any]]]) -> None:
    for of_rank in ranks:
        for run in of_rank:
            (receipt,) = run["receipts"]
            assert (receipt.epoch, receipt.planned, receipt.trained, receipt.before) == (0, 24, 24, 0)
            assert receipt.complete
            assert str(receipt) == "epoch 0: 24 of 24 samples trained exactly once, 0 refused"


def test_rates_are_those_of_lightning() -> None:
    """Fed with world counts and one device; before its window is full Lightning gives none."""
    theirs, ours = Throughput(available_flops=10, world_size=1, window_size=4), Rates(3)
    theirs.update(time=0.0, batches=0, samples=0, lengths=0, flops=0)
    time = samples = lengths = 0
    for step, (seconds, count) in enumerate([(1, 3), (2, 5), (4, 7), (8, 2), (1, 9)], 1):
        time, samples, lengths = time + seconds, samples + count, lengths + 10 * count
        theirs.update(time=float(time), batches=step, samples=samples, lengths=lengths, flops=7 * count)
        ours.add(seconds, {"samples": count, "tokens": 10 * count, "flops": 7 * count})
        rates, known = ours.recent(), theirs.compute()
        if step >= 3:
            assert rates["samples"] == known["device/samples_per_sec"]
            assert rates["tokens"] == known["device/items_per_sec"]
            assert rates["flops"] / 10 == pytest.approx(known["device/mfu"])
        assert ours.overall()["samples"] == samples / time
    assert step == 5
    assert Rates(1).recent() == Rates(1).overall() == {}


def test_a_clock_that_stands_still_divides_nothing() -> None:
    rates = Rates(2)
    rates.add(0.0, {"samples": 3})
    assert rates.recent() == rates.overall() == {"samples": 0.0}
    with pytest.raises(ValueError, match="allowed are integers from 1"):
        Rates(0)
