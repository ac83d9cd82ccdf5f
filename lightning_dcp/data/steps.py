"""What the steps of a dataset are before anybody plans: their order, their size, what a checkpoint says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_dcp.cost import IntArray
from lightning_dcp.data.checks import check_batch_size, check_integer
from lightning_dcp.data.cutting import Cutter, StepSize
from lightning_dcp.data.order import Draw, EpochOrder, drawing
from lightning_dcp.data.saved import SIZES, check_same, left_out_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a user's sampler or loader decides about the steps.

    Attributes:
        draw: draws an epoch; ``None`` leaves the order to seed and shuffle.
        name: of what draws, for checkpoints and messages.
        sized: every epoch has equally many places.
        batches_per_step: batches of a step, where ``draw`` gives batches.
        drop_last: an epoch ends with its last whole step.
        per_rank: samples (batches) of a step for each rank, where their number came from the number of ranks. A
            resumed run then keeps the steps of the saved one, whatever its number of ranks.
    """

    draw: Draw | None = None
    name: str = ""
    sized: bool = True
    batches_per_step: int | None = None
    drop_last: bool = False
    per_rank: int | None = None


class Steps:
    """Order and size of the steps.

    Args:
        tokens: tokens of each sample of the dataset, int64 ``[n]``.
        seed: with the epoch it determines the order.
        shuffle: ``False`` keeps the order of the dataset in every epoch.
        size: what a step holds.
        given: what a user decided.
    """

    def __init__(self, tokens: IntArray, *, seed: int, shuffle: bool, size: StepSize, given: Given) -> None:
        self.tokens = tokens
        self.seed = seed
        self.shuffle = shuffle
        self.given = given
        self.size = size
        self.order = EpochOrder(len(tokens), given.draw or drawing(len(tokens), seed, shuffle))
        self.cutter = Cutter(self.order, tokens, size)

    @classmethod
    def of(
        cls, tokens: IntArray, sizes: tuple[int | None, int | None], seed: int, shuffle: bool, given: Given
    ) -> Steps:
        """Check what was given.

        Args:
            tokens: tokens of each sample of the dataset.
            sizes: samples and tokens of a step.
            seed: with the epoch it determines the order.
            shuffle: ``False`` keeps the order of the dataset in every epoch.
            given: what a user decided.

        Raises:
            ValueError: the dataset is empty, both sizes are given, or a number is out of range.
        """
        samples, step_tokens = check_batch_size(*sizes)
        check_integer("seed", seed, minimum=0)
        if len(tokens) == 0:
            raise ValueError("the dataset is empty; training needs at least one sample")
        size = StepSize(
            samples=samples, tokens=step_tokens, batches=given.batches_per_step, drop_last=given.drop_last
        )
        return cls(np.asarray(tokens, dtype=np.int64), seed=int(seed), shuffle=shuffle, size=size, given=given)

    def leave_out(self, samples: IntArray) -> None:
        """From now on no epoch has these samples of the dataset.

        Raises:
            ValueError: nothing is left.
        """
        if len(np.unique(samples)) >= len(self.tokens):
            raise ValueError(
                f"all {len(self.tokens)} samples of the dataset are left out; nothing is left to train"
            )
        self.order.leave_out(samples)
        self.cutter = Cutter(self.order, self.tokens, self.size)

    def tokens_of(self, ids: IntArray) -> int:
        """Tokens of samples, given by their ids, together."""
        return int(self.tokens[ids % len(self.tokens)].sum())

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the saved one, in every epoch."""
        own = {"sampler": self.given.name} if self.given.draw is not None else {}
        kept = {"drop_last": True} if self.given.drop_last else {}
        rank = {"samples_per_rank": self.given.per_rank} if self.given.per_rank and self.size.samples else {}
        return {
            "num_samples": len(self.tokens),
            "num_tokens": int(self.tokens.sum()),
            "seed": self.seed,
            "shuffle": self.shuffle,
            **own,
            **kept,
            **rank,
        }

    def content(self, epoch: int) -> dict[str, Any]:
        """What it must have in common in one epoch: the order of a user's sampler."""
        return {"order": self.order.digest(epoch)} if self.given.draw is not None else {}

    def sizes(self) -> dict[str, int | None]:
        """What fixes the steps, by the names of a checkpoint."""
        return dict(zip(SIZES, (self.size.samples, self.size.tokens, self.size.batches), strict=True))

    def check_countable(self) -> None:
        """Refuse to tell the steps of an epoch where their number differs between epochs.

        Raises:
            TypeError: it does. Lightning then runs each epoch to its end.
        """
        if self.size.tokens is not None and (self.shuffle or self.given.draw is not None):
            raise TypeError(
                "with global_batch_tokens and another order in each epoch the number of steps differs between epochs, "
                "so there is no length; use num_steps(epoch), Trainer(max_steps=...) or global_batch_size"
            )
        if not self.given.sized:
            raise TypeError(
                f"{self.given.name} has no __len__, so the number of steps is not known before an epoch is drawn; set "
                "Trainer(max_steps=...), or give it __len__"
            )

    def as_saved(self, state: Mapping[str, Any], epoch: int) -> Steps:
        """The same steps with what a saved state says of them: what is left out, and the size where it is followed.

        Args:
            state: of a checkpoint.
            epoch: where it stands.

        Raises:
            ValueError: a user's sampler gives another order, or a field is damaged.
        """
        check_same(state, self.content(epoch))
        size = self._followed(state)
        saved = Steps(self.tokens, seed=self.seed, shuffle=self.shuffle, size=size, given=self.given)
        saved.leave_out(left_out_of(state, len(self.tokens)))
        return saved

    def sized_as(self, former: Steps) -> Steps:
        """The same steps with the size of former ones, where both sizes came from the same number per rank."""
        per_rank = self.given.per_rank
        if per_rank is None or per_rank != former.given.per_rank or self.size == former.size:
            return self
        return Steps(self.tokens, seed=self.seed, shuffle=self.shuffle, size=former.size, given=self.given)

    def followed_instead_of(self, ours: Steps) -> str | None:
        """What to say where the size of the saved run's steps is kept instead of ours."""
        if self.size == ours.size:
            return None
        what = "batches" if self.size.batches is not None else "samples"
        then, now = (s.batches if s.batches is not None else s.samples for s in (self.size, ours.size))
        return (
            f"The steps of the saved run hold {then} {what} over all ranks; the loader on this number of ranks would "
            f"make steps of {now}. The run goes on with {then}, so that its steps are those of the saved run. For "
            "other steps start from the weights alone (load_from_checkpoint)"
        )

    def _followed(self, state: Mapping[str, Any]) -> StepSize:
        """The size of the saved steps, where ours came from the number of ranks; else our own."""
        saved = [state.get(name) for name in SIZES]
        if self.given.per_rank is None or all(value is None for value in saved):
            return self.size
        samples, tokens, batches = (
            None if value is None else check_integer(name, value, minimum=1)
            for name, value in zip(SIZES, saved, strict=True)
        )
        return replace(self.size, samples=samples, tokens=tokens, batches=batches)
