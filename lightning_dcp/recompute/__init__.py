"""Recomputing layers: which layers of a model repeat, and a switch for how many of them are recomputed."""

from lightning_dcp.recompute.families import LayerFamily, RecomputeError, find_families
from lightning_dcp.recompute.switch import RecomputeSwitch

__all__ = ["LayerFamily", "RecomputeError", "RecomputeSwitch", "find_families"]
