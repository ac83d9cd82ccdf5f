"""``lightning-dcp audit``: its arguments. What it does stands in :mod:`lightning_dcp.cli.auditing`."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dcp.cli.arguments import LENGTHS, add_cluster, add_data
from lightning_dcp.cli.parsing import Parser, positive_int

_DESCRIPTION = (
    "The lengths of a dataset in terms of GPU time, on one screen: what is long, what it costs, what is lost."
)


def parser() -> Parser:
    """The parser of the command."""
    found = Parser(prog="lightning-dcp audit", description=_DESCRIPTION)
    found.add_argument("lengths", metavar="LENGTHS", help=LENGTHS)
    found.add_argument(
        "--steps", type=positive_int, default=4, metavar="K", help="steps to simulate (default: %(default)s)"
    )
    add_cluster(found)
    add_data(found)
    return found


def run(words: Sequence[str]) -> int:
    """Parse the words and print the audit."""
    arguments = parser().parse_args(words)
    from lightning_dcp.cli.auditing import answer

    return answer(arguments)
