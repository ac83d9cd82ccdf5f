"""How processes are started, and told to end."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGKILL
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors import accelerator_connector


def is_interactive() -> bool:
    """Whether the Trainer takes this for a notebook or another interactive session, where there is no script."""
    return bool(accelerator_connector._IS_INTERACTIVE)  # type: ignore[attr-defined]


class ForkLauncher(_MultiProcessingLauncher):
    """Runs the Trainer's functions in forked processes; weights and metrics come back from rank 0.

    Args:
        strategy: whose processes are started.
        check: called before each fork; raises where the forked processes could hang.
    """

    def __init__(self, strategy: Any, check: Callable[[], None]) -> None:
        super().__init__(strategy, start_method="fork")
        self._check = check

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Fork, run and join; where that is interrupted, no process goes on behind the notebook's back."""
        self._check()
        try:
            return super().launch(function, *args, **kwargs)
        except BaseException:
            self.kill(SIGKILL)
            for process in self.procs:
                process.join()
            raise


def notify_sigterm(trainer: pl.Trainer, asked: Callable[[], bool]) -> None:
    """Take SIGTERM without Lightning's broadcast in the signal handler.

    Wherever the signal finds a rank, that broadcast meets another collective of the other ranks: they hang or die with
    an error about sizes. Call it before the Trainer registers its handlers.

    Args:
        trainer: whose handler is replaced.
        asked: called when the signal arrives; ``True`` where the strategy tells the other ranks, and ends the run with
            :func:`end_by_sigterm`. Otherwise this rank ends where Lightning looks next.
    """
    connector = trainer._signal_connector

    def notified(signum: int, _frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        if not asked():
            connector.received_sigterm = True

    connector._sigterm_notifier_fn = notified  # type: ignore[method-assign,assignment]


def end_by_sigterm(trainer: pl.Trainer) -> None:
    """Let the Trainer raise its ``SIGTERMException`` at the end of the batch; called by all ranks in the same one."""
    trainer._signal_connector.received_sigterm = True
