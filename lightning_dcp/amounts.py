"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from lightning_dcp.interpolation import MAX_VALUE

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of an amount such as ``"80GB"`` or ``"512 MiB"``.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", text, flags=re.IGNORECASE)
    amount = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 1 <= amount <= MAX_VALUE:
        raise ValueError(
            f'memory_limit is {text!r}; allowed is an amount from 1 byte to 1 PiB such as "80GB", "512MB" or "1.5GiB"'
        )
    return int(amount)
