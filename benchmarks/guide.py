"""Runs the commands of ``docs/simulate.md`` again and puts their output into it: ``python -m benchmarks.guide``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).parent.parent / "docs"
GUIDE, PICTURE = DOCS / "simulate.md", "simulate.png"
LENGTHS = (900, 12_000, 250_000, 700)
"""The file ``lengths.txt`` of the example of wrong input."""

_BLOCK = re.compile(r"^```\n\$ (lightning-dcp (?:.*\\\n)*.*)\n(?:(?!```).*\n)*```$", re.MULTILINE)


def main() -> None:
    """Refresh the guide and its picture."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lengths.txt").write_text("\n".join(map(str, LENGTHS)) + "\n", encoding="utf-8")
        text = GUIDE.read_text(encoding="utf-8")
        GUIDE.write_text(_BLOCK.sub(lambda block: _run(block, folder), text), encoding="utf-8")
        (DOCS / PICTURE).write_bytes((folder / PICTURE).read_bytes())


def _run(block: re.Match[str], folder: Path) -> str:
    """The block with what the command prints now; the progress bars are left out."""
    words = shlex.split(block[1].replace("\\\n", " "))[1:]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_dcp", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(DOCS.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    printed = done.stdout or done.stderr
    if not printed or (done.returncode and not printed.startswith("lightning-dcp")):
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}: {done.stderr}")
    return f"```\n$ {block[1]}\n{printed.rstrip()}\n```"


if __name__ == "__main__":
    main()
