"""The self-check: two real samples of the user's own model, run in every way that a plan may choose."""

from lightning_dcp.selfcheck.check import Freedoms, SelfCheckError, self_check

__all__ = ["Freedoms", "SelfCheckError", "self_check"]
