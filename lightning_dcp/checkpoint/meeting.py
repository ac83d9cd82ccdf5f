"""Waiting for every rank before a save, by the store that the process group was made with.

A collective that one rank enters alone is matched with the next one of the others, whatever that is: the gather of a
save with the reduction of a step. The store has no such order, so a rank that saves alone finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import _get_default_store

_LIMIT = timedelta(minutes=30)
"""As long as torch's own collectives wait."""


class LonelyCallError(RuntimeError):
    """What all ranks have to call together was not called by all; the message names the missing ranks."""


class Meeting:
    """Counts how often this rank came; every rank makes one, after the process group.

    Args:
        rank: global rank of this process.
        world_size: number of ranks; with one nobody is waited for.
        limit: longest wait; ``None`` for half an hour.
    """

    def __init__(self, rank: int, world_size: int, limit: timedelta | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.limit = limit or _LIMIT
        self._round = 0
        # A process group outlives a fit, and what an earlier fit left in its store must not count for this one. Now and
        # not at the first wait, which in an earlier fit some ranks may never have come to.
        self._name = _get_default_store().add(f"lightning_dcp/meetings/{rank}", 1) if world_size > 1 else 0

    def wait(self, doing: str) -> None:
        """Come back when all ranks have come as often as this one; a few messages to the store, by every rank.

        Args:
            doing: what the ranks meet for, for the sentence.

        Raises:
            LonelyCallError: some rank did not come in time.
        """
        if self.world_size == 1:
            return
        store = _get_default_store()
        store.set(self._key(self._round, self.rank), "")
        everyone = [self._key(self._round, rank) for rank in range(self.world_size)]
        everyone_came = self._key(self._round, "all")
        try:
            # Rank 0 asks for all and tells the others, so that the store answers 2 W questions and not W * W.
            if self.rank == 0:
                store.wait(everyone, self.limit)
                store.set(everyone_came, "")
            else:
                store.wait([everyone_came], self.limit)
        except RuntimeError as error:
            raise LonelyCallError(self._sentence(doing, store.check, everyone)) from error
        if self._round:
            # Whoever is in this round has left the one before.
            store.delete_key(self._key(self._round - 1, self.rank))
            if self.rank == 0:
                store.delete_key(self._key(self._round - 1, "all"))
        self._round += 1

    def _key(self, number: int, who: int | str) -> str:
        return f"lightning_dcp/meeting/{self._name}/{number}/{who}"

    def _sentence(self, doing: str, there: Callable[[list[str]], bool], keys: list[str]) -> str:
        came = [rank for rank, key in enumerate(keys) if there([key])]
        missing = [rank for rank in range(self.world_size) if rank not in came]
        return (
            f"{doing} waited {self.limit.total_seconds():.0f} s for ranks {missing}, only ranks {came} called it. "
            "Every rank has to, since each holds a part of the optimizer's state: call trainer.save_checkpoint without "
            "`if trainer.is_global_zero`. Nothing was written"
        )
