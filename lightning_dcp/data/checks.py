"""Checks of arguments that several files of the data side share."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def check_batch_size(
    global_batch_size: int | None, global_batch_tokens: int | None
) -> tuple[int | None, int | None]:
    """Give back both sizes as plain integers; refuse both at once, and numbers below 1.

    None at all is for planners that draw the samples of a step; any other planner is refused when it is known.

    Raises:
        ValueError: both are given, or the number is no integer from 1.
    """
    if global_batch_size is not None and global_batch_tokens is not None:
        raise ValueError(
            f"global_batch_size is {global_batch_size!r} and global_batch_tokens is {global_batch_tokens!r}; give "
            "at most one of them: the samples, or the tokens, of an optimizer step over all ranks"
        )
    samples, tokens = (
        None if value is None else check_integer(name, value, minimum=1)
        for name, value in (("global_batch_size", global_batch_size), ("global_batch_tokens", global_batch_tokens))
    )
    return samples, tokens


def check_integer(name: str, value: Any, *, minimum: int) -> int:
    """Give back an integer that is large enough as a plain ``int``, of whatever kind it is (NumPy's, for example).

    Raises:
        ValueError: it is not; the sentence names it.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {minimum}")
    return int(value)
