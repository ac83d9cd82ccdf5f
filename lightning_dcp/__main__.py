"""``python -m lightning_dcp`` is ``lightning-dcp``."""

from __future__ import annotations

import sys

from lightning_dcp.cli import main

if __name__ == "__main__":
    sys.exit(main())
