"""What a loader that was taken over gives: its settings, its collate function, its batches at p = 1 and above."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_dcp.data.batch import UncountedError, is_divisible, labels_of
from lightning_dcp.data.collate import CollateRules
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.reading import ReadError
from lightning_dcp.data.takeover.collating import fitted
from lightning_dcp.data.takeover.frames import framed, inner, unframed
from lightning_dcp.data.takeover.ordering import seed_of
from lightning_dcp.data.takeover.taking import Around, taken
from lightning_dcp.plan import MicroBatch
from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup, activate
from tests.data_tools import RoundRobin, context


class Table:
    """Rows of a table, as Hugging Face gives them: columns by name, and a format that they come in."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = list(rows)
        self.column_names = list(rows[0])
        self.form: Any = list

    def set_format(self, form: Any, columns: Sequence[str]) -> None:
        self.form, self.column_names = form, list(columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return [row[key] for row in self.rows]
        row = self.rows[key]
        return {
            name: self.form(row[name]) if isinstance(row[name], list) else row[name] for name in self.column_names
        }


def table(*lengths: int, **columns: Any) -> Any:
    rows: list[dict[str, Any]] = [
        {"input_ids": list(range(100 * i, 100 * i + n)), "score": i / 3} for i, n in enumerate(lengths)
    ]
    return Table([{**row, **{k: v(len(row["input_ids"])) for k, v in columns.items()}} for row in rows])


def take(
    loader: DataLoader[Any], frame: Any = None, ranks: int = 1, planner: Any = None, count: Any = None
) -> DCPLoader:
    """Taken over and bound, as rank 0 of so many."""
    made = taken(loader, Around(frame=frame, count=count, world_size=ranks, in_order=False))
    made.bind(context(0, ranks, planner))
    return made


def batches_of(loader: DCPLoader) -> list[Any]:
    found = []
    for step in loader:
        assert step.error is None, step.error
        found += list(step.data)
    return found


def micro_batch(*lengths: int, padded: int, p: int = 2) -> MicroBatch:
    return MicroBatch(
        sample_ids=tuple(range(len(lengths))), shapes=tuple((n,) for n in lengths), padded_shape=(padded,),
        first_rank=0, sp_size=p, nanoseconds=0, bytes=0,
    )  # fmt: skip


@pytest.mark.feature("Data", "Hugging Face datasets", "columns, `set_format`; `datasets` 5.2 was tried by hand")
@pytest.mark.parametrize("form", [None, np.asarray, torch.tensor])
def test_tables_with_columns_and_formats(form: Any) -> None:
    rows = table(4, 2, 5, length=lambda n: n)
    if form is not None:
        rows.set_format(form, ["input_ids", "score", "length"])
    made = take(DataLoader(rows, batch_size=3))
    assert made.shapes[:, 0].tolist() == [4, 2, 5]
    first, second = batches_of(made)
    assert sorted(first) == ["attention_mask", "input_ids", "length", "score"]
    assert first["input_ids"].tolist() == [[0, 1, 2, 3], [100, 101, 0, 0]]
    assert first["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert second["input_ids"].shape == (1, 5)
    # As torch's default collate has them.
    assert first["score"].dtype == default_collate([0.5])[0].dtype == torch.float64


def test_equal_lengths_give_what_torch_gives() -> None:
    rows = table(3, 3, 3)
    rows.set_format(torch.tensor, ["input_ids", "score"])
    (batch, _) = batches_of(take(DataLoader(rows, batch_size=3)))
    expected = default_collate([rows[0], rows[1]])
    assert sorted(batch) == sorted(expected)
    assert all(torch.equal(batch[key], expected[key]) and batch[key].dtype == expected[key].dtype for key in batch)
    data: Any = TensorDataset(torch.arange(12).view(4, 3), torch.arange(4.0))
    pairs = batches_of(take(DataLoader(data, batch_size=4)))
    assert [type(pair) for pair in pairs] == [list, list]
    assert torch.equal(pairs[0][0], data.tensors[0][:2])
    assert torch.equal(pairs[1][1], data.tensors[1][2:])


def test_settings_of_the_loader_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table(4, 2, 5, 1)
    generator = torch.Generator().manual_seed(31)
    numbers: list[int] = []
    loader = DataLoader(
        rows, batch_size=2, shuffle=True, generator=generator, num_workers=2, prefetch_factor=3,
        worker_init_fn=numbers.append, multiprocessing_context="fork", drop_last=True,
    )  # fmt: skip
    made = take(loader, ranks=1)
    options = made.options
    assert (options.num_workers, options.prefetch_steps, options.worker_init_fn) == (2, 6, numbers.append)
    assert options.multiprocessing_context.get_start_method() == "fork"
    assert (made.sampler.seed, made.sampler.global_batch_size, len(made)) == (31, 2, 2)
    assert len(batches_of(made)) == 2
    assert take(DataLoader(rows, batch_size=1), ranks=3).sampler.global_batch_size == 3
    assert seed_of(DataLoader(rows)) == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "12")
    assert seed_of(DataLoader(rows)) == 12
    orders = [take(DataLoader(rows, shuffle=s)).sampler.samples(0, 0).tolist() for s in (False, True)]
    assert orders[0] == [0]


def test_collate_gets_the_samples_of_a_micro_batch_and_lengths_may_come_from_it() -> None:
    texts: Any = ["a b c", "d", "e f"]
    calls: list[list[str]] = []

    def tokens(rows: list[str]) -> dict[str, Tensor]:
        calls.append(list(rows))
        words = [row.split() for row in rows]
        longest = max(map(len, words))
        return {"input_ids": torch.tensor([[ord(w) for w in ws] + [0] * (longest - len(ws)) for ws in words])}

    made = take(DataLoader(texts, batch_size=3, collate_fn=tokens))
    assert made.shapes[:, 0].tolist() == [3, 1, 2]
    calls.clear()
    assert [batch["input_ids"].shape for batch in batches_of(made)] == [(2, 3), (1, 2)]
    assert calls == [["a b c", "d"], ["e f"]]


def test_unmeasurable_samples_are_refused_with_the_way_out() -> None:
    numbers: Any = [1.0, 2.0]
    with pytest.raises(ValueError, match="holds no tensor.*an attribute, or a column, lengths or length"):
        take(DataLoader(numbers, batch_size=1))


def test_fixed_lengths_behind_collate_are_named() -> None:
    def fixed(rows: list[Any]) -> dict[str, Tensor]:
        return {"input_ids": torch.zeros(len(rows), 512, dtype=torch.long)}

    with pytest.warns(UserWarning, match="batch of length 512 of sample 1 alone, whose length is 2"):
        take(DataLoader(table(4, 2), batch_size=2, collate_fn=fixed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(DataLoader(table(40, 20), batch_size=2, collate_fn=lambda rows: {"x": torch.zeros(1, 40)}))


def test_batches_are_made_divisible_and_keep_their_kind_and_keys() -> None:
    """huggingface/trl#4579: every key of the user is there, at p = 2 too."""

    def encoding(rows: list[Any]) -> Any:
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows])
        names = [row["score"] for row in rows]
        return UserDict(input_ids=ids, attention_mask=mask, labels=ids.clone(), names=names, e=mask[..., None])

    made = take(DataLoader(table(5, 3), batch_size=2, collate_fn=encoding))
    part = micro_batch(5, 3, padded=6)
    batch = made.load(part)
    assert isinstance(batch, UserDict)
    assert batch["input_ids"].shape == (2, 6)
    assert batch["labels"][:, 5].tolist() == [-100, -100]
    assert batch["e"].shape == (2, 6, 1)
    assert "position_ids" not in batch
    for rank in (0, 1):
        group = SPGroup(ranks=(0, 1), rank=rank)
        with activate(MicroBatchContext(group=group, sample_ids=(0, 1), shapes=part.shapes, padded_shape=(6,))):
            shard = made.hooks.shard(batch, group)
        assert isinstance(shard, UserDict)
        assert sorted(shard) == ["attention_mask", "e", "input_ids", "labels", "names", "position_ids"]
        assert shard["position_ids"].tolist() == [list(range(3 * rank, 3 * rank + 3))] * 2
        assert torch.equal(shard["labels"], batch["labels"][:, 3 * rank : 3 * rank + 3])
        assert made.hooks.loss_items(shard) == int((shard["labels"] != -100).sum())


def test_longer_batches_are_cut_where_only_padding_is_lost() -> None:
    ids = torch.arange(16).view(2, 8)
    mask = torch.tensor([[1] * 5 + [0] * 3, [1] * 3 + [0] * 5])
    rules, part = CollateRules(), micro_batch(5, 3, padded=6)
    assert torch.equal(fitted({"input_ids": ids, "attention_mask": mask}, part, rules)["input_ids"], ids[:, :6])
    for wrong in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask.flip(1)}, {"labels": ids}):
        with pytest.raises(ValueError, match=r"length 8 of samples that are at most 6 long.*sp_sizes=\[1\]"):
            fitted(wrong, part, rules)
    made = take(DataLoader(table(5, 3), batch_size=2, collate_fn=lambda rows: {"input_ids": ids}))
    with pytest.raises(ReadError, match="could not be collated.*length 8"):
        made.load(part)
    assert torch.equal(made.load(micro_batch(5, 3, padded=5, p=1))["input_ids"], ids), "untouched at p = 1"


@dataclass
class Pair:
    """A batch of somebody's own kind."""

    ids: Tensor
    attention_mask: Tensor


def test_what_a_batch_counts() -> None:
    def hooks(count: Any = None) -> Any:
        return take(DataLoader(table(3, 2), batch_size=2), count=count).hooks

    mask = torch.tensor([[1, 1, 0]])
    assert hooks().loss_items({"labels": torch.tensor([[1, -100, 2]]), "attention_mask": mask}) == 2
    assert hooks().loss_items({"attention_mask": mask}) == 2
    assert hooks().loss_items(Pair(mask, mask)) == 2
    assert hooks(lambda batch: 7).loss_items((mask, mask)) == 7
    for batch in ((mask, mask), {"x": mask}, mask):
        with pytest.raises(UncountedError, match=r'neither "labels" nor "attention_mask".*Return \{"loss": sum'):
            hooks().loss_items(batch)


def test_collections_of_one_loader() -> None:
    for collection, wrapped in (
        ({"a": 5}, {"a": 1}), ([5], [1]), ((5,), (1,)), ({"a": [5]}, {"a": [1]}), (5, 1),
        (CombinedLoader({"a": [5]}, "max_size_cycle"), {"a": [1]}), (CombinedLoader([5], "sequential"), 1),
    ):  # fmt: skip
        leaves, frame = unframed(collection)
        assert leaves == [5]
        assert framed(frame, 1) == wrapped
        assert inner(frame, wrapped) == 1
    made = take(DataLoader(table(4, 2, 5), batch_size=3), frame={"a": [None]}, planner=RoundRobin())
    batch = batches_of(made)[0]
    assert batch["a"][0]["input_ids"].shape == (2, 4)
    assert made.hooks.loss_items(batch) == 6
    assert labels_of({"a": [{"labels": 3}]}, "labels") == 3
    assert labels_of([1, 2], "labels") is None
    kinds: list[Any] = [{}, [{}], [{}, {}], (torch.zeros(1),), torch.zeros(1)]
    assert [is_divisible(kind) for kind in kinds] == [True, True, False, False, False]


def test_a_batch_without_keys_is_not_cut() -> None:
    made = take(DataLoader(table(4, 2), batch_size=2, collate_fn=lambda rows: [r["score"] for r in rows]))
    batch: Any = [1.0]
    with pytest.raises(ValueError, match=r"a batch is a list without sequences.*sp_sizes=\[1\]"):
        made.hooks.shard(batch, SPGroup(ranks=(0, 1), rank=0))


def test_too_few_samples_for_drop_last() -> None:
    with pytest.raises(MisconfigurationException, match=r"on 4 ranks needs 8 samples for a step, .*has 3"):
        taken(
            DataLoader(table(4, 2, 5), batch_size=2, drop_last=True),
            Around(frame=None, count=None, world_size=4, in_order=False),
        )


def test_workers_started_by_spawn_get_everything() -> None:
    loader = DataLoader(table(4, 2), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert batches_of(take(loader, frame=[None]))[0][0]["input_ids"].shape == (2, 4)
