"""Data-Centric Parallel for PyTorch Lightning: every optimizer step runs by a plan that follows its data.

Names are imported when they are first used: planners and cost models need no torch, and a command that only
plans starts in a fraction of a second.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_dcp.callback import DCPCallback
    from lightning_dcp.cost import CostModel
    from lightning_dcp.data import DCPBatch, DCPDataModule
    from lightning_dcp.plan import IterationPlan, MicroBatch
    from lightning_dcp.planners import Planner, PlanRequest
    from lightning_dcp.profile import Measurement, Profile
    from lightning_dcp.rehearsal import dry_run
    from lightning_dcp.strategy import DCPStrategy

__version__ = "0.1.0"

_HOMES = {
    "CostModel": "cost",
    "DCPBatch": "data",
    "DCPCallback": "callback",
    "DCPDataModule": "data",
    "DCPStrategy": "strategy",
    "IterationPlan": "plan",
    "Measurement": "profile",
    "MicroBatch": "plan",
    "PlanRequest": "planners",
    "Planner": "planners",
    "Profile": "profile",
    "dry_run": "rehearsal",
}

__all__ = [
    "CostModel",
    "DCPBatch",
    "DCPCallback",
    "DCPDataModule",
    "DCPStrategy",
    "IterationPlan",
    "Measurement",
    "MicroBatch",
    "PlanRequest",
    "Planner",
    "Profile",
    "dry_run",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


# Where Lightning is there already, its import costs nothing more and Trainer(strategy="dcp") can work at once.
if "lightning.pytorch" in sys.modules:
    importlib.import_module(f"{__name__}.strategy")
