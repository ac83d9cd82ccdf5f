"""One way to turn (seed, epoch, sample, ...) into a generator seed."""

from __future__ import annotations

import hashlib


def seed_from(*parts: int) -> int:
    """A 63-bit seed that depends on every part and on their order, and on nothing else.

    A cryptographic hash keeps neighbouring inputs (sample 7 and 8, rank 0 and 1) statistically independent,
    which adding or multiplying them does not.
    """
    text = ",".join(str(int(part)) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
