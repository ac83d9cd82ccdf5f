"""A planner that draws, small enough to foresee."""

from __future__ import annotations

from dataclasses import replace

from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import Balanced
from lightning_dcp.planners.protocol import PlanRequest
from lightning_dcp.topology import World
from tests.data_tools import RoundRobin


class Drawing(RoundRobin):
    """Draws every ``stride``-th of the offered samples, at most ``most``, and deals them round the ranks."""

    name = "drawing"
    draws = True

    def __init__(self, lookahead: int = 6, stride: int = 2, most: int = 3, sp_size: int = 1) -> None:
        super().__init__(batch_size=2, sp_size=sp_size)
        self.window = lookahead
        self.stride = stride
        self.most = most
        self.offered: list[tuple[int, ...]] = []

    def lookahead(self, world: World) -> int:
        return self.window

    def plan(self, request: PlanRequest) -> IterationPlan:
        self.offered.append(request.ids)
        chosen = slice(None, self.stride * self.most, self.stride)
        return super().plan(replace(request, sample_ids=request.sample_ids[chosen], shapes=request.shapes[chosen]))


class Alternate(Drawing):
    """Draws as :class:`Drawing` does, and plans what it drew as the default planner would."""

    name = "alternate"

    def plan(self, request: PlanRequest) -> IterationPlan:
        chosen = slice(None, self.stride * self.most, self.stride)
        return Balanced().plan(
            replace(request, sample_ids=request.sample_ids[chosen], shapes=request.shapes[chosen])
        )
