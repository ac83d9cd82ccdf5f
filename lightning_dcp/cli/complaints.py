"""From what jsonargparse says of a wrong setting to one sentence: what was got, what is allowed, what to do.

For a value of several possible types jsonargparse prints the refusal of each, indented below each other. The one that
went deepest is about what the user meant.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_ALLOWED = {
    "trainer.strategy": (
        "a class path (lightning_dcp.DCPStrategy), a mapping of class_path and init_args, or the name of a strategy "
        "(dcp)"
    ),
    "trainer.strategy.planner": "a name (balanced, static, ...), or a mapping of class_path and init_args",
}
"""What is allowed where the types alone would not say it."""
_TYPES = {
    "NoneType": "null",
    "timedelta": 'times such as "0:30:00"',
    "Sequence": "lists",
    "bool": "true, false",
    "int": "integers",
    "float": "numbers",
    "str": "text",
}
_FEW = 25
"""So many options are listed."""
_KEY = re.compile(r'Parser key "([^"]+)":(.*)')


class _Refusal(NamedTuple):
    """What was said of one setting.

    Attributes:
        key: name of the setting, with dots.
        depth: how many settings enclose it.
        text: lines that were said of it.
    """

    key: str
    depth: int
    text: list[str]


def sentence(message: str, options: Iterable[str] = ()) -> str:
    """One sentence for an error message of jsonargparse.

    Args:
        message: as the parser got it.
        options: the options that exist, to name the one that was meant.
    """
    refusals = list(_refusals(message.splitlines()))
    if refusals:
        refusal = max(refusals, key=lambda found: found.depth)
        return _of_setting(refusal.key, refusal.text)
    unknown = re.search(r"unrecognized arguments: --?([\w.-]+)", message) or re.search(
        r"does not accept option '([\w.-]+)'", message
    )
    if unknown is not None:
        return f"there is no option {unknown[1]!r}{_meant(unknown[1], options)}"
    missing = re.search(r"arguments are required: (.*)", message)
    if missing is not None:
        names = ", ".join(name.partition(".")[2] or name for name in missing[1].split(", "))
        return f"{names} must be given: on the command line (--{names.split(', ')[0]} ...) or in a --config file"
    if re.fullmatch(r"Unexpected config:\s*", message):
        return "a --config file is empty; --print_config prints one to start from"
    return " ".join(message.split())


def failing_module(message: str) -> str | None:
    """The module of a class path that could not be imported, if that is what a message says."""
    found = re.search(r"Problem with given class_path '([\w.]+)\.\w+':\s+(?!Parser key|Option)", message)
    return found[1] if found is not None else None


def _refusals(lines: list[str]) -> Iterator[_Refusal]:
    open_keys: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        found = _KEY.search(line)
        if found is None:
            continue
        indent = _indent(line)
        open_keys = [(i, key) for i, key in open_keys if i < indent]
        open_keys.append((indent, found[1]))
        text = [found[2]] if found[2].strip() else []
        for later in lines[number + 1 :]:
            if later.strip() and _indent(later) <= indent:
                break
            text.append(later)
        yield _Refusal(".".join(key for _, key in open_keys), len(open_keys), text)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _of_setting(key: str, lines: list[str]) -> str:
    text = "\n".join(lines)
    option = re.search(r"Option '([\w.]+)' is not accepted", text)
    path = re.search(r"Problem with given class_path '([\w.]+)':\s*(.*)", text)
    if option is not None:
        return f"{key} has no option {option[1]!r}{_meant(option[1], _arguments(path[1] if path else ''))}"
    if path is not None:
        return f"{key} is {path[1]!r}, which cannot be used: {path[2].strip()}; a class path is module.Class"
    name = re.search(r"Expected a dot import path string: (\S+)", text)
    if name is not None:
        return (
            f"{key} is {name[1]!r}; here a class path is needed, such as my_module.MyClass: a name has no options, "
            "and is understood only where it is a class that was imported"
        )
    single = re.search(r"Expected an? (.+?)\. Got value: (.*)", text)
    union = re.search(r"Subtypes: \[(.*)\]", text)
    value = re.search(r"Given value: (.*)", text)
    if single is not None:
        return f"{key} is {single[2]!r}; allowed are {_ALLOWED.get(key) or _type_name(single[1])}"
    if union is not None and value is not None:
        return f"{key} is {value[1]!r}; allowed are {_ALLOWED.get(key) or _type_names(union[1])}"
    return f"{key}: {' '.join(text.split())}"


def _meant(name: str, options: Iterable[str]) -> str:
    """A hint at the option of this name, or of a part of it; where there are few options, all of them."""
    known = sorted(set(options))
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        part = ".".join(parts[:length])
        close = (
            [f"trainer.{part}"] if f"trainer.{part}" in known else difflib.get_close_matches(part, known, 1, 0.75)
        )
        if close and close[0] != part:
            return f"; did you mean {close[0]!r}?"
    return f"; allowed are {', '.join(known)}" if 0 < len(known) <= _FEW else ""


def _arguments(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    try:
        return [
            p for p in inspect.signature(getattr(importlib.import_module(module), name)).parameters if p != "self"
        ]
    except (ImportError, AttributeError, TypeError, ValueError):
        return []


def _type_names(text: str) -> str:
    names = [_type_name(part) for part in re.split(r", (?![^\[]*\])", text)]
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]


def _type_name(text: str) -> str:
    """``<class 'int'>`` is an integer; a class that is not listed is called by its own name."""
    literal = re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", text)
    if literal is not None:
        return literal[1].replace("'", "")
    inside = re.fullmatch(r"[\w.]*Sequence\[(?:<class ')?([\w.]+)(?:'>)?\]", text)
    if inside is not None:
        return {"int": "lists of integers such as [1, 2]", "str": "lists of text such as [a, b]"}.get(
            inside[1], f"lists of {inside[1]}"
        )
    name = text.removeprefix("<class '").removesuffix("'>").split(".")[-1]
    return _TYPES.get(name, name)
