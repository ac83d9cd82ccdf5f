"""Amounts as they are shown."""

from __future__ import annotations

import pytest

from lightning_dcp.wording import gigabytes


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (85_400_000, "85.4 MB"),
        (104_300_000, "104.3 MB"),
        (2_540_000_000, "2.5 GB"),
        (1_200_000_000_000, "1,200.0 GB"),
    ],
)
def test_a_column_of_amounts_keeps_its_digits_below_a_gigabyte(amount: int, text: str) -> None:
    assert gigabytes(amount) == text
