"""Lower bounds on the makespan of a step whose micro-batches are padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.planners.assembly import check_feasible, usable_sp_sizes
from lightning_dcp.planners.padded.certificate import Certificate
from lightning_dcp.planners.padded.least import NEVER
from lightning_dcp.planners.padded.menus import Menu, Singles, build, shares_of, singles_of, unasked
from lightning_dcp.planners.padded.prices import Cuts, cut
from lightning_dcp.planners.padded.samples import Samples
from lightning_dcp.planners.padded.sources import Alone, Source, for_bounds, for_certificates, for_plans
from lightning_dcp.planners.protocol import PlanRequest

_MARGIN = 1024
ALL = 1000
"""Margin in percent at which wide groups are asked for everything that may ever matter."""


def usual_margin(count: int) -> int:
    """The margin in percent for plans of so many samples: with more of them wide groups are rarely of use."""
    return _MARGIN // count


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of one request and what they were made of.

    Attributes:
        request: the request; it has samples.
        samples: its samples, sorted.
        source: costs of what plans may do.
        alone: costs of samples alone, no dearer than in any plan.
        menus: menus of these.
        least: ``LB*``, nanoseconds.
        margin: how much of wide groups was asked for, in percent.
    """

    request: PlanRequest
    samples: Samples
    source: Source
    alone: Alone
    menus: Sequence[Menu]
    least: int
    margin: int

    @classmethod
    def build(cls, request: PlanRequest, margin: int) -> Bounds:
        """Compute ``LB*``.

        Raises:
            InfeasibleError: a sample fits no setting.
            ValueError: world and profile have no size in common.
        """
        sizes = usable_sp_sizes(request)
        samples = Samples.build(request)
        alone = for_bounds(request, samples, sizes)
        source = for_plans(request, samples, alone)
        singles = singles_of(source, sizes)
        _require(request, singles)
        if source is not alone:
            singles = singles_of(alone, sizes)
        menus = build(request, alone, singles, margin)
        return cls(
            request=request,
            samples=samples,
            source=source,
            alone=alone,
            menus=menus,
            least=shares_of(menus, alone.counts).makespan(request.world.world_size),
            margin=margin,
        )

    def certify(self, rounds: int = 1) -> tuple[Cuts, int]:
        """The cheapest cut within about the bound that prices padding, and that bound if it is above ``LB*``.

        Args:
            rounds: how often the cut is made anew within the bound found so far.
        """
        alone, menus = self._padded()
        unit, world_size = self.samples.unit, self.request.world.world_size
        certificate = Certificate(samples=self.samples, alone=alone, menus=menus)
        within, found = self.least, self.least
        for _ in range(rounds):
            cuts = cut(self.samples, menus, unit, unasked(alone, menus, within)[unit], within)
            # With prices for this makespan no plan can end sooner than their sum, if that is not above it.
            within = max(within, -(-int(cuts.least[0]) // world_size))
            found = max(found, certificate.bound(cuts.least, within, world_size))
        return cuts, found

    def _padded(self) -> tuple[Alone, Sequence[Menu]]:
        alone = for_certificates(self.samples, self.alone)
        if alone is self.alone:
            return self.alone, self.menus
        return alone, build(self.request, alone, singles_of(alone, tuple(alone.tokens)), self.margin)


def _require(request: PlanRequest, singles: Singles) -> None:
    """Refuse a step with a sample that fits no group even alone.

    Raises:
        InfeasibleError: names the first such sample and why it does not fit.
        ValueError: a sample takes too long on every group to be counted with others.
    """
    fastest = np.concatenate([times for times, _ in singles.values()]).min(axis=0)
    if (fastest >= NEVER).any():
        check_feasible(request, tuple(singles))
        raise ValueError(
            f"a sample takes 2**50 ns (13 days) or more of the ranks' time together on groups of each of "
            f"{tuple(singles)} ranks; the profile is damaged"
        )
