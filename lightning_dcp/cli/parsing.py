"""Values of the command line. Only the standard library: ``--help`` must be quick."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from math import isfinite
from typing import Any, NamedTuple, NoReturn

_WORDS = {"true": True, "false": False}
_LARGEST = 2**53
"""Largest integer; beyond it a float cannot tell neighbours apart, and nobody needs it."""


class Parser(ArgumentParser):
    """Says what is wrong in one sentence, without the whole usage in front of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the sentence to standard error and exit with 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class PlannerSpec(NamedTuple):
    """A planner as it was asked for: ``name:key=value,key=value``."""

    label: str
    name: str
    options: dict[str, Any]


def planner_spec(text: str) -> PlannerSpec:
    """Read ``name`` or ``name:key=value,key=value``; numbers, true and false are understood as such."""
    name, colon, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in rest.split(",") if colon else []:
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise ArgumentTypeError(f"{text!r} is not of the form name:key=value,key=value with each key once")
        options[key] = _value(value)
    return PlannerSpec(label=text, name=name, options=options)


def positive_int(text: str) -> int:
    """An integer from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is no integer of at least 1")
    if value > _LARGEST:
        raise ArgumentTypeError(f"{text[:20]}... is too large; allowed are integers up to {_LARGEST}")
    return value


def seed(text: str) -> int:
    """An integer from 0."""
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is no integer of at least 0")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0.0 and isfinite(value)):
        raise ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def positive_ints(text: str) -> tuple[int, ...]:
    """Different integers from 1, separated by commas."""
    values = tuple(positive_int(part) for part in text.split(","))
    if len({*values}) < len(values):
        raise ArgumentTypeError(f"{text!r} names a number twice")
    return values


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
