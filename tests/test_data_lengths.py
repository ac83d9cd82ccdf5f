"""Where the lengths of a dataset come from, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import Dataset, Subset

from lightning_dcp.data.lengths import read_shapes
from tests.data_tools import generator_states


class Rows(Dataset[Any]):
    """Samples from a list; counts how often one is read."""

    def __init__(self, rows: list[Any], **attributes: Any) -> None:
        self.rows = rows
        self.reads = 0
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.rows[index]


class Table(Rows):
    """A dataset with columns."""

    def __init__(self, columns: dict[str, list[int]]) -> None:
        super().__init__([{name: column[i] for name, column in columns.items()} for i in range(3)])
        self.columns = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else super().__getitem__(key)


TEXT = [torch.zeros(4), torch.zeros(2), torch.zeros(7)]


def test_attribute_of_the_dataset() -> None:
    for name, values in (("lengths", [3, 1, 2]), ("shapes", np.asarray([[3], [1], [2]]))):
        dataset = Rows(TEXT, **{name: values})
        shapes = read_shapes(dataset)
        assert shapes.dtype == np.int64
        assert shapes.tolist() == [[3], [1], [2]]
        assert dataset.reads == 0


def test_two_axes() -> None:
    assert read_shapes(Rows(TEXT, shapes=[(3, 5), (1, 2), (2, 2)])).tolist() == [[3, 5], [1, 2], [2, 2]]


def test_column_and_argument_before_all_else() -> None:
    table = Table({"length": [3, 1, 2], "size": [5, 6, 7]})
    assert read_shapes(table).ravel().tolist() == [3, 1, 2]
    assert read_shapes(table, "size").ravel().tolist() == [5, 6, 7]
    assert read_shapes(table, [1, 1, 9]).ravel().tolist() == [1, 1, 9]
    assert read_shapes(table, np.asarray([1.0, 2.0, 3.0])).ravel().tolist() == [1, 2, 3]
    assert read_shapes(table, lambda data: [len(data)] * 3).ravel().tolist() == [3, 3, 3]
    assert table.reads == 0


def test_columns_by_indexing_with_a_name() -> None:
    class Named(Rows):
        def __getitem__(self, key: Any) -> Any:
            return [9, 8, 7] if key == "length" else super().__getitem__(key)

    assert read_shapes(Named(TEXT), "length").ravel().tolist() == [9, 8, 7]


def test_a_part_of_a_dataset_takes_its_part_of_the_lengths() -> None:
    dataset = Rows(TEXT, lengths=[3, 1, 2])
    assert read_shapes(Subset(dataset, [2, 0])).ravel().tolist() == [2, 3]
    table = Table({"length": [3, 1, 2], "size": [5, 6, 7]})
    assert read_shapes(Subset(table, [1]), "size").ravel().tolist() == [6]
    assert read_shapes(Subset(Rows(TEXT), [2, 0])).ravel().tolist() == [7, 4]
    assert dataset.reads == table.reads == 0


@pytest.mark.parametrize(
    "rows",
    [
        TEXT,
        [t.numpy() for t in TEXT],
        [t.tolist() for t in TEXT],
        [{"id": 3, "weights": t[:1], "input_ids": t} for t in TEXT],
        [{"name": "x", "image": torch.zeros(len(t), 3), "other": torch.zeros(1)} for t in TEXT],
    ],
)
def test_samples_are_measured_where_nothing_else_is_known(
    rows: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = Rows(rows)
    assert read_shapes(dataset).ravel().tolist() == [4, 2, 7]
    assert dataset.reads == 3
    assert "reading lengths" in capsys.readouterr().err


def test_progress_bar_on_rank_zero_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert read_shapes(Rows(TEXT)).ravel().tolist() == [4, 2, 7]
    assert capsys.readouterr().err == ""


def test_measuring_leaves_the_random_numbers_alone() -> None:
    class Drawing(Rows):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(int(torch.randint(1, 5, ())) + int(np.random.rand()) + int(random.random()))

    torch.manual_seed(3)
    before = generator_states()
    read_shapes(Drawing(TEXT))
    assert generator_states() == before


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ([3, 0, 2], "sample 1 has the length 0; lengths must be integers of at least 1"),
        ([3, 1, -2], "sample 2 has the length -2"),
        ([3, 1.5, 2], "sample 1 has the length 1.5"),
        ([3, float("nan"), 2], "sample 1 has the length nan"),
        ([3, float("inf"), 2], "sample 1 has the length inf"),
        ([(3, 2), (1, 0), (2, 2)], r"sample 1 has the length \(1, 0\)"),
        ([3, 1], r"shape \(2,\) for 3 samples"),
        ([[[1]], [[2]], [[3]]], r"shape \(3, 1, 1\) for 3 samples"),
        (7, r"shape \(\) for 3 samples"),
        ([[1, 2], [3], [4]], "no table of numbers"),
        (["a", "b", "c"], "they must be integers"),
        ([True, True, True], "they must be integers"),
        ("nowhere", 'no column "nowhere"'),
    ],
)
def test_wrong_lengths(lengths: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_shapes(Rows(TEXT), lengths)


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="sample 1 holds no tensor, array or list"):
        read_shapes(Rows([TEXT[0], {"text": "words"}]))
    with pytest.raises(ValueError, match="sample 1 has the length 0"):
        read_shapes(Rows([TEXT[0], torch.zeros(0)]))


def test_no_samples_or_no_length() -> None:
    with pytest.raises(ValueError, match=r"the dataset \(Rows\) is empty; it needs at least one sample"):
        read_shapes(Rows([]))
    with pytest.raises(ValueError, match="generator has no length; a dataset with __len__"):
        read_shapes(x for x in TEXT)
