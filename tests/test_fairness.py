"""The draw is fair: what the first steps train on is a random sample of the dataset, whatever the lengths.

Chi-square of the length groups in the first 20 steps against the dataset's proportions, over 200 seeds; where the draw
is fair the p-values are uniform (Kolmogorov-Smirnov). Steps draw without replacement, so the counts vary less than
those of independent draws, by the factor (n - m) / (n - 1) for m of n samples. The statistic is divided by it, which
makes its mean exactly that of chi-square.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from lightning_dcp.cost import CostModel, IntArray
from lightning_dcp.data.drawing import Stray
from lightning_dcp.data.feeding import Planned, tasks
from lightning_dcp.data.planning import PlanningContext, samples_of
from lightning_dcp.data.sampler import StepSampler
from lightning_dcp.lengths import length_groups
from lightning_dcp.permutation import permutation
from lightning_dcp.planners import Limits, Planner
from lightning_dcp.planners.floating import Floating
from lightning_dcp.planners.grouped import Bucket, DCPInter
from lightning_dcp.topology import World
from tests.synthetic import analytic_profile

SEEDS = range(200)
STEPS, BATCH, SAMPLES = 20, 64, 20_000
LEAST = 5.0
"""Expected samples from which a group counts; smaller ones are joined with their neighbours."""

LENGTHS: IntArray = np.clip(np.random.default_rng(0).lognormal(6.0, 1.2, SAMPLES), 16, 8192).astype(np.int64)


def groups_of(lengths: IntArray, drawn: int) -> IntArray:
    """Number of the length group of each sample; each group expects :data:`LEAST` of ``drawn`` samples."""
    edges = np.asarray(length_groups(lengths, 24), dtype=np.int64)
    sizes = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges))
    kept, waiting = [], 0
    for edge, size in zip(edges.tolist(), sizes.tolist(), strict=True):
        waiting += size
        if waiting * drawn / len(lengths) >= LEAST:
            kept.append(edge)
            waiting = 0
    # What is left over at the long end joins the last group that is large enough.
    kept[-1] = int(edges[-1])
    return np.searchsorted(np.asarray(kept), lengths)


def p_value(groups: IntArray, ids: IntArray) -> float:
    """Probability that a fair draw of so many samples without replacement is at least as uneven."""
    total, drawn = len(groups), len(ids)
    expected = np.bincount(groups) * (drawn / total)
    assert expected.min() >= LEAST
    found = np.bincount(groups[ids], minlength=len(expected))
    statistic = float(((found - expected) ** 2 / expected).sum()) * (total - 1) / (total - drawn)
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def uniform(draw: Callable[[int], IntArray]) -> float:
    """Kolmogorov-Smirnov p-value of the p-values of all seeds against the uniform distribution."""
    groups = groups_of(LENGTHS, STEPS * BATCH)
    assert groups.max() >= 9, "ten groups or more"
    return float(stats.kstest([p_value(groups, draw(seed)) for seed in SEEDS], "uniform").pvalue)


def fixed(seed: int) -> IntArray:
    sampler = StepSampler(LENGTHS, seed=seed, global_batch_size=BATCH)
    return np.concatenate([sampler.samples(0, step) for step in range(STEPS)])


def sorted_in_windows(seed: int, window: int) -> IntArray:
    """What bucketing samplers do: the order is random, and sorted by length inside windows of so many steps."""
    order = permutation(seed, 0, SAMPLES)
    for start in range(0, SAMPLES, window * BATCH):
        part = order[start : start + window * BATCH]
        order[start : start + window * BATCH] = part[np.argsort(LENGTHS[part], kind="stable")]
    return order[: STEPS * BATCH]


def test_fixed_steps_are_a_fair_draw() -> None:
    assert uniform(fixed) > 0.001


def test_a_sampler_that_sorts_by_length_fails_the_same_test() -> None:
    """Also one that hands out most of a window: 20 of its 25 steps."""
    assert uniform(lambda seed: sorted_in_windows(seed, 100)) < 1e-6
    assert uniform(lambda seed: sorted_in_windows(seed, 25)) < 1e-6
    # Whole windows hold what a fair draw holds, so the test says nothing about a sampler's order inside of them.
    assert uniform(lambda seed: sorted_in_windows(seed, STEPS)) > 0.001


def test_a_preference_for_short_samples_fails_too() -> None:
    """One in five of the longer half is put off behind all others."""

    def preferring(seed: int) -> IntArray:
        order = permutation(seed, 0, SAMPLES)
        chance = np.random.default_rng(seed).random(SAMPLES)
        put_off = (LENGTHS[order] > np.median(LENGTHS)) & (chance < 0.2)
        return np.concatenate([order[~put_off], order[put_off]])[: STEPS * BATCH]

    assert uniform(preferring) < 0.001


def test_the_correction_for_draws_without_replacement_is_needed_and_right() -> None:
    """Of a dataset of which the first steps take most, an uncorrected test would find every draw too even."""
    groups = groups_of(LENGTHS[:1600], 1280)
    draws = [permutation(seed, 0, 1600)[:1280] for seed in SEEDS]
    assert stats.kstest([p_value(groups, ids) for ids in draws], "uniform").pvalue > 0.001
    independent = [np.random.default_rng(seed).integers(0, 1600, 1280) for seed in SEEDS]
    assert stats.kstest([p_value(groups, ids) for ids in independent], "uniform").pvalue < 1e-6


def strays(planner: Planner, lengths: IntArray, world_size: int = 8) -> tuple[list[Stray], IntArray]:
    """What was reported of each step of an epoch, and for each trained sample how much too early it came."""
    cost = CostModel(analytic_profile((1, 2, 4, 8)))
    context = PlanningContext(
        rank=0,
        planner=planner,
        cost=cost,
        world=World.build(world_size, cost.sp_sizes),
        limits=Limits(memory_bytes=2**30),
    )
    sampler, planned = StepSampler(lengths), deque[Planned]()
    places = np.argsort(permutation(0, 0, len(lengths)))
    reported, trained = [], []
    for _ in tasks(context, sampler, lengths[:, None], planned):
        head = planned.popleft()
        assert head.plan is not None, head.error
        ids = samples_of(head.plan)
        sampler.mark_consumed(head.epoch, head.step, ids)
        reported.append((len(ids), sampler.stray))
        trained += sorted(places[ids].tolist())
    assert sorted(trained) == list(range(len(lengths)))
    early = np.asarray(trained) - np.arange(len(lengths))
    total = sum(count * stray.mean for count, stray in reported)
    assert total == pytest.approx(np.abs(early).sum())
    assert max(stray.maximum for _, stray in reported) == np.abs(early).max()
    return [stray for _, stray in reported], early


def test_floating_steps_do_not_stray() -> None:
    reported, early = strays(Floating(min_samples=16, max_samples=64, candidates=3), LENGTHS[:300])
    assert set(reported) == {Stray()}
    assert not early.any()


@pytest.mark.parametrize("planner", [Bucket(window=120), DCPInter(window=120)])
def test_drawn_steps_report_how_far_they_stray(planner: Bucket | DCPInter) -> None:
    """A sample comes too early by less than the planner looks ahead; too late it may come by more."""
    wide, narrow = strays(planner, LENGTHS[:300])[1], strays(replace(planner, window=30), LENGTHS[:300])[1]
    assert 0 < wide.max() < 120
    assert narrow.max() < 30
    assert np.abs(narrow).mean() < np.abs(wide).mean()
