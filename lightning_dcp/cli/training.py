"""``lightning-dcp fit``, ``validate``, ``test`` and ``predict``: Lightning's own command line over ``DCPStrategy``."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_dcp
from lightning_dcp.cli.complaints import failing_module, sentence
from lightning_dcp.cli.options import dry_run_options
from lightning_dcp.cli.saving import HEADER, SaveConfig
from lightning_dcp.cli.shortcuts import STRATEGY, written_out
from lightning_dcp.recompute import RecomputeError
from lightning_dcp.rehearsal import dry_run
from lightning_dcp.selfcheck import SelfCheckError
from lightning_dcp.upstream import sort_types

_PROGRAM = "lightning-dcp"
_WRONG_INPUT = 2
_COMPLETE = (MisconfigurationException, RecomputeError, SelfCheckError, ValueError, OSError)
"""Errors whose message says all, if nothing but Lightning and this package was involved."""


class WrongSettingError(Exception):
    """The configuration cannot be used; the message is a sentence."""


class Parser(LightningArgumentParser):
    """Says what is wrong in one sentence, without the whole usage in front of it."""

    failure: Exception | None = None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the sentence; an error inside of a user's module stays as it is.

        Raises:
            WrongSettingError: always, but for an error of a user's module.
        """
        if not self.exit_on_error:  # a parser for one of the possible types of a setting
            super().error(message, ex)
        module = failing_module(message)
        if module is not None:
            _import(module)
        parser = getattr(ex, "subcommand_parser", None) or self
        raise WrongSettingError(sentence(message, _options(parser))) from ex

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The help, under the name by which the command is called."""
        self.prog = self.prog.replace(" [options]", "")
        text = super().format_help(*args, **kwargs)
        return f"{text}\n{dry_run_options().format_help()}" if self.prog.endswith(" fit") else text

    def add_instantiator(self, instantiator: Callable[..., Any], class_type: type, **options: Any) -> None:
        """Remember the first error of a constructor: jsonargparse makes one text of it and of all other types."""

        def remembering(*args: Any, **kwargs: Any) -> Any:
            try:
                return instantiator(*args, **kwargs)
            except Exception as error:
                self.failure = self.failure or error
                raise

        super().add_instantiator(wraps(instantiator)(remembering), class_type, **options)


def _options(parser: Any) -> list[str]:
    return [text.removeprefix("--") for action in parser._actions for text in action.option_strings]


def _import(module: str) -> None:
    """Import a module for the error in its code, if it has one; that it does not exist is no such error."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise


class Command(LightningCLI):
    """One command; model and data are classes that the user names.

    Args:
        name: ``fit``, ``validate``, ``test`` or ``predict``.
        words: what follows it.
    """

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.name = name
        self.dry, words = dry_run_options().parse_known_args(words) if name == "fit" else (Namespace(), words)
        super().__init__(
            save_config_callback=None if self._is_dry else SaveConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"strategy": {"class_path": STRATEGY}},
            parser_kwargs={"prog": _PROGRAM, "default_env": True},
            parser_class=Parser,
            args=[name, *written_out(words)],
        )

    @property
    def _is_dry(self) -> bool:
        return getattr(self.dry, "dry_run", False)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one that runs: the parsers of the others would be made for nothing."""
        return {self.name: LightningCLI.subcommands()[self.name]}

    def fit(self, **arguments: Any) -> None:
        """Train, or show what would be trained."""
        if not self._is_dry:
            self.trainer.fit(**arguments)
            return
        found = dry_run(self.trainer, **arguments, steps=self.dry.dry_run_steps, picture=self.dry.dry_run_picture)
        if self.trainer.is_global_zero:
            print(found)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser whose dumps can be told from files that users wrote."""
        return super().init_parser(dump_header=[f"{HEADER} {lightning_dcp.__version__}"], **kwargs)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Trainer, model and data."""
        super().add_core_arguments_to_parser(parser)
        sort_types(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse. The words are those of the process, so Lightning's warning of both would be wrong."""
        try:
            self.config = parser.parse_args(args)
        except UnicodeDecodeError as error:
            raise WrongSettingError(f"a --config file is no text in UTF-8 ({error}); save it as UTF-8") from error

    def before_instantiate_classes(self) -> None:
        """Call constructors through the parser, so that their errors are known."""
        self.parser.add_instantiator(_construct, object)

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; an error of a constructor is raised as it was."""
        try:
            super().instantiate_classes()
        except Exception:
            failure = self.parser.failure if isinstance(self.parser, Parser) else None
            if failure is None:
                raise
            raise failure from failure.__cause__


def _construct(class_type: type, *args: Any, **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)


def run(name: str, words: Sequence[str]) -> int:
    """Run one command.

    Returns:
        0, or 2 after one sentence on standard error where the configuration cannot be used.

    Raises:
        Exception: user code raised it.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as with python -m; an installed script has its own folder there
    try:
        Command(name, words)
    except WrongSettingError as error:
        return _refused(name, f"{error}; see {_PROGRAM} {name} --help")
    except UnpicklingError as error:
        # Lightning's command line reads the hyperparameters of ckpt_path before the strategy checks the file.
        if any(_is_user_code(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        reason = str(error).partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or str(error)
        return _refused(name, f"ckpt_path names no whole checkpoint, or one with more than plain values: {reason}")
    except _COMPLETE as error:
        if not _is_of_configuration(error):
            raise
        return _refused(name, str(error))
    return 0


fit = partial(run, "fit")
validate = partial(run, "validate")
test = partial(run, "test")
predict = partial(run, "predict")


def _refused(name: str, text: str) -> int:
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    where = "" if rank == "0" else f" (rank {rank})"
    print(f"{_PROGRAM} {name}{where}: {' '.join(text.split())}", file=sys.stderr)
    return _WRONG_INPUT


def _is_of_configuration(error: Exception) -> bool:
    """Whether a setting is to blame: Lightning or this package raised it, and user code was not running.

    While objects are built user code may stand between, as a data module calls the constructor of its base class.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1].f_globals.get("__name__", "").partition(".")[0] not in ("lightning", "lightning_dcp"):
        return False
    running = any(frame.f_code.co_name == "_run_subcommand" for frame in frames)
    return not running or not any(_is_user_code(frame.f_code.co_filename) for frame in frames)


def _is_user_code(file: str) -> bool:
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    ours = str(Path(str(lightning_dcp.__file__)).parent)
    return not any(Path(file).is_relative_to(folder) for folder in (*libraries, ours))
