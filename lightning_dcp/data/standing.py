"""Where a run stands among its steps: epoch, step, and what of the epoch is left."""

from __future__ import annotations

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.cost import IntArray
from lightning_dcp.data.counts import EpochCounts
from lightning_dcp.data.cutting import Cut
from lightning_dcp.data.remaining import Remaining
from lightning_dcp.data.saved import SIZES, Position
from lightning_dcp.data.steps import Steps


class Standing:
    """An epoch and what is left of it.

    Args:
        steps: order and size of the steps.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.version = 0
        """Counts the jumps (another epoch, another state, another mode); what was drawn before is out of date."""
        self._drawing = not steps.size.is_given
        self._left_out_known = False
        self._epoch = self._step = 0
        self._drawn = False
        self._left = Remaining(self._places(0))
        self._rest: Cut | None = None
        self._finished_epoch: int | None = None

    @property
    def seed(self) -> int:
        """With the epoch it determines the order."""
        return self._steps.seed

    @property
    def global_batch_size(self) -> int | None:
        """Samples of an optimizer step."""
        return self._steps.size.samples

    @property
    def global_batch_tokens(self) -> int | None:
        """Tokens of an optimizer step."""
        return self._steps.size.tokens

    @property
    def has_size(self) -> bool:
        """Whether something is given that fixes the steps."""
        return self._steps.size.is_given

    @property
    def drawing(self) -> bool:
        """Whether a planner draws the samples of each step; a size that is given does not count then."""
        return self._drawing

    @drawing.setter
    def drawing(self, drawing: bool) -> None:
        if not drawing and not self.has_size:
            raise ValueError("neither global_batch_size nor global_batch_tokens is given, so steps have no size")
        if drawing == self._drawing:
            return
        self.version += 1
        self._drawing = drawing
        if self._places(self._epoch) != self._left.size and self.position == 0:
            self._left = Remaining(self._places(self._epoch))

    @property
    def epoch(self) -> int:
        """Epoch of the permutation."""
        return self._epoch

    @property
    def left_out(self) -> IntArray:
        """Samples of the dataset that no epoch has, ascending."""
        return self._steps.order.left_out

    @property
    def position(self) -> int:
        """Place of the epoch's order before which all samples were consumed."""
        return self._left.position

    def __len__(self) -> int:
        """Steps of an epoch.

        Raises:
            TypeError: the number differs between epochs. Lightning then runs each epoch to its end.
        """
        if not self.drawing:
            self._steps.check_countable()
            if self._drawn:
                raise TypeError(
                    f"some steps of epoch {self._epoch} were other ones before the run was resumed, so this epoch has "
                    "another number of steps than those after it; set Trainer(max_steps=...)"
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
        samples: IntArray = self._steps.order.samples(epoch)[self._cut(epoch).places_of(step)]
        return samples

    def leave_out(self, samples: IntArray) -> None:
        """From now on no epoch has these samples of the dataset; what was consumed of the running epoch stays so.

        Where some of it was, with others left out (in the run that is resumed), what is left is cut anew, and a
        warning says so.

        Raises:
            ValueError: nothing is left.
        """
        self._left_out_known = True
        if np.array_equal(np.unique(samples), self.left_out):
            return
        order, epoch = self._steps.order, self._epoch
        beyond = self._left.beyond
        consumed = order.samples(epoch)[np.concatenate([np.arange(self.position), beyond])]
        self._steps.leave_out(samples)
        self.version += 1
        if not len(consumed):
            self._left = Remaining(self._places(epoch))
            return
        kept = consumed[~np.isin(consumed % len(self._steps.tokens), self.left_out)]
        self._left = Remaining.without(len(order.samples(epoch)), order.places(epoch, kept))
        self._drawn, self._rest = True, None
        self._finished_epoch = epoch if self._left.left == 0 else None
        rank_zero_warn(
            f"{len(self.left_out)} samples are left out now, others than in the saved run: the rest of epoch {epoch} "
            "is trained, each sample once, but in other steps than the saved run would have made"
        )

    def counts(self) -> EpochCounts:
        """What became of the samples of the running epoch, or of the last one before the next one begins."""
        planned = len(self._steps.order.samples(self._epoch))
        trained = self._left.size - self._left.left
        return EpochCounts(
            epoch=self._epoch,
            planned=planned,
            trained=trained,
            left=planned - trained,
            left_out=self._steps.order.count_left_out(self._epoch),
        )

    def _places(self, epoch: int) -> int:
        """Places of an epoch that its steps have."""
        return len(self._steps.order.samples(epoch)) if self.drawing else self._steps.cutter.places(epoch)

    def _go_to(self, epoch: int) -> None:
        self._epoch, self._step, self._drawn = epoch, 0, False
        self._left = Remaining(self._places(epoch))
        self._rest = self._finished_epoch = None

    def _sizes(self, steps: Steps | None = None) -> dict[str, int | None]:
        """What fixes the steps: nothing where a planner draws them, whatever is given."""
        return dict.fromkeys(SIZES) if self.drawing else (steps or self._steps).sizes()

    def _cut(self, epoch: int) -> Cut:
        """The fixed steps of an epoch; where some of it was drawn, those of what was left then."""
        if epoch != self._epoch or not self._drawn:
            return self._steps.cutter.whole(epoch)
        if self._rest is None:
            self._rest = self._steps.cutter.rest(epoch, self._step, self._left.places())
        return self._rest


def left_of(saved: Position, steps: Steps, *, drawing: bool) -> Remaining:
    """What is left of the epoch of a saved position.

    Args:
        saved: the position.
        steps: the steps of the saved run.
        drawing: whether a planner draws the steps to come.

    Raises:
        ValueError: no step starts at the position.
    """
    whole = saved.drawn or drawing
    size = len(steps.order.samples(saved.epoch)) if whole else steps.cutter.places(saved.epoch)
    try:
        left = Remaining(size, saved.position, saved.beyond)
        if not (whole or saved.position in steps.cutter.whole(saved.epoch).bounds):
            raise ValueError("no fixed step starts there")
        if saved.beyond and not saved.drawn:
            raise ValueError("no fixed step leaves a gap")
    except ValueError as error:
        raise ValueError(
            f"the saved position is {saved.position} with {list(saved.beyond[:5])} beyond it, where no step of "
            f"epoch {saved.epoch} starts; it was saved by another sampler or over other lengths"
        ) from error
    return left
