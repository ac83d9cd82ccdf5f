"""Lower bounds on the makespan of a step: no plan of the same cost model can be shorter.

Let ``c_i(D)`` be the least ``p T(b, s_i, p, r) / b`` over all ``p, b, r`` with ``T <= D`` and ``M <= limit``: the
least rank-time that sample ``i`` takes in any plan of makespan ``D``. ``LB(D) = (1 / W) sum_i c_i(D)`` and
``LB* = min{D : LB(D) <= D}``. It holds for mixed lengths in one micro-batch too, as ``T`` and ``M`` never fall
with the length: ``b`` samples padded to ``s`` cost ``p T(b, s, p) >= sum_i p T(b, s_i, p) / b``.

``LB*`` counts no padding and lets every sample sit in its best batch. The tighter bound prices both; its proof stands
in :mod:`lightning_dcp.planners.padded.certificate`.
"""

from __future__ import annotations

from lightning_dcp.planners.packing import packed_lower_bound
from lightning_dcp.planners.padded import ALL, Bounds, usual_margin
from lightning_dcp.planners.protocol import PlanRequest

_ROUNDS = 3


def lower_bound(request: PlanRequest) -> int:
    """``LB*`` in nanoseconds, rounded down: at most the makespan of every plan of this request.

    It is at least ``max_i min_p T(1, s_i, p)``. With ``limits.packing`` it is the bound for packed rows.

    Raises:
        InfeasibleError: a sample fits no setting.
        ValueError: world and profile have no size in common.
    """
    if request.limits.packing:
        return packed_lower_bound(request)
    return Bounds.build(request, 0).least if len(request.shapes) else 0


def padded_lower_bound(request: PlanRequest) -> int:
    """The bound that prices padding, in nanoseconds; at least ``LB*``, at most the makespan of every padded plan.

    It is the tightest that is made here, whatever that takes. A plan's own ``lower_bound`` counts wide groups that are
    clearly dearer than narrow ones more roughly and looks once, so that it may be a little lower.

    Raises:
        InfeasibleError: a sample fits no setting.
        ValueError: ``limits.packing`` is set, or world and profile have no size in common.
    """
    if request.limits.packing:
        raise ValueError("packing=True: rows of mixed lengths are not padded; use lower_bound")
    if not len(request.shapes):
        return 0
    margins = (usual_margin(len(request.shapes)), ALL)
    return max(Bounds.build(request, margin).certify(_ROUNDS)[1] for margin in margins)
