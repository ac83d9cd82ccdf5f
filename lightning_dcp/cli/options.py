"""Options of ``fit`` that are no part of a configuration."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentTypeError
from pathlib import Path

from lightning_dcp.cli.parsing import Parser, positive_int


def _new_file(text: str) -> str:
    """A file in a folder that is there: the picture is drawn last, when all has been measured."""
    if not Path(text).absolute().parent.is_dir():
        raise ArgumentTypeError(f"{text!r} is in a folder that does not exist")
    return text


def dry_run_options() -> Parser:
    """A parser of the options of the dry run alone; the other words are left over."""
    found = Parser(prog="lightning-dcp fit", add_help=False, usage=SUPPRESS)
    group = found.add_argument_group("dry run")
    group.add_argument(
        "--dry-run", action="store_true", help="set up the run on its ranks, show the first plans, and stop"
    )
    group.add_argument(
        "--dry-run-steps", type=positive_int, default=3, metavar="N", help="plans to show (default: %(default)s)"
    )
    group.add_argument(
        "--dry-run-picture",
        type=_new_file,
        metavar="FILE",
        help="draw the plan that shows most (PNG; needs matplotlib)",
    )
    return found
