"""A dry run: all of ``setup()`` on the real ranks, the first plans, and no step."""

from lightning_dcp.rehearsal.facts import DryRun, Family
from lightning_dcp.rehearsal.running import dry_run

__all__ = ["DryRun", "Family", "dry_run"]
