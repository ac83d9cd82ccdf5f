"""The audit: its numbers against a full count, its screen, and the command that it proposes."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_dcp.audit import QUANTILES, audit
from lightning_dcp.cli import main
from lightning_dcp.cli import simulate as command
from lightning_dcp.lengths import length_groups
from lightning_dcp.planners import Balanced, Planner
from lightning_dcp.planners.grouped.bucket import Bucket
from lightning_dcp.simulate import Cluster, simulate, tuned_static
from tests.synthetic import analytic_profile

PROFILE = replace(analytic_profile((1, 2, 4)), sync_time=5_000_000)
CLUSTER = Cluster.build(PROFILE, 4, memory_bytes=400_000_000)
LENGTHS = np.random.default_rng(8).lognormal(5, 1, 730).astype(int) + 8


def test_quantiles_are_lengths_that_occur_with_their_share_of_the_time() -> None:
    found = audit(LENGTHS, CLUSTER, global_batch_size=10, steps=2)
    assert (found.samples, found.tokens) == (730, LENGTHS.sum())
    work = {int(n): int(CLUSTER.cost.useful_time(np.asarray([n]))[0]) for n in LENGTHS}
    total = sum(work[int(n)] for n in LENGTHS)
    assert [q.share for q in found.quantiles] == list(QUANTILES)
    ordered = sorted(LENGTHS.tolist())
    for q in found.quantiles:
        assert q.tokens == next(n for n in ordered if sum(m <= n for m in ordered) >= q.share * 730)
        assert q.milliseconds == work[q.tokens] / 1e6
        count = max(int(np.ceil(q.share * 730 - 1e-9)), 1)
        assert q.work_share == pytest.approx(sum(work[n] for n in ordered[:count]) / total)
    assert found.quantiles[-1].work_share == 1.0


def test_shares_of_the_longest() -> None:
    found = audit(LENGTHS, CLUSTER, global_batch_size=10, steps=2)
    longest = np.sort(LENGTHS)[-8:].astype(float)
    assert found.longest_count == 8, "1 % of 730, rounded up"
    assert found.longest_tokens == pytest.approx(longest.sum() / LENGTHS.sum())
    assert found.longest_pairs == pytest.approx((longest**2).sum() / (LENGTHS.astype(float) ** 2).sum())
    assert found.longest_tokens < found.longest_work < found.longest_pairs
    assert found.longest.shape == (LENGTHS.max(),)


def test_pairs_of_two_axes_are_those_along_each() -> None:
    """3 frames of 2 patches: each of 6 tokens meets 3 over time and 2 in its frame."""
    profile = analytic_profile((1, 2), (2, 2), shapes=((1, 8), (8, 32), (32, 128)))
    cluster = Cluster.build(profile, 2, memory_bytes=400_000_000)
    found = audit(np.asarray([[3, 2], [8, 4], [1, 1]]), cluster, global_batch_size=3, steps=1)
    assert found.longest_pairs == pytest.approx(32 * 12 / (6 * 5 + 32 * 12 + 2))


def test_planners_are_simulated_on_the_same_samples() -> None:
    found = audit(LENGTHS, CLUSTER, global_batch_size=10, steps=4, seed=3)
    assert [r.planner for r in found.planners] == ["plain", "bucket", "balanced"]
    plain = tuned_static(LENGTHS[:, None], CLUSTER, global_batch_size=10, seed=3)
    planners: tuple[Planner, ...] = (plain, Bucket(edges=length_groups(LENGTHS)), Balanced())
    for result, planner in zip(found.planners, planners, strict=True):
        expected = simulate(LENGTHS, CLUSTER, planner, steps=4, global_batch_size=10, seed=3)
        assert (result.seconds, result.tokens) == (expected.seconds, expected.tokens)
        assert result.useful_ratio == expected.useful_ratio
    assert len({r.tokens for r in found.planners}) == 1
    assert {n: r.optimizer_steps for n, r in found.steps.items()} == {5: 8, 20: 2}
    assert audit(LENGTHS, CLUSTER, global_batch_size=1, steps=1).steps.keys() == {2}, "no half of one sample"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my lengths.txt").write_text("\n".join(map(str, LENGTHS)))
    Path("profile.json").write_text(PROFILE.to_json())
    return tmp_path


WORDS = ["--profile", "profile.json", "--memory-limit", "10MB", "--world-size", "4", "--global-batch-size", "10"]


@pytest.mark.usefixtures("files")
def test_one_screen_and_a_command_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my lengths.txt").write_text("\n".join([*map(str, LENGTHS[LENGTHS < 1500]), "1900"]))
    assert main(["audit", "my lengths.txt", *WORDS, "--seed", "2", "--sp-sizes", "1,2,4"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines[:-1])) <= 120
    assert not re.search(r"\d\n +(GB|MB|%)", out)
    count = (LENGTHS < 1500).sum() + 1
    for part in (
        f"my lengths.txt: {count} samples",
        f"1,900 tokens (my lengths.txt, line {count}): fits from p = 2 on (within a node), with ",
        "of 10.0 MB",
        "of 4 layers recomputed; at p = 1 it would need ",
        *(
            "\nplain ",
            "\nbucket ",
            "\nbalanced ",
            "\nbalanced, 5 samples a step ",
            "\nbalanced, 20 samples a step ",
        ),
    ):
        assert part in " ".join(out.split("\n" + 16 * " ")), part
    program, name, *rest = shlex.split(lines[-1].removeprefix("next: "))
    assert (program, name) == ("lightning-dcp", "simulate")
    parsed = command.parser().parse_args(rest)
    assert (parsed.lengths, parsed.profile, parsed.memory_limit) == ("my lengths.txt", "profile.json", "10MB")
    assert (parsed.world_size, parsed.global_batch_size, parsed.seed, parsed.sp_sizes) == (4, 10, 2, (1, 2, 4))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["50"] * 16 + ["word"], "x.txt, line 17: got 'word'"),
        (["50", "", "9999999"], "x.txt, line 3: sample 1 of shape (9999999,)"),
        ([], "x.txt holds no length"),
    ],
)
def test_wrong_lengths_give_one_sentence(
    lines: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.txt").write_text("\n".join(lines))
    assert main(["audit", "x.txt", *WORDS]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"lightning-dcp audit: {message}")
