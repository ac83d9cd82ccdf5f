"""The benchmark of the plugin's own cost: both sides train the same, and the ratio is taken pair by pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.overhead import plot, sentence, summary
from tests.pool import Pool


def _measure(folder: str) -> list[dict[str, float]]:
    from benchmarks import overhead_worker

    overhead_worker.LENGTH = 32
    return overhead_worker.measure(1, 1, 2, folder)


def test_both_strategies_train_the_same_batches(pool: Pool, tmp_path: Path) -> None:
    pairs = pool.run(_measure, 2, str(tmp_path), timeout=120.0)[0]
    assert pairs[0]["dcp_loss"] == pytest.approx(pairs[0]["plain_loss"], rel=1e-5)
    assert summary(pairs)["ratio"] == pairs[0]["dcp"] / pairs[0]["plain"] > 0


def _pairs(ratios: list[float]) -> list[dict[str, float]]:
    # The machine gets slower from pair to pair; the ratios do not.
    return [
        {"dcp": (i + 1) * r, "plain": i + 1.0, "dcp_loss": 5.0, "plain_loss": 5.0} for i, r in enumerate(ratios)
    ]


def test_the_median_of_the_ratios_and_its_interval(tmp_path: Path) -> None:
    """For 20 values the 6th and the 15th bound the median with 95.9 %."""
    result: dict[str, Any] = summary(_pairs([1 + i / 100 for i in range(20)]))
    assert result["ratio"] == pytest.approx(1.095)
    assert result["interval"] == pytest.approx([1.05, 1.14])
    text = sentence({**result, "steps_per_fit": 6})
    assert "median ratio 1.095 (95 % interval 1.050 to 1.140)" in text
    plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_different_losses_are_no_comparison() -> None:
    pairs = _pairs([1.0, 1.0])
    pairs[1]["plain_loss"] = 5.1
    with pytest.raises(SystemExit, match="did not train the same batches"):
        summary(pairs)
