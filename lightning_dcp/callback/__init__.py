"""What a user sees of the plans: exact loss, throughput, where the time went, receipts."""

from lightning_dcp.callback.callback import PREFIX, DCPCallback

__all__ = ["PREFIX", "DCPCallback"]
