"""Recomputing layers: which layers of a model repeat, and a switch for how many of them are recomputed."""

from lightning_dcp.recompute.families import LayerFamily, RecomputeError, find_families
from lightning_dcp.recompute.switch import RecomputeSwitch, call_of, replaced_call

__all__ = ["LayerFamily", "RecomputeError", "RecomputeSwitch", "call_of", "find_families", "replaced_call"]
