"""Which samples make up which optimizer step: one global permutation of (seed, epoch), cut into steps.

Either the content of a step is fixed before anything is planned, as the next slice of the permutation, so that cost
never biases the data. Or a planner draws it from the next samples of the permutation. The saved position depends on
neither the number of ranks nor the planner nor the profile, so each can resume what any other has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.cost import IntArray
from lightning_dcp.data.checks import check_integer
from lightning_dcp.data.drawing import EpochDraw, Stray
from lightning_dcp.data.saved import SIZES, STATE_VERSION, Position, changed_steps, check_same
from lightning_dcp.data.standing import Standing, left_of
from lightning_dcp.data.steps import Given, Steps


class StepSampler(Standing):
    """The steps of an epoch, and what of it was consumed.

    A step counts as consumed when :meth:`mark_consumed` is called for it, not when it is drawn: with workers the
    drawing runs ahead. Iterating starts at the first step that was not consumed; an epoch that was consumed to
    its end is followed by the next one.

    Args:
        tokens: tokens of each sample of the dataset, int64 ``[n]``.
        seed: with the epoch it determines the order.
        shuffle: ``False`` keeps the order of the dataset in every epoch.
        global_batch_size: samples of an optimizer step; the last step of an epoch may be shorter.
        global_batch_tokens: tokens of an optimizer step instead (see
            :func:`~lightning_dcp.data.cutting.cut_by_tokens`). Without either of the two a planner has to draw the
            samples of each step.
        given: what a user's own sampler or loader decides.

    Raises:
        ValueError: the dataset is empty, both sizes are given, or a number is out of range.
    """

    def __init__(
        self,
        tokens: IntArray,
        *,
        seed: int = 0,
        shuffle: bool = True,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        given: Given | None = None,
    ) -> None:
        super().__init__(
            Steps.of(tokens, (global_batch_size, global_batch_tokens), seed, shuffle, given or Given())
        )
        self.consumed_samples = 0
        self.consumed_tokens = 0
        self.stray = Stray()
        """How far the last consumed step strayed from the order of the epoch."""

    def __iter__(self) -> Iterator[IntArray]:
        """The sample ids of each fixed step that was not consumed; where to start is decided at the first ``next``."""
        epoch, first = self.begin()
        for step in range(first, self.num_steps(epoch)):
            yield self.samples(epoch, step)

    def begin(self) -> tuple[int, int]:
        """Epoch and step at which an iteration starts; moves on to the next epoch where one was consumed whole."""
        if self._left.left == 0:
            finished = self._epoch
            self._go_to(finished + 1)
            self._finished_epoch = finished
        if self.drawing:
            return self._epoch, self._step
        return self._epoch, self._cut(self._epoch).step_at(self.position)

    def draw(self) -> EpochDraw:
        """What is left of the epoch, for a planner to draw the coming steps from; call it after :meth:`begin`."""
        order, epoch = self._steps.order, self._epoch
        return EpochDraw(self._left.copy(), order.samples(epoch), partial(order.places, epoch))

    @property
    def consumed_of_epoch(self) -> int:
        """Samples of the epoch that were consumed."""
        return self._left.size - self._left.left

    def left_ids(self) -> IntArray:
        """Samples of the epoch that were not consumed, in its order."""
        ids: IntArray = self._steps.order.samples(self._epoch)[self._left.places()]
        return ids

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; called by Lightning before each one.

        In the current epoch the position stays, so a resumed run goes on where it stopped. A state that was saved
        after the last step of an epoch leads to the next one also when the trainer repeats the old number.
        """
        check_integer("epoch", epoch, minimum=0)
        if epoch == self._finished_epoch or (epoch == self._epoch and self._left.left > 0):
            return
        self._go_to(epoch)
        self.version += 1

    def mark_consumed(self, epoch: int, step: int, ids: IntArray | None = None) -> None:
        """A step was trained on; the saved state starts behind it.

        Args:
            epoch: its epoch.
            step: its number in the epoch.
            ids: its samples, where a planner drew them.

        Raises:
            RuntimeError: the step is not one that lies ahead in the current epoch.
        """
        before = self._left.size - self._left.left
        try:
            if epoch != self._epoch or step < self._step:
                raise ValueError(f"the next step is {self._step}")
            if self.drawing:
                places = self._steps.order.places(epoch, ids if ids is not None else np.zeros(0, np.int64))
                self._left.take(places)
            else:
                cut = self._cut(epoch)
                places, start = cut.places_of(step), cut.start_of(cut.step_at(self.position))
                before += cut.start_of(step) - start
                self._left.take(cut.places[start : cut.start_of(step + 1)])
        except (ValueError, IndexError) as error:
            raise RuntimeError(
                f"step {step} of epoch {epoch} was marked as consumed, but {before} of {self._left.size} samples of "
                f"epoch {self._epoch} were consumed already ({error}); mark each step once, in order"
            ) from error
        self.stray = Stray.of(places, before)
        self.consumed_samples += len(places)
        self.consumed_tokens += self._steps.tokens_of(self._steps.order.samples(epoch)[places])
        self._step, self._finished_epoch = step + 1, None
        if self.drawing:
            self._drawn, self._rest = True, None

    def go_on_from(self, former: StepSampler) -> None:
        """Take the place of a sampler of the same run: its counts, and the size of its steps where that was resumed."""
        self.consumed_samples, self.consumed_tokens = former.consumed_samples, former.consumed_tokens
        sized = self._steps.sized_as(former._steps)
        if sized is not self._steps:
            self._steps = sized
            self._go_to(self._epoch)
            self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """Position behind the last consumed step; plain numbers, the same on every rank."""
        position = Position(
            epoch=self._epoch,
            position=self.position,
            beyond=self._left.beyond.tolist(),
            step=self._step,
            drawn=self._drawn,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
        )
        identity = {**self._steps.identity(), **self._steps.content(self._epoch)}
        left_out = {"left_out": self.left_out.tolist()} if len(self.left_out) else {}
        return {
            "version": STATE_VERSION,
            **identity,
            **self._sizes(),
            **left_out,
            **position.to_dict(),
            "epoch_samples": self._left.size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, on any number of ranks and with any planner.

        Samples that were consumed do not come again in the epoch, all others do once. Fixed steps are the same as
        without the interruption, unless a planner drew some of the epoch: then what is left is cut from its first
        sample on. A planner that draws makes the same steps if it is offered the same cost model and ranks.

        Raises:
            ValueError: the state belongs to another dataset, seed, order or size of fixed steps, or is damaged. The
                sentence names the field.
        """
        check_same(state, {"version": STATE_VERSION, **self._steps.identity()})
        saved = Position.from_dict(state)
        steps = self._steps.as_saved(state, saved.epoch)
        if not self.drawing and any(state.get(name) is not None for name in SIZES):
            check_same(state, steps.sizes())
        left = left_of(saved, steps, drawing=self.drawing)
        for message in (changed_steps(state, self._sizes(steps)), steps.followed_instead_of(self._steps)):
            if message is not None:
                rank_zero_warn(message)
        ours, self._steps = self.left_out, steps
        self._go_to(saved.epoch)
        self._left, self._drawn, self._step = left, saved.drawn, saved.step
        if not self.drawing and not saved.drawn:
            self._step = self._cut(saved.epoch).step_at(saved.position)
        self._finished_epoch = saved.epoch if left.left == 0 else None
        self.consumed_samples, self.consumed_tokens = saved.consumed_samples, saved.consumed_tokens
        self.version += 1
        if self._left_out_known:
            self.leave_out(ours)
