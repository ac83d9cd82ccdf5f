"""When two gradients are the same, judged tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_dcp.selfcheck.results import Result
from lightning_dcp.selfcheck.runs import Bench


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a gradient may be from the reference: ``relative |b| + absolute |all b|`` for each tensor ``b``.

    The second term is for gradients that are zero in exact arithmetic (the bias of a key projection): they consist
    of rounding alone, whose size follows the whole gradient's.

    Attributes:
        relative, absolute: see above.
        output: relative difference of a module's output from which on the module is named.
    """

    relative: float
    absolute: float
    output: float


FLOAT32 = Tolerance(relative=1e-4, absolute=1e-6, output=1e-5)
"""Right models of up to 12 layers were within a hundredth of it."""

HALVES = {
    torch.bfloat16: Tolerance(relative=3e-2, absolute=5e-3, output=2e-2),
    torch.float16: Tolerance(relative=4e-3, absolute=1e-3, output=3e-3),
}
"""For models that cast to half precision by themselves. Right ones used a fifth of it; a wrong position in a fresh
model may be below it."""


def tolerance_for(dtypes: Sequence[torch.dtype]) -> Tolerance:
    """The widest tolerance of the given types; float32's for all that are not half precision."""
    found = [HALVES[dtype] for dtype in dtypes if dtype in HALVES]
    return max(found, key=lambda tolerance: tolerance.relative, default=FLOAT32)


def total_norm(bench: Bench, result: Result) -> float:
    """Norm of the whole gradient; called by every rank."""
    squares = [float(g.double().square().sum()) for g in result.gradients.values()]
    return math.sqrt(float(bench.summed(torch.tensor(sum(squares), dtype=torch.float64))))


def difference(bench: Bench, result: Result, reference: Result, tolerance: Tolerance) -> str:
    """What differs, as the rest of a sentence; empty if nothing does. Called by every rank, equal on all.

    Args:
        bench: the world.
        result: what is judged; valid.
        reference: what it should be; valid.
        tolerance: see :class:`Tolerance`.
    """
    if abs(result.count - reference.count) > 1e-6 * reference.count:
        return (
            f"changes the number of items that training_step answers for ({result.count:g} instead of "
            f"{reference.count:g})"
        )
    norms_P2 = torch.zeros(len(bench.parameter_names), 2, dtype=torch.float64)
    for index, b in reference.gradients.items():
        a = result.gradients[index]
        norms_P2[index, 0] = (a.double() - b.double()).square().sum()
        norms_P2[index, 1] = b.double().square().sum()
    norms_P2 = bench.summed(norms_P2).cpu().sqrt()
    apart_P, size_P = norms_P2[:, 0], norms_P2[:, 1]
    allowed_P = tolerance.relative * size_P + tolerance.absolute * size_P.square().sum().sqrt()
    # Written so that NaN counts as different.
    wrong_P = ~(apart_P <= allowed_P)
    if not bool(wrong_P.any()):
        return ""
    excess_P = torch.where(wrong_P, (apart_P / allowed_P).nan_to_num(nan=math.inf), torch.zeros_like(apart_P))
    worst = int(excess_P.argmax())
    ratio = float(apart_P[worst] / size_P[worst])
    return (
        f"changes the gradient of {int(wrong_P.sum())} of {len(wrong_P)} parameters (most in "
        f"{bench.parameter_names[worst]!r}, by {ratio:.1e} of its norm)"
    )
