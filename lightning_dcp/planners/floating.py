"""Steps whose number of samples follows the data: the prefix of the epoch's order that wastes least time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.balanced import Balanced
from lightning_dcp.planners.options import check_integers
from lightning_dcp.planners.protocol import Planner, PlanRequest
from lightning_dcp.topology import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Floating:
    """The next ``N`` samples of the order, ``N`` between two bounds, planned by another planner.

    Of a few ``N``, evenly spaced on a logarithmic scale, the one of most useful work per time is taken: the rank-time
    that its samples need in any plan (:meth:`CostModel.useful_time`), over the step's makespan and what ends every
    step (``profile.sync_time``). So ``N`` grows where the end of a step is dear, and falls where the next samples
    would leave ranks idle. Samples per time would not do: it ends steps before long samples, so that those would
    meet in other steps than short ones, and weigh more or less than they should.

    The order of the samples stays as it is, and each is trained once. A step's size depends on lengths; an
    optimizer whose rate is tuned to one number of samples should know.

    Attributes:
        min_samples: least samples of a step; the last of an epoch may have fewer. ``None``: half of the run's
            ``global_batch_size`` (see :func:`~lightning_dcp.planners.adapting.for_dataset`).
        max_samples: most samples of a step. ``None``: twice the run's ``global_batch_size``.
        candidates: how many ``N`` are planned for each step.
        planner: plans the samples of a step; ``None`` for :class:`Balanced`.

    Raises:
        ValueError: a bound is out of range, or the planner draws by itself.
    """

    min_samples: int | None = None
    max_samples: int | None = None
    candidates: int = 8
    planner: Planner | None = None
    name: str = field(default="floating", init=False)
    draws: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        check_integers(self, 2, "candidates")
        check_integers(self, 1, optional=("min_samples", "max_samples"))
        least, most = self.min_samples, self.max_samples
        if least is not None and most is not None and least > most:
            raise ValueError(
                f"min_samples={least}, max_samples={most}; allowed are integers with min_samples <= max_samples"
            )
        inner = self.inner
        if not isinstance(inner, Planner) or isinstance(inner, type):
            raise ValueError(f"planner={inner!r}; allowed are planner objects, such as Balanced()")
        if inner.draws:
            raise ValueError(
                f'planner "{inner.name}" draws the samples of a step by itself; give one that plans what it '
                "is given, such as Balanced()"
            )

    @property
    def inner(self) -> Planner:
        """The planner that it uses."""
        return Balanced() if self.planner is None else self.planner

    @property
    def lockstep(self) -> bool:
        """As the planner that it uses."""
        return self.inner.lockstep

    def around(self, samples: int) -> Floating:
        """With bounds where there were none: half and twice this number of samples."""
        least = max(samples // 2, 1) if self.min_samples is None else self.min_samples
        most = max(2 * samples, least) if self.max_samples is None else self.max_samples
        return replace(self, min_samples=min(least, most), max_samples=most)

    def lookahead(self, world: World) -> int:  # noqa: ARG002 - other planners need more on more ranks
        """One step and the least of the next, so that the end of the epoch is seen before it comes."""
        return sum(self._bounds())

    def plan(self, request: PlanRequest) -> IterationPlan:
        """Plan the best prefix of the offered samples.

        Raises:
            InfeasibleError: a sample fits no allowed setting.
        """
        if not len(request.sample_ids):
            return self.inner.plan(request)
        work = np.cumsum(request.cost.useful_time(request.shapes.prod(axis=1))).tolist()
        best: tuple[int, int, IterationPlan] | None = None
        for count in self._counts(len(request.sample_ids), self.lookahead(request.world)):
            part = replace(request, sample_ids=request.sample_ids[:count], shapes=request.shapes[:count])
            plan = self.inner.plan(part)
            time = plan.makespan + request.cost.profile.sync_time
            # Products of Python's integers: no rank can round another way.
            if best is None or work[count - 1] * best[1] > best[0] * time:
                best = work[count - 1], time, plan
        assert best is not None
        return best[2]

    def _bounds(self) -> tuple[int, int]:
        if self.min_samples is None or self.max_samples is None:
            raise ValueError(
                f"min_samples={self.min_samples}, max_samples={self.max_samples}: how many samples a step may have is "
                "not said; give both, or the global_batch_size that they are half and twice of"
            )
        return self.min_samples, self.max_samples

    def _counts(self, offered: int, wanted: int) -> list[int]:
        """Sizes to try, the largest first: of equally good ones it needs the fewest steps."""
        least, most = self._bounds()
        if offered <= least:
            return [offered]
        spaced = _geometric(least, most, self.candidates)
        counts = sorted({min(count, offered) for count in spaced}, reverse=True)
        if offered == wanted:
            return counts
        # The epoch ends here: no step of it should be left with less than the least.
        whole = [count for count in counts if count == offered or offered - count >= least]
        return whole or [min(offered, most)]


def _geometric(least: int, most: int, count: int) -> list[int]:
    """``count`` points of a geometric series from ``least`` to ``most``, each rounded to the nearest integer.

    In Python's integers: a logarithm or a power may differ in its last bit between two machines.
    """
    last = count - 1
    return [_rounded_root(least ** (last - k) * most**k, last, least, most) for k in range(count)]


def _rounded_root(power: int, degree: int, low: int, high: int) -> int:
    """The integer next to the root of a number, which lies from ``low`` to ``high``."""
    power <<= degree
    while low < high:
        middle = (low + high + 1) // 2
        if (2 * middle - 1) ** degree <= power:
            low = middle
        else:
            high = middle - 1
    return low
