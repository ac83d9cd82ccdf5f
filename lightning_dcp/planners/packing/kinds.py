"""Settings that rows are priced with, as tables over all samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.planners.packing.menu import Menu

Kind = tuple[int, tuple[int, ...]]
"""Index of the width in the menu, and recomputed layers per family."""


@dataclass(slots=True)
class Kinds:
    """Settings ``(p, r)`` of rows with the price of every sample in them; grows as settings are met.

    The column behind the last sample stands for no sample: it has no tokens, takes no time and no bytes.

    Attributes:
        menu: samples, longest first.
        lengths: tokens, ``[n + 1]``.
        sizes: ranks of the groups of each width.
        firsts: first ranks of the groups of each width.
        names: the settings.
        width: index of the width, ``[K]``.
        fixed: nanoseconds of a row without samples, ``[K]``.
        times: nanoseconds of each sample, ``[K, n + 1]``.
        bytes: bytes of each sample, 0 where memory never binds, ``[K, n + 1]``.
        room: bytes that the samples of a row may take, ``[K]``.
    """

    menu: Menu
    lengths: IntArray = field(init=False)
    sizes: IntArray = field(init=False)
    firsts: tuple[IntArray, ...] = field(init=False)
    names: dict[Kind, int] = field(default_factory=dict)
    width: IntArray = field(init=False)
    fixed: IntArray = field(init=False)
    times: IntArray = field(init=False)
    bytes: IntArray = field(init=False)
    room: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = np.append(self.menu.lengths, 0)
        self.sizes = np.asarray([width.sp_size for width in self.menu.widths], dtype=np.int64)
        blocks = np.asarray(self.menu.request.world.blocks, dtype=np.int64)
        self.firsts = tuple(blocks[blocks[:, 1] == size, 0] for size in self.sizes)
        self.width, self.fixed, self.room = (np.zeros(0, dtype=np.int64) for _ in range(3))
        self.times, self.bytes = (np.zeros((0, len(self.lengths)), dtype=np.int64) for _ in range(2))

    def index(self, kind: Kind) -> int:
        """Row of the tables that belongs to a setting."""
        if kind not in self.names:
            self.names[kind] = len(self.names)
            self._append(kind)
        return self.names[kind]

    def _append(self, kind: Kind) -> None:
        width, counts = self.menu.widths[kind[0]], np.asarray(kind[1], dtype=np.int64)
        fixed, times = width.times(counts)
        held, each = width.most_bytes(counts) if width.binds else (0, 0 * times)
        self.width = np.append(self.width, kind[0])
        self.fixed = np.append(self.fixed, fixed)
        self.room = np.append(self.room, width.room - held)
        self.times = np.concatenate([self.times, np.append(times, 0)[None]])
        self.bytes = np.concatenate([self.bytes, np.append(each, 0)[None]])
