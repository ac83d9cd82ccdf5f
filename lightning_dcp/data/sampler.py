"""Which samples make up which optimizer step: one global permutation of (seed, epoch), cut into steps.

Either the content of a step is fixed before anything is planned, as the next slice of the permutation, so that cost
never biases the data. Or a planner draws it from the next samples of the permutation. The saved position depends on
neither the number of ranks nor the planner nor the profile, so each can resume what any other has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.cost import IntArray
from lightning_dcp.data.checks import check_batch_size, check_integer
from lightning_dcp.data.cutting import Cut, Cutter
from lightning_dcp.data.drawing import EpochDraw, Stray
from lightning_dcp.data.order import EpochOrder
from lightning_dcp.data.remaining import Remaining
from lightning_dcp.data.saved import SIZES, STATE_VERSION, Position, changed_steps, check_same


class StepSampler:
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
        """Counts the jumps (another epoch, another state, another mode); what was drawn before is out of date."""
        self.stray = Stray()
        """How far the last consumed step strayed from the order of the epoch."""
        self._drawing = not self.has_size
        self._epoch = self._step = 0
        self._drawn = False
        self._left = Remaining(len(self.tokens))
        self._finished_epoch: int | None = None
        self._rest: Cut | None = None
        self._order = EpochOrder(len(self.tokens), seed, shuffle)
        self._cutter = Cutter(self._order, self.tokens, global_batch_size, global_batch_tokens)

    @property
    def has_size(self) -> bool:
        """Whether samples or tokens of a step are given."""
        return self.global_batch_size is not None or self.global_batch_tokens is not None

    @property
    def drawing(self) -> bool:
        """Whether a planner draws the samples of each step; a size that is given does not count then."""
        return self._drawing

    @drawing.setter
    def drawing(self, drawing: bool) -> None:
        if not drawing and not self.has_size:
            raise ValueError("neither global_batch_size nor global_batch_tokens is given, so steps have no size")
        self.version += int(drawing != self._drawing)
        self._drawing = drawing

    @property
    def epoch(self) -> int:
        """Epoch of the permutation."""
        return self._epoch

    @property
    def position(self) -> int:
        """Place of the epoch's order before which all samples were consumed."""
        return self._left.position

    def __len__(self) -> int:
        """Steps of an epoch.

        Raises:
            TypeError: the number differs between epochs. Lightning then runs each epoch to its end.
        """
        if self.global_batch_size is None and self.shuffle and not self.drawing:
            raise TypeError(
                "with global_batch_tokens and shuffle=True the number of steps differs between epochs, so there "
                "is no length; use num_steps(epoch), Trainer(max_steps=...) or global_batch_size"
            )
        return self.num_steps(self._epoch)

    def num_steps(self, epoch: int) -> int:
        """Steps of one epoch.

        Raises:
            TypeError: a planner draws them.
        """
        if self.drawing:
            raise TypeError(
                "the planner draws the samples of each step, so the number of steps is not known before they are "
                "planned; set Trainer(max_steps=...), or use a planner that plans steps of global_batch_size samples"
            )
        return self._cut(epoch).stop

    def samples(self, epoch: int, step: int) -> IntArray:
        """Sample ids of a fixed step in the order of the permutation."""
        return self._order.samples(epoch)[self._cut(epoch).places_of(step)]

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
        return EpochDraw(self._left.copy(), self._order.samples(self._epoch), self._order.places(self._epoch))

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
        before = len(self.tokens) - self._left.left
        try:
            if epoch != self._epoch or step < self._step:
                raise ValueError(f"the next step is {self._step}")
            if self.drawing:
                places = self._order.places(epoch)[ids if ids is not None else []]
                self._left.take(places)
            else:
                cut = self._cut(epoch)
                places, start = cut.places_of(step), cut.start_of(cut.step_at(self.position))
                before += cut.start_of(step) - start
                self._left.take(cut.places[start : cut.start_of(step + 1)])
        except (ValueError, IndexError) as error:
            raise RuntimeError(
                f"step {step} of epoch {epoch} was marked as consumed, but {before} of {len(self.tokens)} samples of "
                f"epoch {self._epoch} were consumed already ({error}); mark each step once, in order"
            ) from error
        self.stray = Stray.of(places, before)
        self.consumed_samples += len(places)
        self.consumed_tokens += int(self.tokens[self._order.samples(epoch)[places]].sum())
        self._step, self._finished_epoch = step + 1, None
        if self.drawing:
            self._drawn, self._rest = True, None

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
        return {"version": STATE_VERSION, **self._identity(), **self._sizes(), **position.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, on any number of ranks and with any planner.

        Samples that were consumed do not come again in the epoch, all others do once. Fixed steps are the same as
        without the interruption, unless a planner drew some of the epoch: then what is left is cut from its first
        sample on. A planner that draws makes the same steps if it is offered the same cost model and ranks.

        Raises:
            ValueError: the state belongs to another dataset, seed, order or size of fixed steps, or is damaged. The
                sentence names the field.
        """
        check_same(state, {"version": STATE_VERSION, **self._identity()})
        saved = Position.from_dict(state)
        if not self.drawing and any(state.get(name) is not None for name in SIZES):
            check_same(state, self._sizes())
        left = self._left_of(saved)
        message = changed_steps(state, self._sizes())
        if message is not None:
            rank_zero_warn(message)
        self._go_to(saved.epoch)
        self._left, self._drawn, self._step = left, saved.drawn, saved.step
        if not self.drawing and not saved.drawn:
            self._step = self._cut(saved.epoch).step_at(saved.position)
        self._finished_epoch = saved.epoch if left.left == 0 else None
        self.consumed_samples, self.consumed_tokens = saved.consumed_samples, saved.consumed_tokens
        self.version += 1

    def _left_of(self, saved: Position) -> Remaining:
        try:
            left = Remaining(len(self.tokens), saved.position, saved.beyond)
            regular = saved.drawn or self.drawing or saved.position in self._cutter.whole(saved.epoch).bounds
            if not regular or (saved.beyond and not saved.drawn):
                raise ValueError("no fixed step starts there")
        except ValueError as error:
            raise ValueError(
                f"the saved position is {saved.position} with {list(saved.beyond[:5])} beyond it, where no step of "
                f"epoch {saved.epoch} starts; it was saved by another sampler or over other lengths"
            ) from error
        return left

    def _go_to(self, epoch: int) -> None:
        self._epoch, self._step, self._drawn = epoch, 0, False
        self._left = Remaining(len(self.tokens))
        self._rest = self._finished_epoch = None

    def _identity(self) -> dict[str, Any]:
        return {
            "num_samples": len(self.tokens),
            "num_tokens": int(self.tokens.sum()),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _sizes(self) -> dict[str, int | None]:
        """What fixes the steps: nothing where a planner draws them, whatever is given."""
        return {name: None if self.drawing else getattr(self, name) for name in SIZES}

    def _cut(self, epoch: int) -> Cut:
        """The fixed steps of an epoch; where some of it was drawn, those of what was left then."""
        if epoch != self._epoch or not self._drawn:
            return self._cutter.whole(epoch)
        if self._rest is None:
            self._rest = self._cutter.rest(epoch, self._step, self._left.places())
        return self._rest
