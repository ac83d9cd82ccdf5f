"""Which train loader a fit uses and where it starts: behind a loaded state, or at the trainer's epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.planners.protocol import Planner


def is_fitting(trainer: pl.Trainer | None) -> bool:
    """Whether a fit is under way (and not a validation, test or prediction on its own)."""
    return trainer is not None and trainer.state.fn == TrainerFn.FITTING


def planner_of(trainer: pl.Trainer | None) -> Planner | None:
    """The planner that the strategy is going to plan with, where it says so; asked before there is a profile."""
    planner = getattr(trainer.strategy, "planner", None) if trainer is not None else None
    return planner if isinstance(planner, Planner) else None


class LoaderKeeper:
    """Hands a loaded position to the loader that will train, whichever of the two comes first.

    The Trainer asks for the train loader once per fit, or again every few epochs, and the state of a checkpoint
    comes before or after that. A state serves until a loader that has it was iterated.
    """

    def __init__(self) -> None:
        self.loader: DCPLoader | None = None
        self._trainer: pl.Trainer | None = None
        self._state: Mapping[str, Any] | None = None
        self._holder: DCPLoader | None = None

    def waiting(self, dataset: Any, trainer: pl.Trainer | None) -> DCPLoader | None:
        """A loader of this fit over the same dataset that nothing was read from yet: it is handed out again."""
        loader = self.loader
        fresh = loader is not None and not loader.started and loader.source is dataset
        return loader if fresh and trainer is not None and trainer is self._trainer else None

    def adopt(self, loader: DCPLoader, trainer: pl.Trainer | None) -> None:
        """Put a new loader where the run stands."""
        if self._holder is not None and self._holder.started:
            self._state, self._holder = None, None
        former = self.loader
        self.loader, self._trainer = loader, trainer
        if self._state is not None:
            loader.load_state_dict(self._state)
            self._holder = loader
        elif trainer is not None and is_fitting(trainer):
            loader.sampler.set_epoch(trainer.current_epoch)
            if former is not None and trainer.global_step > 0:
                loader.sampler.go_on_from(former.sampler)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position; a loader that was read from already belongs to an earlier fit."""
        self._state, self._holder = state, None
        if self.loader is not None and not self.loader.started:
            self.loader.load_state_dict(state)
            self._holder = self.loader
