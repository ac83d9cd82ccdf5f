"""The file of executed plans."""

from __future__ import annotations

from pathlib import Path

from lightning_dcp.plan import IterationPlan


def keep_lines(file: Path, number: int) -> None:
    """Cut a file behind its first lines; the last of them may have been cut off by a kill, and is left out then."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if number and file.exists():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[:number]
        kept = "".join(line for line in lines if line.endswith("\n"))
    else:
        kept = ""
    file.write_text(kept, encoding="utf-8")


def append(file: Path, plan: IterationPlan) -> None:
    """Add a plan as one line."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(plan.to_json() + "\n")
