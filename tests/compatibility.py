"""The table of what works with what, read from the ``feature`` marks of the tests: ``python -m tests.compatibility``.

The marks are read from the sources, so nothing is imported and nothing is run. A test says what it shows::

    @pytest.mark.feature("Callbacks", "EarlyStopping", "every rank stops after the same step")

A note that starts with ``refused`` says that the feature ends in an error with a sentence, and what to do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "compatibility.md"
COMMAND = "python -m tests.compatibility"
GROUPS = ("Trainer", "Callbacks", "Checkpoints", "Metrics", "Data", "Launchers", "Command line")
REFUSED = "refused"

HEAD = f"""# What works with what

Each line stands for at least one test. Where a feature has numbers, the test compares them with a single device.
*refused* means an error in one sentence that says what to do, instead of a result that differs. What no line names was
not tried. See also [limits](limits.md).

(Made from the marks of the tests by `{COMMAND}`: change the marks, not this file.)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One ``feature`` mark.

    Attributes:
        group: one of :data:`GROUPS`.
        name: of the feature.
        note: may be empty; starts with ``refused`` for what is refused.
        test: name of the test function.
    """

    group: str
    name: str
    note: str
    test: str


class MarkError(ValueError):
    """A ``feature`` mark that cannot stand in the table; the message names file and line."""


def marks_in(source: str, file: str = "") -> list[Mark]:
    """The ``feature`` marks of a test file, in the order of the file.

    Raises:
        MarkError: a mark outside of a test, of another group, or with other arguments than two or three texts.
    """
    found: list[Mark] = []
    for node in ast.parse(source).body:
        name = node.name if isinstance(node, ast.FunctionDef) else ""
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.feature":
                found.append(_read(call, name, f"{file}:{call.lineno}"))
    return found


def _read(call: ast.Call, test: str, place: str) -> Mark:
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if len(texts) != len(call.args) or call.keywords or len(texts) not in (2, 3):
        raise MarkError(
            f"{place}: {ast.unparse(call)}; allowed are group, name and perhaps a note, each as plain text"
        )
    if texts[0] not in GROUPS:
        raise MarkError(f"{place}: group {texts[0]!r}; allowed are {', '.join(GROUPS)}")
    if not test.startswith("test_"):
        raise MarkError(f"{place}: the mark belongs to no test function")
    group, name, *note = texts
    return Mark(group=group, name=name, note=note[0] if note else "", test=test)


def all_marks(folder: Path = ROOT / "tests") -> list[Mark]:
    """The marks of all test files, file by file."""
    files = sorted(folder.glob("test_*.py"))
    return [mark for file in files for mark in marks_in(file.read_text(encoding="utf-8"), file.name)]


def render(marks: Sequence[Mark]) -> str:
    """The Markdown file."""
    return "\n".join([HEAD, *_sections(marks)])


def _sections(marks: Sequence[Mark]) -> Iterator[str]:
    for group in GROUPS:
        own = [mark for mark in marks if mark.group == group]
        names = sorted({mark.name for mark in own}, key=lambda name: (name.strip("`").casefold(), name))
        if names:
            rows = [_row(name, [mark for mark in own if mark.name == name]) for name in names]
            yield "\n".join([f"## {group}", "", "| feature | works | note |", "| --- | --- | --- |", *rows, ""])


def _row(name: str, marks: Sequence[Mark]) -> str:
    refused = {mark.note.startswith(REFUSED) for mark in marks}
    works = {frozenset({True}): REFUSED, frozenset({False}): "yes"}.get(frozenset(refused), "in part")
    notes = dict.fromkeys(_note(mark, works) for mark in marks if mark.note)
    text = "; ".join(note for note in notes if note).replace("|", "\\|")
    return f"| {name} | {works} | {text} |".replace("|  |", "| |")


def _note(mark: Mark, works: str) -> str:
    """The note, without the word that stands in the column before it."""
    return mark.note.removeprefix(REFUSED).lstrip(":, ") if works == REFUSED else mark.note


def main() -> None:
    """Write the file."""
    marks = all_marks()
    FILE.write_text(render(marks), encoding="utf-8")
    print(f"{FILE.relative_to(ROOT)}: {len({(m.group, m.name) for m in marks})} features of {len(marks)} marks")


if __name__ == "__main__":
    main()
