"""Planners: one protocol, one output type."""

from __future__ import annotations

from typing import Any

from lightning_dcp.planners.balanced import Balanced
from lightning_dcp.planners.bound import lower_bound
from lightning_dcp.planners.floating import Floating
from lightning_dcp.planners.grouped import Bucket, DCPInter, DCPIntra, PackedBaseline
from lightning_dcp.planners.options import allowed_options
from lightning_dcp.planners.protocol import DrawingPlanner, InfeasibleError, Limits, Planner, PlanRequest
from lightning_dcp.planners.static import Replay, Static

__all__ = [
    "PLANNERS",
    "Balanced",
    "Bucket",
    "DCPInter",
    "DCPIntra",
    "DrawingPlanner",
    "Floating",
    "InfeasibleError",
    "Limits",
    "PackedBaseline",
    "PlanRequest",
    "Planner",
    "Replay",
    "Static",
    "class_path_of",
    "create",
    "lower_bound",
]

_CLASSES: dict[str, type[Planner]] = {
    "balanced": Balanced,
    "bucket": Bucket,
    "dcp-inter": DCPInter,
    "dcp-intra": DCPIntra,
    "floating": Floating,
    "packed": PackedBaseline,
    "replay": Replay,
    "static": Static,
}

PLANNERS = tuple(_CLASSES)
"""Names that :func:`create` knows."""


def class_path_of(name: str) -> str:
    """Where the class of a planner's name is imported from, as configurations write it."""
    return f"{__name__}.{_CLASSES[name].__name__}"


def create(planner: str | Planner, /, **options: Any) -> Planner:
    """The planner of this name, or the given one as it is.

    Args:
        planner: one of :data:`PLANNERS`, or an object with ``name``, ``draws``, ``lockstep`` and ``plan``.
        options: arguments of the planner's class, such as ``sp_size=2`` for ``static``, ``file=...`` for ``replay``,
            ``min_samples=256, max_samples=1024`` for ``floating``.

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
    if planner not in _CLASSES:
        raise ValueError(f"planner {planner!r} is unknown; allowed are {', '.join(PLANNERS)}")
    allowed = allowed_options(_CLASSES[planner])
    if set(options) - set(allowed):
        raise ValueError(
            f"planner {planner!r} has no option {sorted(set(options) - set(allowed))}; allowed are {', '.join(allowed)}"
        )
    try:
        return _CLASSES[planner](**options)
    except TypeError as error:
        raise ValueError(f"planner {planner!r} cannot be made with {options}: {error}") from error
