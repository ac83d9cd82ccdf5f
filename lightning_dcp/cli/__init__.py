"""The command line ``lightning-dcp``.

A command's module is imported when the command is called; so a command that needs torch costs the others nothing, and
``--help`` is there at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NamedTuple

import lightning_dcp
from lightning_dcp.cli.parsing import Parser

WRONG_INPUT = 2
"""Exit code for wrong input; argparse uses the same."""
_INTERRUPTED = 130


class Command(NamedTuple):
    """Where a command lives.

    Attributes:
        module: where it is imported from.
        help: the line that ``--help`` shows for it.
        function: what is called with the words behind the command, and returns the exit code.
        runs_user_code: it tells by itself wrong input from errors of user code, which keep their traceback.
    """

    module: str
    help: str
    function: str = "run"
    runs_user_code: bool = False


def _training(name: str, text: str) -> Command:
    return Command("lightning_dcp.cli.training", text, name, runs_user_code=True)


COMMANDS = {
    "fit": _training("fit", "train a model; with --dry-run show the plans of the first steps and stop"),
    "validate": _training("validate", "run a model's validation"),
    "test": _training("test", "run a model's test"),
    "predict": _training("predict", "run a model's prediction"),
    "audit": Command("lightning_dcp.cli.audit", "the lengths of a dataset in terms of GPU time, on one screen"),
    "simulate": Command(
        "lightning_dcp.cli.simulate", "what planners would reach on a cluster that need not exist"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the entry point of ``lightning-dcp`` and of ``python -m lightning_dcp``.

    Args:
        arguments: words of the command line; by default those of the process.

    Returns:
        The exit code: 0, or 2 after one sentence on standard error where the input is wrong.
    """
    _open_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        return (_run if COMMANDS[words[0]].runs_user_code else _guarded)(words[0], words[1:])
    _parser().parse_args(words)
    return 0


def _open_streams() -> None:
    """Streams that can be written to: with ``>&-`` Python has none, and a file's name need not fit the encoding."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parser() -> Parser:
    parser = Parser(prog="lightning-dcp", description="Data-Centric Parallel for PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-dcp {lightning_dcp.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    return parser


def _run(name: str, words: Sequence[str]) -> int:
    command = COMMANDS[name]
    return int(getattr(import_module(command.module), command.function)(words))


def _guarded(name: str, words: Sequence[str]) -> int:
    try:
        code = _run(name, words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output went away, as head does. What is still in the buffer must not raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"lightning-dcp {name}: {_sentence(error)}", file=sys.stderr)
        return WRONG_INPUT
    except MemoryError as error:
        print(f"lightning-dcp {name}: not enough memory ({_sentence(error)}); use smaller steps", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
