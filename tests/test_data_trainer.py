"""The loader under a real Trainer: whole epochs, resume at every place, limits, no false warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_dcp.data import DCPBatch, DCPLoader
from tests.data_tools import LENGTHS, BindingStrategy, Recorder, Tokens, TokensModule, context, trainer

SIZES = [{"global_batch_size": 4}, {"global_batch_tokens": 20}]
EPOCHS = 3
KEPT: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}


def _fit(folder: Path, size: dict[str, Any], model: Recorder | None = None, **arguments: Any) -> Recorder:
    model = model or Recorder()
    ckpt_path = arguments.pop("ckpt_path", None)
    data = {"num_workers": arguments.pop("num_workers", 0), "shuffle": arguments.pop("shuffle", True)}
    module = TokensModule(Tokens(LENGTHS), **size, **data)
    arguments.setdefault("max_epochs", EPOCHS)
    trainer(folder, **arguments).fit(model, datamodule=module, ckpt_path=ckpt_path)
    return model


def _flat(steps: list[list[int]]) -> list[int]:
    return [i for step in steps for i in step]


def _every_sample_once(model: Recorder, epochs: int = EPOCHS) -> None:
    found = model.epochs()
    assert sorted(found) == list(range(epochs))
    for steps in found.values():
        assert sorted(_flat(steps)) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_epoch_runs_to_its_end_in_its_own_order(
    tmp_path: Path, size: dict[str, Any], num_workers: int
) -> None:
    """Lightning-AI/pytorch-lightning#18023 and #13316: no epoch is cut short, each has its own order."""
    first = _fit(tmp_path, size, num_workers=num_workers)
    _every_sample_once(first)
    orders = [_flat(steps) for steps in first.epochs().values()]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert _fit(tmp_path, size, num_workers=num_workers).seen == first.seen


def test_numbers_of_steps_really_differ(tmp_path: Path) -> None:
    """Guards the test above: with a fixed number of steps it could not find epochs that are cut short."""
    counts = [len(steps) for steps in _fit(tmp_path, SIZES[1], max_epochs=12).epochs().values()]
    assert len(set(counts)) > 1
    assert counts[0] < max(counts)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_after_every_step(tmp_path: Path, size: dict[str, Any], late: bool, num_workers: int) -> None:
    """lhotse-speech/lhotse#417, verl-project/verl#7401: neither prefetch nor the end of an epoch loses a step."""
    whole = _fit(tmp_path, size, callbacks=[ModelCheckpoint(tmp_path / "kept", **KEPT)], enable_checkpointing=True)
    steps = range(1, len(whole.seen)) if num_workers == 0 else (1, 3, 4)
    for step in steps:
        rest = _fit(
            tmp_path,
            size,
            ckpt_path=tmp_path / "kept" / f"step={step}.ckpt",
            strategy=BindingStrategy(restore_late=late),
            num_workers=num_workers,
        )
        assert rest.seen == whole.seen[step:], step


@pytest.mark.feature("Trainer", "`estimated_stepping_batches`", "with `global_batch_size`")
@pytest.mark.parametrize("late", [False, True])
def test_resume_when_a_schedule_asked_for_the_loader_first(tmp_path: Path, late: bool) -> None:
    """Lightning-AI/pytorch-lightning#20550: the loader's state is dropped when the loader exists already."""
    whole = _fit(
        tmp_path,
        SIZES[0],
        Recorder(total_steps=True),
        callbacks=[ModelCheckpoint(tmp_path / "kept", **KEPT)],
        enable_checkpointing=True,
    )
    for step in range(1, len(whole.seen)):
        path = tmp_path / "kept" / f"step={step}.ckpt"
        rest = _fit(
            tmp_path,
            SIZES[0],
            Recorder(total_steps=True),
            ckpt_path=path,
            strategy=BindingStrategy(restore_late=late),
        )
        assert rest.seen == whole.seen[step:], step


@pytest.mark.parametrize(("size", "total_steps"), [(SIZES[0], False), (SIZES[0], True), (SIZES[1], False)])
def test_resume_for_more_epochs_after_the_last(tmp_path: Path, size: dict[str, Any], total_steps: bool) -> None:
    """verl-project/verl#7401: the epoch after an exhausted state is not empty."""
    whole = _fit(tmp_path, size)
    kept = ModelCheckpoint(tmp_path / "kept", save_on_train_epoch_end=True, save_top_k=-1, filename="{epoch}")
    _fit(tmp_path, size, Recorder(total_steps), callbacks=[kept], enable_checkpointing=True, max_epochs=2)
    for epoch in range(2):
        rest = _fit(tmp_path, size, Recorder(total_steps), ckpt_path=tmp_path / "kept" / f"epoch={epoch}.ckpt")
        assert rest.epochs() == {e: steps for e, steps in whole.epochs().items() if e > epoch}


@pytest.mark.parametrize("size", SIZES)
def test_resume_from_a_checkpoint_of_a_validation(tmp_path: Path, size: dict[str, Any]) -> None:
    """A checkpoint at the end of a validation stands before Lightning counts its epoch as done."""

    class Validated(Recorder):
        def validation_step(self, batch: dict[str, Any]) -> None:
            assert set(batch) >= {"input_ids", "attention_mask"}

    def fit(ckpt_path: Path | None) -> Recorder:
        module = TokensModule(Tokens(LENGTHS), **size)
        module.val_dataset = Tokens([2, 3])
        model = Validated()
        kept = ModelCheckpoint(
            tmp_path / "kept", save_on_train_epoch_end=False, save_top_k=-1, filename="{epoch}-{step}"
        )
        one = trainer(tmp_path, max_epochs=EPOCHS, callbacks=[kept], enable_checkpointing=True)
        one.fit(model, datamodule=module, ckpt_path=ckpt_path)
        return model

    whole = fit(None)
    _every_sample_once(whole)
    done = 0
    for epoch, steps in whole.epochs().items():
        done += len(steps)
        rest = fit(tmp_path / "kept" / f"epoch={epoch}-step={done}.ckpt")
        assert rest.seen == whole.seen[done:]


class Stateless:
    """A loader that hides its position."""

    def __init__(self, loader: DCPLoader) -> None:
        self.loader = loader
        loader.bind(context())

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[DCPBatch]:
        return iter(self.loader)


class StatelessModule(TokensModule):
    def train_dataloader(self) -> Any:
        return Stateless(super().train_dataloader())


def test_no_warning_of_a_loader_that_cannot_resume(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#11029: the loader is stateful, so the warning would be false."""
    kept = ModelCheckpoint(tmp_path / "kept", **KEPT)
    _fit(tmp_path, SIZES[0], callbacks=[kept], enable_checkpointing=True)

    # Without the loader's state, which Lightning would refuse to give to a loader that cannot take it.
    checkpoint = torch.load(tmp_path / "kept" / "step=2.ckpt", weights_only=False)
    del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    torch.save(checkpoint, tmp_path / "bare.ckpt")

    def warned(module: TokensModule, strategy: Any, path: Path) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one = trainer(tmp_path, max_epochs=1, strategy=strategy)
            one.fit(Recorder(), datamodule=module, ckpt_path=path)
        return any("your dataloader is not resumable" in str(w.message) for w in caught)

    data = Tokens(LENGTHS)
    assert warned(
        StatelessModule(data, global_batch_size=4), SingleDeviceStrategy(device="cpu"), tmp_path / "bare.ckpt"
    )
    assert not warned(
        TokensModule(data, global_batch_size=4), BindingStrategy(), tmp_path / "kept" / "step=2.ckpt"
    )


@pytest.mark.parametrize("size", SIZES)
def test_limits_of_the_trainer(tmp_path: Path, size: dict[str, Any]) -> None:
    whole = _fit(tmp_path, size)
    limited = _fit(tmp_path, size, limit_train_batches=2, num_workers=1)
    assert limited.epochs() == {e: steps[:2] for e, steps in whole.epochs().items()}
    assert _fit(tmp_path, size, fast_dev_run=True).seen == whole.seen[:1]
    assert _fit(tmp_path, size, max_epochs=-1, max_steps=7).seen == whole.seen[:7]


def test_a_limited_epoch_resumes_in_the_next(tmp_path: Path) -> None:
    limited: dict[str, Any] = {"limit_train_batches": 2}
    kept = ModelCheckpoint(tmp_path / "kept", **KEPT)
    whole = _fit(tmp_path, SIZES[0], callbacks=[kept], enable_checkpointing=True, **limited)
    for step in range(1, len(whole.seen)):
        rest = _fit(tmp_path, SIZES[0], ckpt_path=tmp_path / "kept" / f"step={step}.ckpt", **limited)
        assert rest.seen == whole.seen[step:], step


@pytest.mark.feature("Trainer", "`overfit_batches`")
def test_overfitting_repeats_the_first_steps(tmp_path: Path) -> None:
    model = _fit(tmp_path, SIZES[0], overfit_batches=2)
    assert [_flat(steps) for steps in model.epochs().values()] == [list(range(8))] * EPOCHS


@pytest.mark.feature("Trainer", "`reload_dataloaders_every_n_epochs`")
def test_reloaded_loaders_go_on(tmp_path: Path) -> None:
    """A loader that is asked for anew in each epoch stands at that epoch and keeps the counters."""
    for size in SIZES:
        whole = _fit(tmp_path, size)
        module, model = TokensModule(Tokens(LENGTHS), **size), Recorder()
        trainer(tmp_path, max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1).fit(model, datamodule=module)
        assert model.seen == whole.seen
        state = module.state_dict()["train_loader"]
        assert (state["consumed_samples"], state["consumed_tokens"]) == (EPOCHS * 11, EPOCHS * sum(LENGTHS))


def test_a_new_trainer_starts_anew_with_the_same_data_module(tmp_path: Path) -> None:
    module, first, second = TokensModule(Tokens(LENGTHS), global_batch_size=4), Recorder(), Recorder()
    trainer(tmp_path, max_steps=2).fit(first, datamodule=module)
    trainer(tmp_path, max_epochs=1).fit(second, datamodule=module)
    assert second.seen[:2] == first.seen
    assert len(second.seen) == 3
    assert module.state_dict()["train_loader"]["consumed_samples"] == len(LENGTHS)


def test_counters_of_samples_and_tokens_survive_a_checkpoint(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#21491: schedules by samples or tokens need counters that are true."""
    kept = ModelCheckpoint(tmp_path / "kept", **KEPT)
    whole = _fit(tmp_path, SIZES[1], callbacks=[kept], enable_checkpointing=True)
    for step in (1, 4, len(whole.seen)):
        checkpoint = torch.load(tmp_path / "kept" / f"step={step}.ckpt", weights_only=False)
        state = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
        ids = [i for _, step_ids in whole.seen[:step] for i in step_ids]
        assert state["consumed_samples"] == len(ids)
        assert state["consumed_tokens"] == sum(LENGTHS[i] for i in ids)


@pytest.mark.feature(
    "Trainer", "`estimated_stepping_batches`", "refused where the number of steps is not known: set `max_steps`"
)
def test_schedule_over_an_unknown_number_of_steps_is_refused_with_advice(tmp_path: Path) -> None:
    class Unbound(BindingStrategy):
        def process_dataloader(self, dataloader: object) -> object:
            return dataloader

    with pytest.raises(RuntimeError, match=r"no planner yet.*Trainer\(max_steps="):
        _fit(tmp_path, SIZES[1], Recorder(total_steps=True), strategy=Unbound())
