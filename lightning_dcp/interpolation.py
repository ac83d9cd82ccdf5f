"""Integer interpolation on a grid (batch size, tokens) that is monotone in both and never wraps around.

The lower bound of a plan stands on monotone times and bytes, also between and beyond the measured points. So the
way of extrapolating is fixed once, when the grid is built: a node at 0 tokens below, and one slope above for each
of the two axes, raised where needed so that a larger batch or a longer sample never gets less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

MAX_VALUE = 2**50
"""Nanoseconds (13 days) or bytes (a petabyte) of one layer above which predictions stay constant."""
MAX_TOKENS = 2**31 - 1
"""Most tokens of a sample and most samples of a micro-batch that can be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Several quantities on the nodes (batch size, tokens) with what is needed between and beyond them.

    Row ``i < B`` of the tables belongs to ``batch_nodes[i]``; row ``B`` is the growth per ``batch_widths[-1]``
    beyond the last batch size. ``steps`` is the growth from one token node to the next, the last column that
    beyond the last node.

    Attributes:
        batch_nodes: batch sizes, shape ``[B]``.
        batch_widths: distances to the next one, shape ``[B]``; the last for beyond.
        token_nodes: tokens, from 0, shape ``[S]``.
        token_widths: distances to the next one, shape ``[S]``; the last for beyond.
        values: shape ``[Q, B + 1, S]``.
        steps: shape ``[Q, B + 1, S]``.
    """

    batch_nodes: IntArray
    batch_widths: IntArray
    token_nodes: IntArray
    token_widths: IntArray
    values: IntArray
    steps: IntArray

    @classmethod
    def build(cls, points: Iterable[tuple[int, int, IntArray]]) -> Grid:
        """Make the grid of ``(batch size, tokens, quantities)``, at least one; gaps are filled.

        What was not measured is on the line through its two nearest batch sizes of the same length, and not below
        proportion. Of two measurements at one point the dearer counts.
        """
        rows = list(points)
        batch = np.unique([b for b, _, _ in rows]).astype(np.int64)
        token = np.unique([s for _, s, _ in rows]).astype(np.int64)
        measured = np.full((len(rows[0][2]), len(batch), len(token)), -1, dtype=np.int64)
        for b, s, quantities in rows:
            i, j = int(np.searchsorted(batch, b)), int(np.searchsorted(token, s))
            measured[:, i, j] = np.maximum(measured[:, i, j], quantities)
        for j in range(len(token)):
            _fill_column(measured[:, :, j], batch)
        if batch[0] > 1:
            first = np.stack([_on_line(measured[:, :, j], batch, 1) for j in range(len(token))], axis=-1)
            measured, batch = np.concatenate([first[:, None], measured], axis=1), np.insert(batch, 0, 1)
        return cls._complete(batch, token, measured)

    @classmethod
    def _complete(cls, batch: IntArray, token: IntArray, measured: IntArray) -> Grid:
        raised = np.maximum.accumulate(np.maximum.accumulate(measured, axis=1), axis=2)
        values, token = _with_zero(raised, token), np.insert(token, 0, 0)
        batch_width = int(batch[-1] - batch[-2]) if len(batch) > 1 else int(batch[-1])
        # Growth beyond the last batch size: the last step, not less than proportion, never falling with length.
        last = values[:, -1]
        step = last - values[:, -2] if len(batch) > 1 else last
        growth = np.maximum.accumulate(np.maximum(step, _ceil_share(last, batch_width, int(batch[-1]))), axis=-1)
        values = np.minimum(np.concatenate([values, growth[:, None]], axis=1), MAX_VALUE)
        token_width = int(token[-1] - token[-2])
        beyond = np.maximum(
            values[..., -1] - values[..., -2], _ceil_share(values[..., -1], token_width, int(token[-1]))
        )
        # Row by row not less than the row of the smaller batch size; the growth row stands alone.
        beyond[:, :-1] = np.maximum.accumulate(beyond[:, :-1], axis=1)
        return cls(
            batch_nodes=batch,
            batch_widths=np.append(np.diff(batch), batch_width),
            token_nodes=token,
            token_widths=np.append(np.diff(token), token_width),
            values=values,
            steps=np.concatenate([np.diff(values, axis=-1), beyond[..., None]], axis=-1),
        )

    def at(self, batch_size: IntArray, tokens: IntArray) -> IntArray:
        """Values at ``(batch_size, tokens)``, shape ``[Q, ...]`` with the broadcast shape of the two.

        Raises:
            ValueError: a batch size is below 1, a token count below 0, or one of them above :data:`MAX_TOKENS`.
        """
        batch, token = np.broadcast_arrays(np.asarray(batch_size, np.int64), np.asarray(tokens, np.int64))
        if batch.size and (batch.min() < 1 or token.min() < 0 or max(batch.max(), token.max()) > MAX_TOKENS):
            raise ValueError(
                f"batch sizes {batch.min()} to {batch.max()} of {token.min()} to {token.max()} tokens; allowed "
                f"are batch sizes from 1, tokens from 0, both up to {MAX_TOKENS}"
            )
        row = np.searchsorted(self.batch_nodes, batch, side="right") - 1
        base, other = self._along_tokens(row, token), self._along_tokens(row + 1, token)
        inside = row < len(self.batch_nodes) - 1
        step = np.where(inside, other - base, other)
        grown = base + _scale(step, batch - self.batch_nodes[row], self.batch_widths[row])
        return np.asarray(np.minimum(grown, MAX_VALUE))

    def rows(self, tokens: IntArray) -> IntArray:
        """Values of every row of the tables at ``tokens``, shape ``[Q, B + 1, ...]``; for :meth:`between`.

        Raises:
            ValueError: a token count below 0 or above :data:`MAX_TOKENS`.
        """
        tokens = np.asarray(tokens, dtype=np.int64)
        if tokens.size and (tokens.min() < 0 or tokens.max() > MAX_TOKENS):
            raise ValueError(f"{tokens.min()} to {tokens.max()} tokens; allowed are 0 to {MAX_TOKENS}")
        return self._along_tokens(np.arange(len(self.batch_widths) + 1).reshape(-1, *[1] * tokens.ndim), tokens)

    def between(self, rows: IntArray, batch_sizes: IntArray) -> IntArray:
        """Values at some batch sizes ``[R]``: :meth:`at` for tokens whose :meth:`rows` ``[Q, B + 1, n]`` are known.

        Returns:
            Shape ``[Q, R, n]``.

        Raises:
            ValueError: a batch size is below 1 or above :data:`MAX_TOKENS`.
        """
        if batch_sizes.size and not 1 <= batch_sizes.min() <= batch_sizes.max() <= MAX_TOKENS:
            raise ValueError(
                f"batch sizes {batch_sizes.min()} to {batch_sizes.max()}; allowed are 1 to {MAX_TOKENS}"
            )
        row = np.searchsorted(self.batch_nodes, batch_sizes, side="right") - 1
        if len(row) and (row == row[0]).all():
            # Between the same two nodes nothing need be copied, and many divisions by one number are fast.
            row = row[:1]
            base, after = rows[:, row[0], None], rows[:, row[0] + 1, None]
        else:
            base, after = rows[:, row], rows[:, row + 1]
        step = after - np.where((row < len(self.batch_nodes) - 1)[:, None], base, 0)
        part, width = batch_sizes - self.batch_nodes[row], self.batch_widths[row]
        scaled = _scale(step, part[:, None], width if len(width) == 1 else width[:, None])
        return np.asarray(np.minimum(base + scaled, MAX_VALUE))

    def _along_tokens(self, row: IntArray, token: IntArray) -> IntArray:
        column = np.searchsorted(self.token_nodes, token, side="right") - 1
        step = self.steps[:, row, column]
        scaled = _scale(step, token - self.token_nodes[column], self.token_widths[column])
        return np.asarray(np.minimum(self.values[:, row, column] + scaled, MAX_VALUE))


def _scale(step: IntArray, part: IntArray, whole: IntArray) -> IntArray:
    """``step * part // whole``, at most :data:`MAX_VALUE`, without an intermediate result above 2**62."""
    if not step.size:
        return step
    if int(step.max()) * int(part.max()) < 2**62:
        return np.asarray(np.minimum(step * part // whole, MAX_VALUE))
    quotient, rest = step // whole, step % whole
    room = MAX_VALUE // np.maximum(quotient, 1)
    scaled = quotient * np.minimum(part, room) + rest * part // whole
    return np.asarray(np.where(part > room, MAX_VALUE, np.minimum(scaled, MAX_VALUE)))


def _ceil_share(value: IntArray, part: int, whole: int) -> IntArray:
    """``value * part / whole`` rounded up, for ``part <= whole``."""
    return np.asarray(value // whole * part + -(-(value % whole * part) // whole))


def _with_zero(values: IntArray, token: IntArray) -> IntArray:
    """Put a column for 0 tokens in front: the first line carried on, not below zero."""
    first = values[..., 0]
    at_zero = 0 * first
    if len(token) > 1:
        slope = values[..., 1] - first
        drop = _scale(slope, np.asarray(token[0]), np.asarray(token[1] - token[0]))
        at_zero = np.maximum.accumulate(np.maximum(first - drop, 0), axis=-1)
    return np.concatenate([at_zero[..., None], values], axis=-1)


def _fill_column(column: IntArray, batch: IntArray) -> None:
    """Fill the missing batch sizes of one length in place; ``column[Q, B]`` with -1 where missing."""
    known = np.flatnonzero(column[0] >= 0)
    for i in np.flatnonzero(column[0] < 0):
        column[:, i] = _on_line(column[:, known], batch[known], int(batch[i]))


def _on_line(values: IntArray, batch: IntArray, wanted: int) -> IntArray:
    """Value at a batch size by its two nearest known ones; outside of them not less than in proportion."""
    if len(batch) == 1:
        return np.asarray([min(y * wanted // int(batch[0]), MAX_VALUE) for y in values[:, 0].tolist()])
    right = min(max(int(np.searchsorted(batch, wanted)), 1), len(batch) - 1)
    b0, b1 = int(batch[right - 1]), int(batch[right])
    found = []
    for y0, y1 in values[:, right - 1 : right + 1].tolist():
        line = y0 + (y1 - y0) * (wanted - b0) // (b1 - b0)
        proportion = y0 * wanted // b0 if wanted < b0 else y1 * wanted // b1
        found.append(min(line if b0 <= wanted <= b1 else max(line, proportion), MAX_VALUE))
    return np.asarray(found, dtype=np.int64)
