"""A user's own train loader, taken over: its samples and settings, in steps that are planned."""

from lightning_dcp.data.takeover.fit import TrainLoaders
from lightning_dcp.data.takeover.refusals import check_given

__all__ = ["TrainLoaders", "check_given"]
