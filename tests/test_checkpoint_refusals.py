"""What cannot be resumed, or would be trained otherwise than it was asked for, ends every rank with a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_dcp.checkpoint import Section
from tests.checkpointing import Rich, RichAdam, Run, read, resume_and_listen, train
from tests.pool import Pool


class OtherGroups(Rich):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class NoTraining(Rich):
    """With a group of frozen weights only."""

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        return super().optimizer([*groups, {"params": [self.frozen]}])


@pytest.mark.feature(
    "Checkpoints", "DeepSpeed's folders", "refused: the message says how to get the weights out of one"
)
def test_what_cannot_be_resumed_is_refused_by_every_rank(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "2.ckpt"
    pool.run(train, 2, Run(steps=2, save=str(path)), timeout=60.0)

    def refused(file: Path, **kwargs: Any) -> str:
        (first, _), (second, _) = pool.run(resume_and_listen, 2, Run(resume=str(file), **kwargs), timeout=60.0)
        assert first == second or "StepError" in second
        return str(first)

    folder = tmp_path / "folder.ckpt"
    folder.mkdir()
    assert "folder.ckpt is a folder, as DeepSpeed writes it; allowed is a checkpoint in one file" in refused(
        folder
    )
    assert "FileNotFoundError: there is no checkpoint" in refused(tmp_path / "none.ckpt")
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(path.read_bytes()[:5000])
    assert "cut.ckpt is no whole checkpoint" in refused(cut)
    cut.write_bytes(b"")
    assert "cut.ckpt is no whole checkpoint" in refused(cut)
    cut.write_text("epoch: 3\n")
    assert "cut.ckpt is no whole checkpoint" in refused(cut)
    later = tmp_path / "later.ckpt"
    content = read(path)
    content[Section.KEY]["version"] = 2
    torch.save(content, later)
    assert "has version 2; this lightning_dcp reads version 1" in refused(later)
    assert "The checkpoint's optimizer has groups of [" in refused(path, module=OtherGroups)
    assert "has the settings ['dampening', 'momentum', 'nesterov'], which AdamW has not" in refused(
        path, module=RichAdam
    )
    content = read(path)
    del content[Section.KEY]["settings"]
    torch.save(content, later)
    assert "part 'lightning_dcp' is damaged (KeyError: 'settings')" in refused(later)
    torch.save({**content, Section.KEY: [1]}, later)
    assert "part 'lightning_dcp' is damaged (it is a list)" in refused(later)
    content = read(path)
    name, state = next(iter(content["optimizer_states"][0]["state"].items()))
    state["momentum_buffer"] = torch.zeros(3, 7)
    torch.save(content, later)
    assert f"has a state 'momentum_buffer' of shape (3, 7) for {name}, which has the shape (" in refused(later)


def _resume_own_file(run: Run, paths: list[str]) -> str:
    return resume_and_listen(replace(run, resume=paths[dist.get_rank()]))[0]


def test_ranks_that_read_different_files_say_so(pool: Pool, tmp_path: Path) -> None:
    """A node's own disk may have the file of an earlier step, or of another run."""
    paths = [str(tmp_path / f"{steps}.ckpt") for steps in (1, 2)]
    pool.run(train, 2, Run(steps=1, save=paths[0]), timeout=60.0)
    pool.run(train, 2, Run(steps=2, save=paths[1]), timeout=60.0)
    for answer in pool.run(_resume_own_file, 2, Run(), paths, timeout=60.0):
        assert "the ranks have read different checkpoints" in answer
        assert "ranks [0] one of step 1; ranks [1] one of step 2" in answer
    content = read(paths[1])
    content["state_dict"] = {k: v + 1 for k, v in content["state_dict"].items()}
    torch.save(content, paths[0])
    for answer in pool.run(_resume_own_file, 2, Run(), paths, timeout=60.0):
        assert "the ranks have read different checkpoints" in answer


class SaveByHand(pl.Callback):
    """A file of weights, by the strategy itself."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy.save_checkpoint({"state_dict": module.state_dict()}, self.path)


def test_a_file_by_hand_has_no_loops(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "hand.ckpt"
    pool.run(train, 2, Run(steps=1, callbacks=(SaveByHand(str(path)),)), timeout=60.0)
    assert read(path).keys() == {"state_dict", Section.KEY}


class RichAdagrad(Rich):
    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(groups, lr=0.1)


class RichAdafactor(Rich):
    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(groups, lr=0.1)


class Lamb(torch.optim.SGD):
    """By its name as in other libraries."""


class RichLamb(Rich):
    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return type("Scheduled", (Lamb,), {})(groups, lr=0.1)  # type: ignore[no-any-return]


class Elsewhere(Rich):
    """The optimizer has a parameter that the module does not know."""

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return super().optimizer([*groups, {"params": [torch.nn.Parameter(torch.zeros(2, 5))]}])


class RichNorm(Rich):
    def __init__(self, case: Any) -> None:
        super().__init__(case)
        self.norm = torch.nn.BatchNorm1d(2)


@pytest.mark.feature(
    "Trainer",
    "optimizers that are not element-wise (`Adafactor`, LAMB, ...), `Adagrad`",
    "refused: use AdamW, SGD, ...",
)
@pytest.mark.feature("Callbacks", "`StochasticWeightAveraging`", "refused with a batch norm")
@pytest.mark.parametrize(
    ("module", "callbacks", "sentence"),
    [
        (NoTraining, (), "parameter group 2 of the optimizer has no parameter with"),
        (RichAdagrad, (), "returned an Adagrad, which DeepSpeed replaces"),
        (RichAdafactor, (), "returned Adafactor, whose update of an element (Adafactor) depends on the others"),
        (RichLamb, (), "returned Scheduled, whose update of an element (Lamb) depends on the others"),
        (
            Elsewhere,
            (),
            "group 2 of the optimizer has a parameter of shape (2, 5) that is no parameter of Elsewhere",
        ),
        (
            RichNorm,
            (StochasticWeightAveraging(0.1),),
            "StochasticWeightAveraging on RichNorm, which has a batch norm",
        ),
    ],
    ids=["frozen-group", "adagrad", "adafactor", "lamb", "elsewhere", "batch-norm"],
)
def test_what_would_be_trained_otherwise_is_refused(
    pool: Pool, module: type[Rich], callbacks: tuple[Any, ...], sentence: str
) -> None:
    answers = pool.run(resume_and_listen, 2, Run(module=module, callbacks=callbacks), timeout=60.0)
    assert all(sentence in text for text, _ in answers)
