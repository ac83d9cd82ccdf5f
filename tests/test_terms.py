"""The counts of recomputed layers against a search of all of them, in the order that ties are decided by."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lightning_dcp.interpolation import IntArray
from lightning_dcp.terms import Terms


def searched(terms: Terms, room: int) -> IntArray:
    """Ties go to the fewest of the families but the longest, then to the fewest of that; what fits not, by memory."""
    layers = terms.layers.tolist()
    free = layers.index(max(layers))

    def rank(counts: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
        others = tuple(0 if k == free else c for k, c in enumerate(counts))
        return sum(others), others, counts[free]

    every = np.asarray(sorted(product(*[range(n + 1) for n in layers]), key=rank))
    memory = terms.memory(every[:, None], 0)
    score = np.where(memory <= room, terms.time(every[:, None]), 2**62 + memory)
    return np.asarray(every[score.argmin(axis=0)])


def drawn(rng: np.random.Generator, layers: IntArray, count: int, largest: int) -> Terms:
    """Candidates, some of families without gain or without cost, or with equal gains."""
    families = len(layers)
    values = rng.integers(0, largest, (4 * families + 2, count))
    for start in 2 * families, 3 * families:
        values[start + 1 : start + families, : count // 3] = values[start, : count // 3]
    values[3 * families : 4 * families, count // 2 :] //= 8
    return Terms.from_stack(values, layers)


@pytest.mark.parametrize("families", [1, 2, 3])
def test_counts_are_those_of_a_search_of_all(families: int) -> None:
    rng, unfitting = np.random.default_rng(families), 0
    for _ in range(40):
        layers = rng.integers(1, 6, families)
        terms = drawn(rng, layers, 60, int(rng.choice([3, 12, 10**6])))
        held = terms.memory(layers // 2, 0)
        least = min(int(terms.memory(counts, 0).min()) for counts in (layers, layers - 1))
        for room in (least, int(np.quantile(held, 0.2)), int(np.median(held))):
            found, expected = terms.fewest_recomputed(room), searched(terms, room)
            memory = terms.memory(expected, 0)
            fits = memory <= room
            unfitting += int((~fits).sum())
            assert found[fits].tolist() == expected[fits].tolist()
            # Any counts of least memory will do for what does not fit.
            assert terms.memory(found, 0).tolist() == memory.tolist()
    assert 500 < unfitting < 6_000, "what does not fit is tested as well as what does"


def test_candidates_do_not_depend_on_each_other() -> None:
    layers = np.asarray([28, 5])
    # Small numbers make ties, also between combinations that are not looked at together.
    terms = drawn(np.random.default_rng(3), layers, 20_000, 12)
    room = int(np.median(terms.memory(layers // 2, 0)))
    found = terms.fewest_recomputed(room)
    assert len(np.unique(found, axis=0)) > 40
    for i in range(0, 20_000, 97):
        alone = terms.only(np.arange(20_000) == i)
        assert (found[i] == alone.fewest_recomputed(room)[0]).all()
