"""Direction of imports inside the package, and no torch where none is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_dcp"

ORDER: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("rehearsal",),
    ("strategy",),
    ("evaluation",),
    ("running",),
    ("callback", "preparation", "profiling", "checkpoint", "selfcheck"),
    ("accumulation",),
    ("tally",),
    ("execution",),
    ("collectives", "watchdog"),
    ("logged_epoch",),
    ("logged",),
    ("portable",),
    ("upstream", "launching", "rendezvous", "refusals"),
    ("data", "recompute", "sequence_parallel", "metrics", "models"),
    ("agreement", "engine", "memory", "seeding", "timing"),
    ("audit",),
    ("simulate", "report", "_timeline", "_waterfall", "records"),
    ("planners", "virtual"),
    ("lengths",),
    ("cost",),
    ("profile", "terms"),
    ("permutation",),
    ("amounts", "interpolation", "plan", "topology", "wording"),
)
"""A module may import what stands in a later line, or in its own."""

NO_TORCH = (
    *(
        "plan",
        "topology",
        "interpolation",
        "profile",
        "terms",
        "cost",
        "lengths",
        "planners",
        "report",
        "simulate",
    ),
    *("amounts", "permutation", "virtual", "audit", "cli"),
)


def modules() -> dict[str, list[Path]]:
    """Files of each module or sub-package directly below the package."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if name != "__init__":
            found.setdefault(name, []).append(path)
    return found


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Absolute names that a file imports anywhere in it, with their lines."""
    base = ("lightning_dcp", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = [*base[: len(base) - node.level + 1]] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def siblings(name: str) -> Iterator[tuple[Path, int, str]]:
    """Other modules of the package that this one imports."""
    for path in modules()[name]:
        for line, target in imported(path):
            parts = target.split(".")
            if parts[0] == "lightning_dcp" and len(parts) > 1 and parts[1] != name:
                yield path, line, parts[1]


def place(name: str) -> int:
    for index, row in enumerate(ORDER):
        if name in row:
            return index
    raise AssertionError(f"lightning_dcp.{name} has no place in ORDER; put it where its imports allow")


def violations(name: str) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}:{line} imports {target}, which stands before {name}"
        for path, line, target in siblings(name)
        if place(target) < place(name)
    ]


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_one_way(name: str) -> None:
    assert violations(name) == []


def test_nothing_stands_twice_in_the_order() -> None:
    names = [name for row in ORDER for name in row]
    assert len(names) == len(set(names))


def test_models_know_of_sequence_parallel_only() -> None:
    assert {target for _, _, target in siblings("models")} <= {"sequence_parallel"}


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    inner = tmp_path / "data" / "x.py"
    inner.parent.mkdir()
    inner.write_text(
        "import lightning_dcp.strategy\nfrom lightning_dcp import cli\nfrom ..callback import a\n"
        "from . import y\ndef f():\n    from lightning_dcp.execution import b\n"
    )
    assert [target for _, _, target in siblings("data")] == ["strategy", "cli", "callback", "execution"]
    assert len(violations("data")) == 4


def test_planning_needs_no_torch() -> None:
    present = [name for name in NO_TORCH if name in modules()]
    assert {"plan", "topology", "cost", "lengths", "planners"} <= set(present)
    code = f"""
import importlib, sys
for name in {present!r}:
    importlib.import_module("lightning_dcp." + name)
print([m for m in ("torch", "lightning", "deepspeed") if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
