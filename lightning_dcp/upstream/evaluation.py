"""The Trainer's loops of evaluation, and the writers of predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter


def evaluation_loops(trainer: pl.Trainer) -> tuple[Any, ...]:
    """The loops of validation and test."""
    return trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop


Around = Callable[[Any, Callable[[], None]], bool]
"""Gets an item and what runs it with all hooks; says whether what was predicted counts."""


@contextmanager
def around_evaluation(trainer: pl.Trainer, around: Around) -> Iterator[None]:
    """Run something around each item of validation, test and prediction, with all its hooks and logging.

    No public hook encloses them: the module's own ``on_validation_batch_end`` comes after those of all callbacks.

    Args:
        trainer: whose loops.
        around: see :data:`Around`.
    """
    loops = dict.fromkeys(evaluation_loops(trainer), "_evaluation_step")
    loops[trainer.predict_loop] = "_predict_step"
    for loop, name in loops.items():
        vars(loop)[name] = _enclosed(trainer, getattr(loop, name), around, name == "_predict_step")
    try:
        yield
    finally:
        for loop, name in loops.items():
            vars(loop).pop(name, None)


def _enclosed(
    trainer: pl.Trainer, step: Callable[..., None], around: Around, predicting: bool
) -> Callable[..., None]:
    def enclosed(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        def run() -> None:
            step(batch, batch_idx, dataloader_idx, dataloader_iter)

        if not predicting:
            around(batch, run)
            return
        loop = trainer.predict_loop
        kept = [values[dataloader_idx] for values in (loop._predictions, loop.epoch_batch_indices)]
        lengths = [len(values) for values in kept]
        if not around(batch, run):
            for values, length in zip(kept, lengths, strict=True):
                del values[length:]

    return enclosed


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """What is called in the place of a writer's hook."""


@contextmanager
def silent_writers(trainer: pl.Trainer) -> Iterator[None]:
    """Keep predictions that do not count from the writers that write by batch."""
    writers = [c for c in trainer.callbacks if isinstance(c, BasePredictionWriter)]  # type: ignore[attr-defined]
    for writer in writers:
        vars(writer)["on_predict_batch_end"] = _write_nothing
    try:
        yield
    finally:
        for writer in writers:
            vars(writer).pop("on_predict_batch_end", None)
