"""What each sample would add to a packed row, for every size of group and depth of recompute.

For fixed ``(p, r)`` the time and the memory of a packed row are a fixed part and a sum over its samples (see
:meth:`~lightning_dcp.cost.CostModel.packed_parts`), so rows of any content can be priced by sums of this menu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lightning_dcp.cost import INFEASIBLE, IntArray
from lightning_dcp.interpolation import MAX_VALUE
from lightning_dcp.planners.assembly import common_sp_sizes, shortest
from lightning_dcp.planners.protocol import InfeasibleError, Limits, PlanRequest
from lightning_dcp.terms import Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """All samples on groups of one size; samples stand longest first.

    Attributes:
        sp_size: ``p``.
        parts: :meth:`CostModel.packed_parts <lightning_dcp.cost.CostModel.packed_parts>`, ``[n, quantities]``.
        terms: the same as quantities of Eq. 4 to 6, per sample.
        base: the quantities of a row without samples.
        base_input: bytes of a recomputed layer of such a row, also where they pass those of a plain one.
        alone: nanoseconds of a row of this sample only, :data:`INFEASIBLE` where no ``r`` fits, ``[n]``.
        alone_counts: recomputed layers of such a row, ``[n, families]``.
        tokens: most tokens of a row.
        room: bytes for everything that a micro-batch changes.
        binds: whether a row within all other limits may pass the memory limit without recompute.
    """

    sp_size: int
    parts: IntArray
    terms: Terms
    base: Terms
    base_input: IntArray
    alone: IntArray
    alone_counts: IntArray
    tokens: int
    room: int
    binds: bool

    def times(self, counts: IntArray) -> tuple[int, IntArray]:
        """Nanoseconds of the fixed part and of each sample with these recompute counts ``[families]``."""
        return int(self.base.time(counts)), self.terms.time(counts)

    def may_pass(self, counts: IntArray, lengths: IntArray) -> bool:
        """Whether a row of as many tokens as allowed may pass the room, with these recompute counts."""
        fixed, each = self.most_bytes(counts)
        return fixed + int((-(-each // lengths)).max(initial=0)) * min(int(lengths.sum()), self.tokens) > self.room

    def least_bytes(self, counts: IntArray, full: IntArray) -> tuple[int, IntArray]:
        """Bytes of the fixed part and of each sample with these counts, whose sum no row stays below.

        Args:
            counts: recomputed layers ``[families]``.
            full: indices of families known to be recomputed whole; one of them adds its whole activation.
        """
        last = full[np.argmax(self.base.activation[full])] if len(full) else None
        fixed, each = (
            _held(terms, counts, terms.layer_input) + (0 if last is None else terms.activation[..., last])
            for terms in (self.base, self.terms)
        )
        return int(fixed), np.asarray(each)

    def most_bytes(self, counts: IntArray) -> tuple[int, IntArray]:
        """Bytes of the fixed part and of each sample with these counts, whose sum no row passes."""
        families = len(counts)
        whole = counts == self.terms.layers
        fixed, each = (
            _held(terms, counts, inputs) + (terms.activation * whole).max(axis=-1, initial=0)
            for terms, inputs in (
                (self.base, self.base_input),
                (self.terms, self.parts[:, 3 * families : 4 * families]),
            )
        )
        return int(fixed), np.asarray(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """The samples of a request, longest first, on every size of group that they may use.

    Attributes:
        request: what was asked.
        order: positions in the request, longest sample first, equal ones by id, ``[n]``.
        lengths: tokens, falling, ``[n]``.
        widths: by ascending ``p``.
    """

    request: PlanRequest
    order: IntArray
    lengths: IntArray
    widths: tuple[Width, ...]

    @classmethod
    def build(cls, request: PlanRequest) -> Menu:
        """Ask the cost model once for everything.

        Raises:
            ValueError: more than one axis, exact shapes, or no size of group in common.
            InfeasibleError: a sample fits no group even alone.
        """
        sizes = packed_sp_sizes(request)
        lengths = request.shapes[:, 0]
        order = np.lexsort((request.sample_ids, -lengths))
        ordered = lengths[order]
        widths = tuple(_width(request, p, ordered) for p in sizes)
        menu = cls(request=request, order=order, lengths=ordered, widths=widths)
        if len(order):
            _check_feasible(menu)
        return menu

    @property
    def shortest_times(self) -> IntArray:
        """Nanoseconds of each sample alone on the group that is fastest for it, ``[n]``."""
        return np.asarray(np.min([width.alone for width in self.widths], axis=0))

    @property
    def saturates(self) -> bool:
        """Whether sums reach the value above which the cost model's predictions stay constant."""
        # Without the last ten binary digits no sum wraps around.
        return any(bool(((width.parts >> 10).sum(axis=0) >= MAX_VALUE >> 11).any()) for width in self.widths)


def packed_sp_sizes(request: PlanRequest) -> tuple[int, ...]:
    """Sizes of groups for packed rows, ascending.

    Raises:
        ValueError: the request cannot be packed, or world and profile have no size in common.
    """
    limits, axes = request.limits, request.shapes.shape[1]
    if axes != 1:
        raise ValueError(
            f"packing=True and samples of {axes} axes; only samples of one axis can be packed, use packing=False"
        )
    if limits.exact_shapes:
        raise ValueError(
            "packing=True and exact_shapes=True: packed rows are filled up to a multiple of the group, which this "
            "model does not bear; use packing=False"
        )
    return common_sp_sizes(request.world, request.cost)


def row_tokens(limits: Limits, sp_size: int) -> int:
    """Most tokens of a row on ``sp_size`` ranks; 0 where not even the shortest row is allowed."""
    if limits.max_tokens is None:
        return MAX_VALUE
    return sp_size * limits.max_tokens if sp_size * limits.max_tokens >= shortest(sp_size) else 0


def _width(request: PlanRequest, sp_size: int, lengths: IntArray) -> Width:
    cost, limits = request.cost, request.limits
    parts = cost.packed_parts(sp_size, lengths)
    alone = cost.packed(sp_size, parts, limits.memory_bytes, limits.recompute)
    tokens, families = row_tokens(limits, sp_size), len(cost.num_layers)
    nothing = np.zeros(parts.shape[1], dtype=np.int64)
    # Beside so large an activation the bytes of a layer's input are told as they are.
    large = np.where(np.arange(len(nothing)) // max(families, 1) == 2, MAX_VALUE // 2, 0)
    width = Width(
        sp_size=sp_size,
        parts=parts,
        terms=Terms.from_stack(parts.T, np.asarray(cost.num_layers, dtype=np.int64)),
        base=cost.packed_terms(sp_size, nothing),
        base_input=cost.packed_terms(sp_size, large).layer_input,
        alone=np.where(lengths <= tokens, alone.nanoseconds, INFEASIBLE),
        alone_counts=alone.recompute,
        tokens=tokens,
        room=limits.memory_bytes - cost.profile.static_bytes,
        binds=False,
    )
    layers = width.terms.layers
    return replace(width, binds=width.may_pass(layers if limits.recompute == "full" else 0 * layers, lengths))


def _held(terms: Terms, counts: IntArray, layer_input: IntArray) -> IntArray:
    held = ((terms.layers - counts) * terms.activation + counts * layer_input).sum(axis=-1)
    return np.asarray(held + terms.constant_bytes)


def _check_feasible(menu: Menu) -> None:
    """Refuse a step with a sample that fits no group even alone; of several the first of the request.

    Raises:
        InfeasibleError: names the sample, its length, what it needs and the limit.
    """
    bad = menu.order[menu.shortest_times >= INFEASIBLE]
    if not len(bad):
        return
    request, position = menu.request, int(bad.min())
    limits, length = request.limits, int(request.shapes[position, 0])
    name = f"sample {request.sample_ids[position]} of {length} tokens"
    allowed = [w for w in menu.widths if length <= w.tokens]
    sizes = tuple(w.sp_size for w in menu.widths)
    if not allowed:
        p = sizes[-1]
        raise InfeasibleError(
            f"{name} has {max(-(-length // p), shortest(p) // p)} tokens per rank at sp_size {p}; max_tokens is "
            f"{limits.max_tokens}. Raise max_tokens, allow more ranks per sequence, or leave such samples out"
        )
    index = int(np.flatnonzero(menu.order == position)[0])
    least, p = min((_least_bytes(request, w, index), w.sp_size) for w in allowed)
    raise InfeasibleError(
        f"{name} needs at least {least} bytes per rank (sp_size {p}, recompute {limits.recompute!r}); the limit is "
        f"{limits.memory_bytes} bytes. Allow more ranks per sequence (sp_sizes up to now: {sizes}), "
        "recompute='auto', a higher memory_limit, or leave such samples out"
    )


def _least_bytes(request: PlanRequest, width: Width, index: int) -> int:
    # A limit of 0 bytes makes the search go on to the counts that need least memory.
    limit = 0 if request.limits.recompute == "auto" else request.limits.memory_bytes
    return int(request.cost.packed(width.sp_size, width.parts[index], limit, request.limits.recompute).bytes)
