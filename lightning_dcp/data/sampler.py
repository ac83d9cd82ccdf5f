"""Which samples make up which optimizer step: one global permutation of (seed, epoch), cut into steps.

The content of a step is fixed before anything is planned, so that cost never biases the data. It depends on
neither the number of ranks nor the planner nor the profile, and so does the saved position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.permutation import permutation

STATE_VERSION = 1


def cut_by_samples(size: int, samples_per_step: int) -> IntArray:
    """Bounds of the steps: step ``k`` holds the positions ``bounds[k] .. bounds[k + 1] - 1``."""
    return np.append(np.arange(0, size, samples_per_step, dtype=np.int64), np.int64(size))


def cut_by_tokens(tokens: IntArray, tokens_per_step: int) -> IntArray:
    """Bounds of the steps, cut greedily: a step ends before it passes the budget and holds at least one sample.

    Args:
        tokens: tokens of each sample in the order of the epoch.
        tokens_per_step: budget of a step.
    """
    total = np.cumsum(tokens)
    bounds = [0]
    while bounds[-1] < len(tokens):
        start = bounds[-1]
        spent = int(total[start - 1]) if start else 0
        end = int(np.searchsorted(total, spent + tokens_per_step, side="right"))
        bounds.append(max(end, start + 1))
    return np.asarray(bounds, dtype=np.int64)


class StepSampler:
    """The steps of an epoch, and the position up to which they were consumed.

    A step counts as consumed when :meth:`mark_consumed` is called for it, not when it is drawn: with workers the
    drawing runs ahead. Iterating starts at the first step that was not consumed; an epoch that was consumed to
    its end is followed by the next one.

    Args:
        tokens: tokens of each sample of the dataset, int64 ``[n]``.
        seed: with the epoch it determines the order.
        shuffle: ``False`` keeps the order of the dataset in every epoch.
        global_batch_size: samples of an optimizer step; the last step of an epoch may be shorter.
        global_batch_tokens: tokens of an optimizer step instead (see :func:`cut_by_tokens`).

    Raises:
        ValueError: the dataset is empty, not exactly one of the two sizes is given, or a number is out of range.
    """

    def __init__(
        self,
        tokens: IntArray,
        *,
        seed: int = 0,
        shuffle: bool = True,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
    ) -> None:
        check_batch_size(global_batch_size, global_batch_tokens)
        check_integer("seed", seed, minimum=0)
        if len(tokens) == 0:
            raise ValueError("the dataset is empty; training needs at least one sample")
        self.tokens = np.asarray(tokens, dtype=np.int64)
        self.seed = seed
        self.shuffle = shuffle
        self.global_batch_size = global_batch_size
        self.global_batch_tokens = global_batch_tokens
        self.consumed_samples = 0
        self.consumed_tokens = 0
        self.version = 0
        """Counts the jumps (another epoch, another state); what was drawn before a jump is out of date."""
        self._epoch = 0
        self._position = 0
        self._finished_epoch: int | None = None
        self._cached: tuple[int, IntArray, IntArray] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the permutation."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that were consumed."""
        return self._position

    @property
    def fixed_length(self) -> bool:
        """Whether every epoch has the same number of steps."""
        return self.global_batch_size is not None or not self.shuffle

    def __len__(self) -> int:
        """Steps of an epoch.

        Raises:
            TypeError: the number differs between epochs. Lightning then runs each epoch to its end.
        """
        if not self.fixed_length:
            raise TypeError(
                "with global_batch_tokens and shuffle=True the number of steps differs between epochs, so there "
                "is no length; use num_steps(epoch), Trainer(max_steps=...) or global_batch_size"
            )
        return self.num_steps(self._epoch)

    def num_steps(self, epoch: int) -> int:
        """Steps of one epoch."""
        return len(self._order_and_bounds(epoch)[1]) - 1

    def samples(self, epoch: int, step: int) -> IntArray:
        """Sample ids of a step in the order of the permutation."""
        order, bounds = self._order_and_bounds(epoch)
        return order[bounds[step] : bounds[step + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        """The sample ids of each step that was not consumed; where to start is decided at the first ``next``."""
        epoch, first = self.begin()
        for step in range(first, self.num_steps(epoch)):
            yield self.samples(epoch, step)

    def begin(self) -> tuple[int, int]:
        """Epoch and step at which an iteration starts; moves on to the next epoch where one was consumed whole."""
        if self._position >= len(self.tokens):
            self._finished_epoch = self._epoch
            self._epoch, self._position = self._epoch + 1, 0
        bounds = self._order_and_bounds(self._epoch)[1]
        return self._epoch, int(np.searchsorted(bounds, self._position))

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; called by Lightning before each one.

        In the current epoch the position stays, so a resumed run goes on where it stopped. A state that was saved
        after the last step of an epoch leads to the next one also when the trainer repeats the old number.
        """
        check_integer("epoch", epoch, minimum=0)
        unfinished = self._position < len(self.tokens)
        if epoch == self._finished_epoch or (epoch == self._epoch and unfinished):
            return
        self._epoch, self._position, self._finished_epoch = epoch, 0, None
        self.version += 1

    def mark_consumed(self, epoch: int, step: int) -> None:
        """A step was trained on; the saved state starts behind it.

        Raises:
            RuntimeError: the step is not one that lies ahead in the current epoch.
        """
        bounds = self._order_and_bounds(self._epoch)[1]
        if epoch != self._epoch or not 0 <= step < len(bounds) - 1 or bounds[step] < self._position:
            raise RuntimeError(
                f"step {step} of epoch {epoch} was marked as consumed, but {self._position} of {len(self.tokens)} "
                f"samples of epoch {self._epoch} were consumed already; mark each step once, in order"
            )
        ids = self.samples(epoch, step)
        self.consumed_samples += len(ids)
        self.consumed_tokens += int(self.tokens[ids].sum())
        self._position, self._finished_epoch = int(bounds[step + 1]), None

    def state_dict(self) -> dict[str, Any]:
        """Position behind the last consumed step; plain numbers, the same on every rank."""
        return {
            "version": STATE_VERSION,
            **self._identity(),
            "epoch": self._epoch,
            "position": self._position,
            "beyond": [],
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, on any number of ranks.

        Raises:
            ValueError: the state belongs to another dataset, seed, order or batch size, or is damaged. The
                sentence names the field.
        """
        for name, ours in {"version": STATE_VERSION, **self._identity()}.items():
            if name not in state or state[name] != ours:
                raise ValueError(
                    f"the saved position has {name} = {state.get(name)!r}, this run has {ours!r}; samples could "
                    "be lost or repeated. Resume with the value of the saved run, or start without its state"
                )
        numbers = ("epoch", "position", "consumed_samples", "consumed_tokens")
        epoch, position, samples, tokens = (check_integer(n, state.get(n), minimum=0) for n in numbers)
        if state.get("beyond") != [] or position not in self._order_and_bounds(epoch)[1]:
            raise ValueError(
                f"the saved position is {position} with {state.get('beyond')!r} beyond it, where no step of epoch "
                f"{epoch} starts; it was saved by another sampler or over other lengths"
            )
        self._epoch, self._position = epoch, position
        self._finished_epoch = epoch if position >= len(self.tokens) else None
        self.consumed_samples, self.consumed_tokens = samples, tokens
        self.version += 1

    def _identity(self) -> dict[str, Any]:
        return {
            "num_samples": len(self.tokens),
            "num_tokens": int(self.tokens.sum()),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "global_batch_size": self.global_batch_size,
            "global_batch_tokens": self.global_batch_tokens,
        }

    def _order_and_bounds(self, epoch: int) -> tuple[IntArray, IntArray]:
        if self._cached is None or self._cached[0] != epoch:
            size = len(self.tokens)
            order = permutation(self.seed, epoch, size) if self.shuffle else np.arange(size, dtype=np.int64)
            if self.global_batch_size is not None:
                bounds = cut_by_samples(size, self.global_batch_size)
            else:
                bounds = cut_by_tokens(self.tokens[order], int(self.global_batch_tokens or 1))
            self._cached = (epoch, order, bounds)
        return self._cached[1], self._cached[2]


def check_batch_size(global_batch_size: int | None, global_batch_tokens: int | None) -> None:
    """Refuse anything but exactly one of the two sizes, at least 1.

    Raises:
        ValueError: both or none are given, or the number is no integer from 1.
    """
    if (global_batch_size is None) == (global_batch_tokens is None):
        raise ValueError(
            f"global_batch_size is {global_batch_size!r} and global_batch_tokens is {global_batch_tokens!r}; give "
            "exactly one of them: the samples, or the tokens, of an optimizer step over all ranks"
        )
    if global_batch_size is not None:
        check_integer("global_batch_size", global_batch_size, minimum=1)
    else:
        check_integer("global_batch_tokens", global_batch_tokens, minimum=1)


def check_integer(name: str, value: Any, *, minimum: int) -> int:
    """Give back an integer that is large enough.

    Raises:
        ValueError: it is not; the sentence names it.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {minimum}")
    return value
