"""What happens once in ``setup()``: from the user's model and data to a bound planner."""

from lightning_dcp.preparation.preparing import Prepared, limits_of, loss_settings, prepare
from lightning_dcp.preparation.settings import Settings, Site
from lightning_dcp.preparation.sizes import Sizes, chosen_sizes, short_samples, sp_sizes, watch_attention

__all__ = [
    "Prepared",
    "Settings",
    "Site",
    "Sizes",
    "chosen_sizes",
    "limits_of",
    "loss_settings",
    "prepare",
    "short_samples",
    "sp_sizes",
    "watch_attention",
]
