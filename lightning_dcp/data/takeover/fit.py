"""The train loaders of a fit: taken over once, kept until they are read, made anew where the Trainer reloads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.position import LoaderKeeper, planner_of
from lightning_dcp.data.takeover.frames import unframed
from lightning_dcp.data.takeover.refusals import check_given
from lightning_dcp.data.takeover.taking import Around, taken


class TrainLoaders:
    """Gives the Trainer what trains in the place of a user's loader.

    A ``DCPLoader`` passes. The loader of anything else is asked for once, however often the Trainer and the strategy
    do before its first step.
    """

    def __init__(self) -> None:
        self._keeper = LoaderKeeper()
        self._waiting = False

    def begin(self) -> None:
        """A fit begins; what an earlier one left unread is not handed out again."""
        self._waiting = False

    def __call__(self, ask: Callable[[], Any], trainer: pl.Trainer) -> DCPLoader:
        """The train loader of a trainer; called by every rank.

        Args:
            ask: gives what the user gave to ``trainer.fit``, or what his hook returns.
            trainer: that asks.

        Raises:
            MisconfigurationException: the loader cannot be taken over; with what was got, what is allowed and what to
                do. The same on all ranks.
        """
        loader = self._keeper.loader
        if self._waiting and loader is not None and not loader.started:
            return loader
        given = ask()
        check_given(given)
        (found,), frame = unframed(given)
        if isinstance(found, DCPLoader):
            return found
        try:
            loader = taken(found, Around.of(trainer, frame))
            planner = planner_of(trainer)
            if planner is not None:
                loader.announce(planner)
            self._keeper.adopt(loader, trainer)
        except ValueError as error:
            raise MisconfigurationException(f"the train loader cannot be taken over: {error}") from error
        self._waiting = True
        return loader
