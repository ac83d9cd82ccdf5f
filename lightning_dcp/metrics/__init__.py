"""Numbers about steps and runs, computed from plans, records and the cost model; nothing here communicates."""

from lightning_dcp.metrics.columns import Columns
from lightning_dcp.metrics.flops import FlopCount, fitted
from lightning_dcp.metrics.forecast import Forecast
from lightning_dcp.metrics.rates import Rates
from lightning_dcp.metrics.receipts import EpochLedger, Receipt, resume_line
from lightning_dcp.metrics.steps import GapWatch, mean_settings, step_metrics
from lightning_dcp.metrics.waterfall import PARTS, Waterfall, busy_shares

__all__ = [
    "PARTS",
    "Columns",
    "EpochLedger",
    "FlopCount",
    "Forecast",
    "GapWatch",
    "Rates",
    "Receipt",
    "Waterfall",
    "busy_shares",
    "fitted",
    "mean_settings",
    "resume_line",
    "step_metrics",
]
