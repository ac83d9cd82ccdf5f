"""All figures, one behind the other."""

from __future__ import annotations

from benchmarks.figures import figure_2, figure_4, figure_5, figure_8, figure_9, figure_10
from benchmarks.figures.common import main

FIGURES = tuple(module.FIGURE for module in (figure_2, figure_4, figure_5, figure_8, figure_9, figure_10))

if __name__ == "__main__":
    main(FIGURES)
