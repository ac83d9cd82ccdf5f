"""Planners: one protocol, one output type."""

from __future__ import annotations

from typing import Any

from lightning_dcp.planners.balanced import Balanced
from lightning_dcp.planners.bound import lower_bound
from lightning_dcp.planners.protocol import InfeasibleError, Limits, Planner, PlanRequest
from lightning_dcp.planners.static import Replay, Static

__all__ = [
    "PLANNERS",
    "Balanced",
    "InfeasibleError",
    "Limits",
    "PlanRequest",
    "Planner",
    "Replay",
    "Static",
    "create",
    "lower_bound",
]

PLANNERS = ("balanced", "replay", "static")
"""Names that :func:`create` knows."""


def create(planner: str | Planner, **options: Any) -> Planner:
    """The planner of this name, or the given one as it is.

    Args:
        planner: one of :data:`PLANNERS`, or an object with ``name``, ``draws``, ``lockstep`` and ``plan``.
        options: arguments of the planner's class, such as ``sp_size=2`` for ``static`` or ``file=...`` for
            ``replay``.

    Raises:
        ValueError: the name is unknown, an option does not exist or misses, or options come with an object.
        TypeError: ``planner`` is neither a name nor a planner.
    """
    if not isinstance(planner, str):
        if not isinstance(planner, Planner) or isinstance(planner, type):
            raise TypeError(f"planner is {planner!r}; allowed are the names {PLANNERS} and Planner objects")
        if options:
            raise ValueError(
                f"options {sorted(options)} belong to a planner's name; set them on the object itself"
            )
        return planner
    classes: dict[str, type[Balanced] | type[Replay] | type[Static]]
    classes = {"balanced": Balanced, "replay": Replay, "static": Static}
    if planner not in classes:
        raise ValueError(f"planner {planner!r} is unknown; allowed are {', '.join(PLANNERS)}")
    try:
        return classes[planner](**options)
    except TypeError as error:
        raise ValueError(f"planner {planner!r} does not take the options {sorted(options)}: {error}") from error
