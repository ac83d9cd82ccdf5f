"""``lightning-dcp simulate``: its arguments. What it does stands in :mod:`lightning_dcp.cli.simulating`."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dcp.cli.arguments import LENGTHS, add_cluster, add_data, add_limits
from lightning_dcp.cli.parsing import Parser, planner_spec, positive_float, positive_int, positive_ints

_DESCRIPTION = (
    "Planners over the lengths of a dataset on a cluster that need not exist, without GPUs. All of them train the "
    "same samples: the first K x N of the permutation of the seed."
)
_PLANNER = (
    "a planner, again for each: balanced, floating, static, bucket, packed, dcp-inter, dcp-intra, replay, or plain "
    "(data parallel with padding at its best fixed setting). Its options, and limits of its own, follow as "
    "name:key=value,key=value, for example static:sp_size=4,batch_size=2 or balanced:packing=true"
)


def parser() -> Parser:
    """The parser of the command."""
    found = Parser(prog="lightning-dcp simulate", description=_DESCRIPTION)
    found.add_argument("--lengths", required=True, metavar="FILE|NAME", help=LENGTHS)
    found.add_argument(
        "--planner", type=planner_spec, required=True, action="append", metavar="NAME[:OPTIONS]", help=_PLANNER
    )
    found.add_argument(
        "--steps", type=positive_int, default=20, metavar="K", help="steps of N samples (default: %(default)s)"
    )
    add_cluster(found)
    add_data(found)
    add_limits(found)
    _add_answers(found)
    return found


def _add_answers(found: Parser) -> None:
    group = found.add_argument_group("answers")
    group.add_argument("--json", action="store_true", help="print one list of objects instead of a table")
    group.add_argument(
        "--plans",
        metavar="FILE",
        help="write the plans, one JSON line per step (with several planners: per planner)",
    )
    group.add_argument("--plot", metavar="FILE", help="draw throughput, idle time and one step of each planner")
    group.add_argument(
        "--weak-scaling",
        type=positive_ints,
        metavar="W,W,...",
        help="also simulate these numbers of GPUs, with N in proportion",
    )
    group.add_argument("--price", type=positive_float, metavar="MONEY", help="price of a GPU hour")
    group.add_argument(
        "--deadline",
        type=positive_float,
        metavar="HOURS",
        help="find the fewest GPUs that meet it, with N as it is",
    )
    group.add_argument(
        "--samples",
        type=positive_int,
        metavar="TOTAL",
        help="samples to be trained in all, for --price and --deadline (default: the dataset once)",
    )


def run(words: Sequence[str]) -> int:
    """Parse the words and simulate."""
    arguments = parser().parse_args(words)
    from lightning_dcp.cli.simulating import answer

    return answer(arguments)
