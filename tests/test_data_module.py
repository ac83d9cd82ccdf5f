"""The data module: arguments, datasets, evaluation loaders, where a fit starts."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader

from lightning_dcp.data import Batch, DCPBatch, DCPDataModule, DCPLoader
from lightning_dcp.sequence_parallel.context import MicroBatchContext, SPGroup, activate
from tests.data_tools import LENGTHS, Recorder, Tokens, TokensModule, context, trainer


class Columns(Tokens):
    """Has a column of sizes."""

    def __getitem__(self, index: Any) -> Any:
        return [7, 8] if index == "size" else super().__getitem__(index)


class SetUp(DCPDataModule):
    """Sets its datasets in setup, as users do."""

    def setup(self, stage: str) -> None:
        assert stage in ("fit", "validate", "test", "predict")
        self.train_dataset = Tokens(LENGTHS)
        self.val_dataset = self.test_dataset = self.predict_dataset = Tokens([4, 2, 3, 5, 1], known=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"global_batch_size": 2, "global_batch_tokens": 3},
            "global_batch_size is 2 and global_batch_tokens is 3",
        ),
        ({"global_batch_size": 0}, "global_batch_size is 0; it must be an integer of at least 1"),
        ({"global_batch_tokens": -3}, "global_batch_tokens is -3; it must be an integer of at least 1"),
        ({"global_batch_size": 2, "eval_batch_size": 0}, "eval_batch_size is 0"),
        ({"global_batch_size": 2, "seed": None}, "seed is None"),
        ({"global_batch_size": 2, "num_workers": 1.5}, r"num_workers is 1\.5"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DCPDataModule(**arguments)


def test_bad_datasets() -> None:
    module = DCPDataModule(2)
    with pytest.raises(
        ValueError, match=r"DCPDataModule.train_dataset is not set; assign a dataset to self.train_d"
    ):
        module.train_dataloader()
    module.train_dataset = Tokens([])
    with pytest.raises(ValueError, match=r"the dataset \(Tokens\) is empty; it needs at least one sample"):
        module.train_dataloader()
    module.train_dataset = Tokens([3, 0, 2])
    with pytest.raises(ValueError, match="sample 1 has the length 0; lengths must be integers of at least 1"):
        module.train_dataloader()
    module = DCPDataModule(2, lengths=[1, 2])
    module.train_dataset = Tokens([3, 1, 2])
    with pytest.raises(ValueError, match=r"the lengths have the shape \(2,\) for 3 samples"):
        module.train_dataloader()


def test_shapes_from_an_override_and_from_arguments() -> None:
    class Own(DCPDataModule):
        def sample_shapes(self, dataset: Any) -> Any:
            return [[n, 2] for n in dataset.sizes]

    module: DCPDataModule = Own(2)
    module.train_dataset = Tokens([3, 1])
    assert module.train_dataloader().shapes.tolist() == [[3, 2], [1, 2]]
    for lengths in ([7, 8], np.asarray([7, 8]), lambda data: [7, 8] if len(data) == 2 else [], "size"):
        module = DCPDataModule(2, lengths=lengths)
        module.train_dataset = Columns([3, 1])
        assert module.train_dataloader().shapes.tolist() == [[7], [8]]


def test_from_a_config_file() -> None:
    """The arguments have types that LightningCLI can read."""
    parser = ArgumentParser()
    parser.add_class_arguments(DCPDataModule, "data")
    config = parser.parse_object(
        {
            "data": {
                "global_batch_size": 4,
                "lengths": "size",
                "sequence_dims": {"rope": 2, "vector": None},
                "pad_values": {"weights": 0.5},
                "worker_init_fn": "tests.test_data_module.worker_init",
            }
        }
    )
    module = parser.instantiate_classes(config).data
    assert isinstance(module, DCPDataModule)
    assert module.global_batch_size == 4
    assert module.lengths == "size"
    assert module.sequence_dims == {"rope": 2, "vector": None}
    assert module.loader_options.worker_init_fn is worker_init
    assert parser.parse_object({"data": {"global_batch_tokens": 9, "lengths": [1, 2]}}).data.lengths == [1, 2]


def worker_init(worker: int) -> None:
    """Stands for a user's function."""


def test_shard_takes_the_length_of_the_running_micro_batch() -> None:
    module = DCPDataModule(1)
    batch: Batch = {"x": torch.arange(8)[None], "y": torch.arange(4)[None]}
    group = SPGroup(ranks=(0, 1), rank=1)
    with activate(MicroBatchContext(padded_shape=(8,))):
        shard = module.shard(batch, group)
    assert shard["x"].tolist() == [[4, 5, 6, 7]]
    assert shard["y"].tolist() == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match='outside of a micro-batch the length is that of "attention_mask"'):
        module.shard(batch, group)


def test_loss_items() -> None:
    module = DCPDataModule(1, labels_key="target", ignore_index=-1)
    assert module.loss_items({"target": torch.tensor([[1, -1, -100]]), "attention_mask": torch.zeros(1, 3)}) == 2
    assert module.loss_items({"attention_mask": torch.tensor([[True, True, False]])}) == 2
    with pytest.raises(ValueError, match=r'neither "target" nor "attention_mask".*it has .*Override loss_items'):
        module.loss_items({"x": torch.ones(1)})


class Evaluated(Recorder):
    """Keeps what evaluation gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []

    def validation_step(self, batch: Batch) -> None:
        self.batches.append(batch)

    def test_step(self, batch: Batch) -> None:
        self.batches.append(batch)

    def predict_step(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        return torch.as_tensor(batch["input_ids"][:, 0])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("run", ["validate", "test", "predict"])
@pytest.mark.parametrize("sampler", [True, False])
def test_evaluation_loaders(tmp_path: Path, run: str, num_workers: int, sampler: bool) -> None:
    """Lightning-AI/pytorch-lightning#19657: Lightning rebuilds the sampler in predict."""
    model = Evaluated()
    module = SetUp(4, eval_batch_size=2, num_workers=num_workers)
    getattr(trainer(tmp_path, use_distributed_sampler=sampler), run)(model, datamodule=module)
    assert [b["input_ids"].tolist() for b in model.batches] == [
        [[0, 1, 2, 3], [100, 101, 0, 0]],
        [[200, 201, 202, 0, 0], [300, 301, 302, 303, 304]],
        [[400]],
    ]
    assert [b["attention_mask"].sum().item() for b in model.batches] == [6, 8, 1]


def test_indices_of_predictions(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#10782: the indices that a writer gets are right."""

    class Writer(BasePredictionWriter):
        found: list[tuple[list[int], list[int]]]

        def write_on_batch_end(self, *args: Any) -> None:
            self.found.append((list(args[3]), (args[2] // 100).tolist()))

    for num_workers in (0, 2):
        writer = Writer("batch")
        writer.found = []
        module = SetUp(4, eval_batch_size=2, num_workers=num_workers)
        trainer(tmp_path, callbacks=[writer]).predict(Evaluated(), datamodule=module)
        assert writer.found == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4], [4])]


def test_validation_within_a_fit_and_missing_datasets(tmp_path: Path) -> None:
    model, module = Evaluated(), SetUp(4, eval_batch_size=5)
    trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0).fit(model, datamodule=module)
    assert len(model.batches) == 1
    assert len(model.seen) == 3
    only_training = TokensModule(Tokens(LENGTHS), global_batch_size=4)
    trainer(tmp_path, max_epochs=1).fit(Evaluated(), datamodule=only_training)
    for run, name in (("validate", "val_dataset"), ("test", "test_dataset"), ("predict", "predict_dataset")):
        with pytest.raises(ValueError, match=f"TokensModule.{name} is not set"):
            getattr(trainer(tmp_path), run)(Evaluated(), datamodule=only_training)


def test_evaluation_knows_two_axes_from_training() -> None:
    class Video(DCPDataModule):
        def sample_shapes(self, dataset: Any) -> Any:
            return [tuple(sample["video"].shape[:2]) for sample in dataset]

    data = [{"video": torch.ones(2, 3, 4)}, {"video": torch.ones(3, 1, 4)}]
    module = Video(2, eval_batch_size=2)
    module.val_dataset = data
    batch = next(iter(module.val_dataloader()))
    assert batch["video"].shape == (2, 3, 3, 4)
    assert batch["attention_mask"].sum().item() == 9
    plain = DCPDataModule(2, eval_batch_size=2, lengths=[[2, 3], [3, 1]])
    plain.train_dataset, plain.val_dataset = data, list(data)
    plain.train_dataloader()
    assert next(iter(plain.val_dataloader()))["video"].shape == (2, 3, 3, 4)


def test_evaluation_refuses_what_it_cannot_measure() -> None:
    module = DCPDataModule(2)
    module.val_dataset = [{"text": "words"}]
    with pytest.raises(ValueError, match="sample 0 holds nothing with 1 axes that could be measured"):
        next(iter(module.val_dataloader()))


def test_a_step_with_fewer_samples_than_devices_warns_once() -> None:
    cases: list[tuple[dict[str, Any], int, bool]] = [
        ({"global_batch_size": 2}, 8, True),
        ({"global_batch_size": 8}, 3, True),
        ({"global_batch_size": 4}, 8, False),
        ({"global_batch_tokens": 2}, 8, False),
    ]
    for size, samples, warned in cases:
        module = DCPDataModule(**size)
        # Four ranks of one CPU each; the Trainer launches none before fit.
        module.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=4)
        module.train_dataset = Tokens([3] * samples)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.train_dataloader()
        texts = [str(w.message) for w in caught if "samples for 4 ranks" in str(w.message)]
        assert len(texts) == warned


def test_one_loader_until_it_is_read_from() -> None:
    """A strategy may ask for the loader before the Trainer does; lengths are not read twice."""
    module = TokensModule(Tokens(LENGTHS), global_batch_size=4)
    assert module.train_dataloader() is not module.train_dataloader()
    module.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    first = module.train_dataloader()
    assert module.train_dataloader() is first
    first.bind(context())
    next(iter(first))
    second = module.train_dataloader()
    assert second is not first
    module.train_dataset = Tokens(LENGTHS)
    assert module.train_dataloader() is not second


def test_a_loaded_position_reaches_the_loader_whichever_comes_first() -> None:
    position = {"position": 4, "epoch": 1, "consumed_samples": 15}
    module = TokensModule(Tokens(LENGTHS), global_batch_size=4)
    state = {"train_loader": {**module.train_dataloader().state_dict(), **position}}
    for early in (False, True):
        module = TokensModule(Tokens(LENGTHS), global_batch_size=4)
        loader = module.train_dataloader() if early else None
        module.load_state_dict(state)
        loader = loader or module.train_dataloader()
        loader.bind(context())
        assert module.state_dict()["train_loader"]["position"] == 4
        batch = next(iter(loader))
        assert isinstance(batch, DCPBatch)
        assert (batch.epoch, batch.step) == (1, 1)
        # The next fit of the same data module does not start there again.
        assert module.train_dataloader().sampler.position == 0
    assert TokensModule(Tokens(LENGTHS), global_batch_size=4).state_dict() == {}


def test_a_position_of_another_run_is_refused(tmp_path: Path) -> None:
    module = TokensModule(Tokens(LENGTHS), global_batch_size=4)
    loader = module.train_dataloader()
    loader.bind(context())
    loader.mark_consumed(next(iter(loader)))
    other = TokensModule(Tokens(LENGTHS), global_batch_size=5)
    other.load_state_dict(module.state_dict())
    with pytest.raises(ValueError, match="global_batch_size = 4, this run has 5"):
        other.train_dataloader()


def test_a_state_for_validation_does_not_move_training(tmp_path: Path) -> None:
    module = SetUp(4)
    model = Evaluated()
    one = trainer(tmp_path, max_epochs=1)
    one.fit(model, datamodule=module)
    one.save_checkpoint(tmp_path / "end.ckpt")
    trainer(tmp_path).validate(model, datamodule=module, ckpt_path=tmp_path / "end.ckpt")
    second = Evaluated()
    trainer(tmp_path, max_epochs=1).fit(second, datamodule=module)
    assert second.seen == model.seen


def test_a_module_with_a_trainer_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    module = TokensModule(Tokens(LENGTHS), global_batch_size=4, multiprocessing_context="spawn", num_workers=1)
    model = Recorder()
    trainer(tmp_path, max_epochs=1).fit(model, datamodule=module)
    assert len(model.seen) == 3
    copy = pickle.loads(pickle.dumps(module))
    assert copy.trainer is None
    assert module.trainer is not None
    assert isinstance(copy.train_dataloader(), DCPLoader)


def test_loaders_are_of_the_right_kind() -> None:
    """The Trainer builds a DataLoader anew with its own sampler; ours is none, those of evaluation are."""
    module = SetUp(4)
    module.setup("fit")
    loader = module.train_dataloader()
    assert not isinstance(loader, DataLoader)
    assert not hasattr(loader, "dataset")
    assert isinstance(module.val_dataloader(), DataLoader)
