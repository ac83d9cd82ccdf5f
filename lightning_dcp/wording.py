"""Text for the screen: columns, paragraphs and numbers as people say them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the first one flush left, the others flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def labelled(label: str, text: str) -> str:
    """A paragraph with its name in front of it."""
    # A number stays on one line with its unit.
    bound = re.sub(r"(\d) (GB|MB|%)", "\\1\0\\2", text)
    return textwrap.fill(bound, 112, initial_indent=f"{label:<16}", subsequent_indent=" " * 16).replace("\0", " ")


def percent(ratio: float) -> str:
    """A ratio with one digit behind the point."""
    return f"{100 * ratio:.1f} %"


def gigabytes(amount: int) -> str:
    """Bytes as people say them."""
    return f"{amount / 1e9:,.1f} GB" if amount >= 1e9 else f"{amount / 1e6:,.1f} MB"


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
