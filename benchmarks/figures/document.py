"""The tables of ``docs/benchmarks.md`` from the results: ``python -m benchmarks.figures.document``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures.__main__ import FIGURES
from benchmarks.figures.common import load

DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def filled(text: str) -> str:
    """The text with each figure's table between its two marks, ``<!-- figure_8 -->`` and ``<!-- end -->``."""
    for figure in FIGURES:
        result = load(figure.name)
        facts = f"Computed on {result['date']} ({result['machine']['processor']})."
        block = f"<!-- {figure.name} -->\n\n{figure.table(result)}\n\n{facts}\n\n<!-- end -->"
        before, start, rest = text.partition(f"<!-- {figure.name} -->")
        _, end, after = rest.partition("<!-- end -->")
        if not (start and end):
            raise ValueError(f"{DOCUMENT.name} has no place for {figure.name}; it needs its two marks")
        text = before + block + after
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
