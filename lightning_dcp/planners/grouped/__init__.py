"""The paper's planners: batches of similar lengths, drawn from the permutation (paper 3.3, 3.4 and its baselines)."""

from __future__ import annotations

from lightning_dcp.planners.grouped.bucket import Bucket
from lightning_dcp.planners.grouped.dcp import DCPInter, DCPIntra
from lightning_dcp.planners.grouped.packed import PackedBaseline

__all__ = ["Bucket", "DCPInter", "DCPIntra", "PackedBaseline"]
