"""The paper's length distributions: dominated by compute as defined, and the same bits everywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import lengths as benchmark
from lightning_dcp.cost import CostModel
from lightning_dcp.lengths import DISTRIBUTIONS, distribution, training_flops
from lightning_dcp.lengths.distributions import COMPUTE_SHARES
from lightning_dcp.virtual import MEMORY_BYTES, PROFILES, profile, shapes

COUNT = 400_000


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    return {name: distribution(name, COUNT) for name in DISTRIBUTIONS}


def share(lengths: Any, chosen: Any) -> float:
    flops = training_flops(lengths)
    return float(flops[chosen].sum() / flops.sum())


def test_the_first_lengths_never_change() -> None:
    assert distribution("short", 6, seed=3).tolist() == [565, 616, 754, 6514, 6630, 2089]
    assert distribution("balanced", 6, seed=3).tolist() == [2974, 4303, 5266, 1528, 5741, 568]
    assert distribution("long", 6, seed=3).tolist() == [50334, 827, 604, 669, 709, 1788]
    assert distribution("panda", 6, seed=3).tolist() == [26112, 12800, 64512, 56832, 67072, 29696]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_longer_draw_begins_with_the_shorter(name: str) -> None:
    long = distribution(name, 1000, seed=5)
    assert long.dtype == np.int64
    assert distribution(name, 17, seed=5).tolist() == long[:17].tolist()
    assert distribution(name, 1000, seed=6).tolist() != long.tolist()


@pytest.mark.parametrize("name", COMPUTE_SHARES)
def test_each_octave_takes_its_share_of_the_compute(name: str, drawn: dict[str, Any]) -> None:
    """Within six standard errors; those of the longest, rare samples are the widest."""
    lengths, parts = drawn[name], np.asarray(COMPUTE_SHARES[name])
    assert lengths.min() == 512
    assert lengths.max() < 2**18
    flops = training_flops(lengths)
    for octave, wanted in enumerate(parts / parts.sum()):
        inside = (lengths >= 512 << octave) & (lengths < 1024 << octave)
        error = np.sqrt((flops[inside] ** 2).sum()) / flops.sum()
        assert abs(share(lengths, inside) - wanted) < 6 * error + 0.002


def test_dominance_is_by_compute(drawn: dict[str, Any]) -> None:
    short, balanced, long = drawn["short"], drawn["balanced"], drawn["long"]
    assert share(short, short < 8192) > 0.7
    assert share(short, short >= 65_536) < 0.06
    for low, high in ((0, 4096), (4096, 32_768), (32_768, 2**18)):
        assert 0.25 < share(balanced, (balanced >= low) & (balanced < high)) < 0.42
    # "a few long sequences ... orders of magnitude greater than that of the more numerous short sequences"
    assert (long < 8192).mean() > 5 * (long >= 65_536).mean()
    assert share(long, long >= 65_536) > 100 * share(long, long < 8192)


def test_panda_has_the_published_durations(drawn: dict[str, Any]) -> None:
    seconds = drawn["panda"] / (24 * 256)
    assert (drawn["panda"] % 256 == 0).all()
    assert seconds.min() == 2.0
    assert 47.0 < seconds.max() <= 48.0
    assert seconds.mean() == pytest.approx(8.5, abs=0.1)
    assert np.median(seconds) < 7.0 < np.quantile(seconds, 0.9) / 2.3


@pytest.mark.parametrize("model", PROFILES)
def test_the_longest_sample_fits_on_32_gpus(model: str, drawn: dict[str, Any]) -> None:
    cost = CostModel(profile(model, 32))
    longest = shapes(model, np.asarray([max(int(lengths.max()) for lengths in drawn.values())])).prod(axis=-1)
    found = cost.settings(max(cost.sp_sizes), np.asarray([1]), longest, MEMORY_BYTES, "full")
    assert (found.bytes <= MEMORY_BYTES).all()


def test_flops_are_those_of_a_count_by_hand() -> None:
    """One token: two operations per weight of the layers and the output matrix, forward and twice backward."""
    weights = 42 * 12 * 3072**2 + 50_257 * 3072
    assert training_flops(np.asarray([1]))[0] == pytest.approx(6 * weights + 6 * 42 * 3072)
    doubled = training_flops(np.asarray([1000, 2000, 4000]))
    assert doubled[2] - 2 * doubled[1] == pytest.approx(4 * (doubled[1] - 2 * doubled[0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("medium", 5), "allowed are short, balanced, long, panda"),
        (("short", 0), "count is 0"),
        (("short", 2.5), "count is 2.5"),
        (("short", 5, -1), "seed is -1"),
        (("short", True), "count is True"),
    ],
)
def test_what_is_no_distribution(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distribution(*arguments)


def test_the_documented_numbers_are_those_of_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parent.parent
    saved = json.loads((root / "benchmarks" / "results" / "lengths.json").read_text())
    assert benchmark.table(saved["distributions"]) in (root / "docs" / "lengths.md").read_text()
    monkeypatch.setattr(benchmark, "SAMPLES", 3000)
    monkeypatch.setattr(sys, "argv", ["lengths", "--output", str(tmp_path)])
    benchmark.main()
    assert (tmp_path / "docs" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    few = json.loads((tmp_path / "benchmarks" / "results" / "lengths.json").read_text())["distributions"]
    assert few["short"]["mean"] == pytest.approx(saved["distributions"]["short"]["mean"], rel=0.2)
