"""Steps whose micro-batches are padded: bounds that price padding, and plans near them."""

from __future__ import annotations

from lightning_dcp.planners.padded.bounds import ALL, Bounds, usual_margin
from lightning_dcp.planners.padded.search import plan_padded

__all__ = ["ALL", "Bounds", "plan_padded", "usual_margin"]
