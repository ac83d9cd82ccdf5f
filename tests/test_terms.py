"""The counts of recomputed layers against a search of all of them, in the order that ties are decided by."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.terms import Terms


def searched(terms: Terms, room: int) -> list[int]:
    """Counts of one candidate; ties go to the fewest of the families but the longest, then to the fewest of that."""
    layers = terms.layers.tolist()
    free = layers.index(max(layers))
    found = []
    for counts in product(*[range(n + 1) for n in layers]):
        others = [0 if k == free else c for k, c in enumerate(counts)]
        asked = np.asarray([counts])
        memory = int(terms.memory(asked, 0)[0])
        time = int(terms.time(asked)[0])
        found.append((memory > room, memory if memory > room else time, sum(others), others, counts[free], counts))
    return list(min(found)[-1])


@st.composite
def candidates(draw: st.DrawFn) -> Terms:
    """One candidate of one to three families, with equal ones, ones without gain and ones without cost."""
    layers = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    largest = draw(st.sampled_from([2, 9, 10**6]))
    column = st.lists(st.integers(0, largest), min_size=4 * len(layers) + 2, max_size=4 * len(layers) + 2)
    return Terms.from_stack(np.asarray(draw(column))[:, None], np.asarray(layers))


@settings(max_examples=150, deadline=None)
@given(candidates(), st.data())
def test_counts_are_those_of_a_search_of_all(terms: Terms, data: st.DataObject) -> None:
    every = np.asarray(list(product(*[range(n + 1) for n in terms.layers.tolist()])))
    memory = np.unique([int(terms.memory(counts[None], 0)[0]) for counts in every])
    room = int(data.draw(st.sampled_from(memory.tolist()))) - data.draw(st.integers(0, 1))
    found = terms.fewest_recomputed(room)[0]
    expected = searched(terms, room)
    if int(terms.memory(np.asarray([expected]), 0)[0]) <= room:
        assert found.tolist() == expected
    else:
        # Any counts of least memory will do for what does not fit.
        assert terms.memory(found[None], 0) == memory[0]


def test_candidates_do_not_depend_on_each_other() -> None:
    rng = np.random.default_rng(3)
    values, layers = rng.integers(0, 10**6, (10, 20_000)), np.asarray([28, 5])
    terms = Terms.from_stack(values, layers)
    room = int(np.median(terms.memory(layers // 2, 0)))
    found = terms.fewest_recomputed(room)
    assert (terms.memory(found, 0) > room).any(), "some must fit at no counts"
    assert len(np.unique(found, axis=0)) > 50
    for i in range(0, 20_000, 997):
        alone = Terms.from_stack(values[:, i : i + 1], layers).fewest_recomputed(room)
        assert (found[i] == alone[0]).all()
