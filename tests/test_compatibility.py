"""The table of what works with what says what the marks of the tests say."""

from __future__ import annotations

import pytest

from tests.compatibility import COMMAND, FILE, GROUPS, MarkError, all_marks, marks_in, render


def test_the_table_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == render(all_marks()), f"run `{COMMAND}` and add {FILE.name}"


def test_rows_are_merged_and_sorted() -> None:
    source = """
@pytest.mark.feature("Metrics", "b", "refused: take c")
def test_one(): ...

@pytest.mark.feature("Metrics", "B", "note")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.feature("Trainer", "a"))])
def test_two(x): ...

@pytest.mark.feature("Metrics", "B", "note")
@pytest.mark.feature("Metrics", "`c`", "refused with d")
@pytest.mark.feature("Metrics", "`c`")
def test_three(): ...
"""
    text = render(marks_in(source))
    rows = [line for line in text.splitlines() if line.startswith(("| ", "## "))]
    head = ["| feature | works | note |", "| --- | --- | --- |"]
    assert rows == [
        "## Trainer", *head, "| a | yes | |",
        "## Metrics", *head, "| B | yes | note |", "| b | refused | take c |", "| `c` | in part | refused with d |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        ('("Tests", "a")', f"x.py:1: group 'Tests'; allowed are {', '.join(GROUPS)}"),
        ('("Metrics")', "allowed are group, name and perhaps a note"),
        ('("Metrics", NAME)', "allowed are group, name and perhaps a note"),
        ('("Metrics", name="a")', "allowed are group, name and perhaps a note"),
    ],
)
def test_a_mark_that_cannot_be_read(mark: str, sentence: str) -> None:
    with pytest.raises(MarkError) as caught:
        marks_in(f"@pytest.mark.feature{mark}\ndef test_x(): ...", "x.py")
    assert sentence in str(caught.value)


def test_a_mark_on_no_test() -> None:
    with pytest.raises(MarkError, match="belongs to no test function"):
        marks_in('@pytest.mark.feature("Metrics", "a")\ndef helper(): ...', "x.py")
