"""Collectives of all ranks that user code asks for inside a micro-batch: refused, with the call and the way out.

Ranks run different numbers of micro-batches, so such a call would meet another rank's vote. It is not made; the step is
void, and the error is raised at its end on all ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_dcp.sequence_parallel.context import MicroBatchContext

_CALLS = (
    *(
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
    ),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("new_group", "new_subgroups", "new_subgroups_by_enumeration"),
)
"""Public functions of ``torch.distributed`` that every rank of a group has to call, those that make groups too."""


class _Done:
    """What an asynchronous call that was not made returns."""

    def wait(self, *_args: Any, **_kwargs: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class WorldCalls:
    """Watches what user code calls inside a micro-batch.

    Args:
        world_size: number of ranks; with one every call passes.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._context: MicroBatchContext | None = None
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def inside(self, context: MicroBatchContext) -> Iterator[None]:
        """Refuse from here on, also what user code calls by ``torch.distributed`` itself.

        Calls over this micro-batch's sequence-parallel group, or over ranks of it, pass. Not seen are functions that
        were imported by name, functional collectives and sends from rank to rank.

        Args:
            context: of the micro-batch that runs inside.
        """
        self._context = context
        originals = {name: getattr(dist, name) for name in _CALLS} if self._world_size > 1 else {}
        try:
            for name, original in originals.items():
                setattr(dist, name, self._wrapper(name, original))
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
            self._context = None

    def refuse(self, name: str, instead: str = "gather outside of training_step") -> bool:
        """Whether this is asked for inside a micro-batch; the step is void then.

        Args:
            name: the call, as the user wrote it.
            instead: what to write in its place.
        """
        if self._context is None or self._world_size == 1:
            return False
        self._context.failures.append(
            f"{name} was called inside training_step; ranks run different numbers of micro-batches, so no collective "
            f"over all ranks may run there. Instead, {instead}"
        )
        return True

    def refuse_log(self, key: str, arguments: Mapping[str, Any]) -> None:
        """Refuse a ``self.log`` that would reduce over all ranks at each call.

        Args:
            key: what is logged.
            arguments: of Lightning's ``log``, with the defaults of the hook filled in.
        """
        if not (arguments["sync_dist"] and arguments["on_step"]) or arguments["rank_zero_only"]:
            return
        epoch = ", on_epoch=True" if arguments["on_epoch"] else ""
        self.refuse(
            f"self.log({key!r}, ..., on_step=True{epoch}, sync_dist=True)",
            f"write self.log({key!r}, ..., on_step=True, on_epoch=True): the value at each step is the mean over "
            "this rank's micro-batches, that of the epoch is over all ranks also without sync_dist. The exact mean of "
            "the loss over all ranks at each step is logged as 'loss' already",
        )

    def _wrapper(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        known, wrapper = self._wrapped.get(name, (None, None))
        if known is original:
            assert wrapper is not None
            return wrapper  # type: ignore[no-any-return]
        names = list(inspect.signature(original).parameters)
        place = names.index("group") if "group" in names else len(names)

        def call(*args: Any, **kwargs: Any) -> Any:
            group = args[place] if len(args) > place else kwargs.get("group")
            if self._is_within(group):
                return original(*args, **kwargs)
            caller = sys._getframe(1)
            self.refuse(f"torch.distributed.{name} ({caller.f_code.co_filename}:{caller.f_lineno})")
            return _Done() if kwargs.get("async_op") else None

        self._wrapped[name] = original, call
        return call

    def _is_within(self, group: Any) -> bool:
        """Whether all ranks of a group run this micro-batch."""
        context = self._context
        if context is None or (group is context.group.handle and group is not None):
            return True
        if group is None or group is dist.group.WORLD:
            return False
        return set(dist.get_process_group_ranks(group)) <= set(context.group.ranks)
