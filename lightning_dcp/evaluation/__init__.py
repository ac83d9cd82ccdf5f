"""Validation, test and prediction under ``DCPStrategy``."""

from lightning_dcp.evaluation.strategy import EvaluatingStrategy

__all__ = ["EvaluatingStrategy"]
