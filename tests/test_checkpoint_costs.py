"""What the documentation says of the cost of a save is what the kept measurements say."""

from __future__ import annotations

import json

import pytest

from benchmarks.checkpoint import RESULTS, table
from benchmarks.saving import GOAL


def test_bytes_per_parameter() -> None:
    for result in json.loads((RESULTS / "checkpoint.json").read_text()):
        parameters = result["parameters"]
        first, *others = result["ranks_found"]
        assert result["file_bytes"] / parameters == pytest.approx(12.0, abs=0.1)
        assert (first["weights_bytes"] + first["optimizer_bytes"]) / parameters == pytest.approx(12.0, rel=0.1)
        assert all(found["weights_bytes"] + found["optimizer_bytes"] < 0.1 * parameters for found in others)
        assert "| file, bytes per parameter | 12.0 |" in table(result)


def test_share_of_the_main_example() -> None:
    """The kept result, of whatever machine, is below the goal, and is a share of its own times."""
    found = json.loads((RESULTS / "saving.json").read_text())
    saving = sum(found["saves"])
    assert found["added"] == pytest.approx(saving / (found["seconds"] - saving))
    assert found["added"] <= GOAL
    assert len(found["saves"]) >= 3
