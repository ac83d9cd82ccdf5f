"""The virtual cluster: plausible against public absolute numbers, consistent, and exact where it is interpolated."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import virtual as benchmark
from lightning_dcp.cost import CostModel
from lightning_dcp.lengths import training_flops
from lightning_dcp.planners import Limits, PlanRequest, create
from lightning_dcp.profile import Profile
from lightning_dcp.topology import World
from lightning_dcp.virtual import MEMORY_BYTES, PROFILES, RANKS_PER_NODE, hardware, profile, shapes, sp_sizes
from lightning_dcp.virtual.layers import Load, backward_seconds, forward_seconds
from lightning_dcp.virtual.models import MODELS, Model

ONE_D, TWO_D = PROFILES
PEAK = 989.5e12
LENGTHS = (512, 2048, 8192, 32_768, 131_072, 262_144)


@cache
def cost_model(name: str, world_size: int = 32) -> CostModel:
    return CostModel(profile(name, world_size))


def per_second(name: str, tokens: int, sp_size: int, policy: Any = "auto", memory: int = MEMORY_BYTES) -> float:
    """Most tokens per second and GPU of samples of one length at one ``p``, over all batch sizes; 0 if none fits."""
    cost = cost_model(name)
    batches = np.asarray(cost.batch_sizes(4096))
    found = cost.settings(sp_size, batches, np.asarray(tokens), memory, policy)
    rates = np.where(found.bytes <= memory, batches * tokens / (sp_size * found.nanoseconds.astype(float)), 0.0)
    return float(1e9 * rates.max())


def longest(name: str, sp_size: int, policy: Any) -> int:
    """Longest sample that fits alone."""
    cost, low, high = cost_model(name), 1, 2**24
    while high - low > 1:
        middle = (low + high) // 2
        fits = cost.settings(sp_size, np.asarray([1]), np.asarray([middle]), MEMORY_BYTES, policy).bytes[0]
        low, high = (middle, high) if fits <= MEMORY_BYTES else (low, middle)
    return low


def test_table_1() -> None:
    one, two = MODELS[ONE_D], MODELS[TWO_D]
    assert (one.num_layers, one.hidden, one.heads) == ((42,), 3072, 48)
    assert (two.num_layers, two.hidden, two.heads) == ((28, 28), 1152, 16)
    assert one.parameters / 1e9 == pytest.approx(5, abs=0.1)
    assert two.parameters / 1e9 == pytest.approx(1.2, abs=0.02)


@pytest.mark.parametrize("name", PROFILES)
def test_parameters_are_those_of_the_presets(name: str) -> None:
    """Counted on torch's meta device: the same weights, tensor by tensor."""
    torch = pytest.importorskip("torch")
    from lightning_dcp.models.presets import build

    with torch.device("meta"):
        model = build(name.removeprefix("h200-"))
    outside = 2 * MODELS[name].hidden
    biases = 0 if name == ONE_D else MODELS[name].hidden + MODELS[name].outputs
    assert sum(p.numel() for p in model.parameters()) == MODELS[name].parameters + biases
    assert sum(p.numel() for p in model.norm.parameters()) == outside
    layers = [m for m in model.modules() if type(m).__name__ == "TransformerLayer"]
    assert sum(p.numel() for p in layers[0].parameters()) == MODELS[name].families[0].parameters
    assert len(layers) == sum(MODELS[name].num_layers)


def test_flops_of_the_distributions_are_those_of_the_model() -> None:
    model, tokens = MODELS[ONE_D], 4096
    layer = model.families[0]
    matrices = 42 * layer.matrix_parameters + model.outputs * model.hidden
    attention = 42 * 4 * model.hidden * tokens / 2
    assert training_flops(np.asarray([tokens]))[0] == pytest.approx(3 * tokens * (2 * matrices + attention))


def test_attention_rates_meet_the_published_figures() -> None:
    """FlashAttention-3 paper, figures 5 and 6, FlashAttention-2 with head dimension 64, TFLOP/s."""
    figures = {
        hardware.ATTENTION_FORWARD: (282, 306, 318, 321, 322, 324),
        hardware.ATTENTION_CAUSAL_FORWARD: (180, 229, 262, 284, 295, 299),
        hardware.ATTENTION_BACKWARD: (198, 238, 264, 279, 287, 291),
    }
    for rate, published in figures.items():
        for octave, value in enumerate(published):
            assert rate.at(512 << octave) / 1e12 == pytest.approx(value, rel=0.02)


def test_half_a_wave_meets_the_published_products() -> None:
    """Azure ND H200 v5: 2048^3 and 4096^3 at 0.78 to 0.87 and 0.96 of the rate of 8192^3, 1024^3 at 0.22 to 0.32."""
    rates = {n: 2 * n**3 / hardware.product_seconds(2 * n**3, n) for n in (1024, 2048, 4096, 8192)}
    assert 0.2 < rates[1024] / rates[8192] < 0.4
    assert 0.6 < rates[2048] / rates[8192] < 0.9
    assert 0.85 < rates[4096] / rates[8192] < 0.98


def test_utilization_is_that_of_published_runs() -> None:
    """MFU of bf16 training on H100 (llm-foundry's benchmarks): 44 % at 3 B, 46 % at 7 B and 2k tokens, 40 % at 8k.

    Operations without recompute; attention counted as computed, half of the square (that table: in full).
    """
    for tokens, sp_size in ((2048, 1), (8192, 1)):
        rate = per_second(ONE_D, tokens, sp_size)
        used = rate * training_flops(np.asarray([tokens]))[0] / tokens / PEAK
        assert 0.40 < used < 0.52
    # Transformer-2D is narrower, and its kernels move more: below 1D, as 1 B is below 7 B there (42 and 46 %).
    used = per_second(TWO_D, 8192, 1) * 6 * MODELS[TWO_D].parameters / PEAK
    assert 0.33 < used < 0.48


@pytest.mark.parametrize("tokens", [1024, 4096, 16_384, 65_536, 196_608])
def test_recompute_costs_what_the_paper_says(tokens: int) -> None:
    """Figure 10: 20 to 25 % speed-up for most lengths below 200k, the overhead of checkpointing.

    With memory without end, so that nothing but recompute differs; attention alone would be at 1 / 3.5.
    """
    cost = cost_model(ONE_D)
    none, full = (cost.nanoseconds(1, (tokens,), 16 if tokens > 2**15 else 1, (r,)) for r in (0, 42))
    assert 1.17 < full / none < 1.28


@pytest.mark.parametrize("name", PROFILES)
def test_times_and_bytes_rise_with_length_and_batch(name: str) -> None:
    """In the numbers themselves: the cost model had nothing to raise."""
    fields = ("forward", "backward", "recompute", "activation_bytes", "input_bytes")
    rows: dict[tuple[int, int], Any] = {}
    for m in profile(name, 32).measurements:
        row = np.asarray([*(v for f in fields for v in getattr(m, f)), m.constant_time, m.constant_bytes])
        assert (row > 0).all()
        rows[m.sp_size, m.batch_size, int(np.prod(m.shape))] = row  # type: ignore[index]
    by_length = sorted(rows.items())
    for (before, a), (after, b) in pairwise(by_length):
        if before[:2] == after[:2]:
            assert (b >= a).all()
    assert all((rows[p, 1024, s] > rows[p, 1, s]).all() for p, b, s in rows if b == 1)  # type: ignore[index,misc]


@pytest.mark.parametrize("name", PROFILES)
def test_recompute_is_part_of_the_forward(name: str) -> None:
    for m in profile(name, 8).measurements:
        assert all(0 < r < f for r, f in zip(m.recompute, m.forward, strict=True))
        assert all(1.5 * f < b < 4 * f for f, b in zip(m.forward, m.backward, strict=True))
        assert all(i < a for i, a in zip(m.input_bytes, m.activation_bytes, strict=True))


@pytest.mark.parametrize("tokens", [512, 2048, 8192, 65_536])
@pytest.mark.parametrize("name", PROFILES)
def test_more_ranks_never_pay_without_memory_pressure(name: str, tokens: int) -> None:
    """Figure 5: sequence parallelism only costs where a sample fits without, more the shorter and beyond a node."""
    rates = [per_second(name, tokens, p, "full", 10**13) for p in cost_model(name).sp_sizes]
    assert rates == sorted(rates, reverse=True)
    assert rates[3] > 0.8 * rates[0]
    assert tokens > 8192 or rates[4] < 0.9 * rates[3]


@pytest.mark.parametrize("name", PROFILES)
def test_more_ranks_are_faster_for_one_long_sample_and_hold_more(name: str) -> None:
    cost, full = cost_model(name), MODELS[name].num_layers
    for tokens in (131_072, 262_144):
        times = [cost.nanoseconds(1, (tokens,), p, full) for p in cost.sp_sizes]
        assert times == sorted(times, reverse=True)
    for policy in ("none", "full"):
        room = [longest(name, p, policy) for p in cost.sp_sizes]
        assert room == pytest.approx([room[0] * p for p in cost.sp_sizes], rel=0.01)


def test_what_fits() -> None:
    """Long samples need sequence parallelism in the 1-D model, as the paper's do, and 200k tokens fit a node."""
    assert 30_000 < longest(ONE_D, 1, "full") < 65_536
    assert longest(ONE_D, 8, "full") > 200_000
    assert longest(ONE_D, 1, "none") > 4096
    assert longest(TWO_D, 1, "none") < 65_536


@pytest.mark.parametrize("name", PROFILES)
def test_the_grid_interpolates_the_formulas(name: str) -> None:
    """Between the lengths written down at most 1 % off, in any batch, at every ``p``."""
    cost, model = cost_model(name), MODELS[name]
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = int(2 ** rng.uniform(6, 20))
        batch = int(2 ** rng.uniform(0, max(24 - np.log2(tokens), 0)))
        shape = tuple(shapes(name, np.asarray([tokens]))[0].tolist())
        for p in cost.sp_sizes:
            wanted = 1e9 * exact(model, batch, shape, p)
            assert cost.nanoseconds(batch, shape, p, ()) == pytest.approx(wanted, rel=0.01)


def exact(model: Model, batch: int, shape: tuple[int, ...], p: int) -> float:
    tokens = batch * int(np.prod(shape)) / p
    total = model.outer_seconds(tokens)
    for layer, count, length in zip(model.families, model.num_layers, model.lengths(shape), strict=True):
        load = Load(tokens=tokens, length=length, sp_size=p)
        total += count * (forward_seconds(layer, load) + backward_seconds(layer, load))
    return total


def test_attention_alone_is_interpolated_to_one_percent() -> None:
    """Between two lengths the line lies above the square of the length by at most 1 % of it."""
    nodes = sorted({m.shape[0] for m in profile(ONE_D, 1).measurements if m.shape[0] > 36})
    for low, high in pairwise(nodes):
        middle = (low + high) / 2
        assert (low**2 + high**2) / 2 / middle**2 < 1.01


def test_shapes() -> None:
    lengths = np.asarray([1, 200, 255, 256, 300, 384, 400, 65_536, 100_000])
    assert shapes(ONE_D, lengths).tolist() == lengths[:, None].tolist()
    found = shapes(TWO_D, lengths)
    assert found.tolist() == [
        [1, 1],
        [1, 200],
        [1, 255],
        [1, 256],
        [1, 256],
        [2, 256],
        [2, 256],
        [256, 256],
        [391, 256],
    ]
    many = np.arange(1, 5000)
    assert (abs(shapes(TWO_D, many).prod(axis=1) - many) <= 128).all()
    given = np.asarray([[3, 100], [7, 900]])
    assert shapes(TWO_D, given).tolist() == given.tolist()
    assert shapes(TWO_D, many[:, None]).tolist() == shapes(TWO_D, many).tolist()


@pytest.mark.parametrize(
    ("name", "lengths", "message"),
    [
        ("h100", [1], "allowed are h200-transformer-1d, h200-transformer-2d"),
        (ONE_D, [[1, 2]], r"tokens \[n\] or sizes on 1 axes"),
        (TWO_D, [[1, 2, 3]], r"sizes on 2 axes"),
        (TWO_D, [], "allowed are integers from 1"),
        (TWO_D, [0], "allowed are integers from 1"),
        (TWO_D, [1.5], "allowed are integers from 1"),
    ],
)
def test_wrong_shapes(name: str, lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(name, np.asarray(lengths))


def test_sizes_divide_each_other_and_the_heads() -> None:
    assert sp_sizes(ONE_D, 1) == (1,)
    assert sp_sizes(ONE_D, 8) == (1, 2, 4, 8)
    assert sp_sizes(ONE_D, 32) == (1, 2, 4, 8, 16)
    assert sp_sizes(ONE_D, 1024) == (1, 2, 4, 8, 16, 48)
    assert sp_sizes(TWO_D, 1024) == (1, 2, 4, 8, 16)
    for world_size in (1, 6, 12, 24, 100):
        assert profile(ONE_D, world_size).identity["world_size"] == str(world_size)
        assert {m.sp_size for m in profile(ONE_D, world_size).measurements} == set(sp_sizes(ONE_D, world_size))


@pytest.mark.parametrize("world_size", [0, -8, 2.5, True])
def test_no_world(world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size is"):
        profile(ONE_D, world_size)


@pytest.mark.parametrize("name", PROFILES)
def test_the_end_of_a_step_depends_on_the_world(name: str) -> None:
    """Gradients and weights cross the slowest link once each, so beyond a node only starting adds up."""
    times = [profile(name, world_size).sync_time for world_size in (2, 8, 32, 1024)]
    moved = 2 * 2 * MODELS[name].parameters / hardware.NVLINK_RATE * 1e9
    assert all(moved / 2 < t for t in times)
    assert moved < times[2] < 1.5 * moved
    assert times[2] < times[3] < 4 * moved
    # One GPU exchanges nothing but updates everything alone.
    assert profile(name, 1).sync_time < times[1]


def test_static_bytes_fall_with_the_world() -> None:
    held = [profile(ONE_D, world_size).static_bytes for world_size in (1, 2, 8, 1024)]
    assert held == sorted(held, reverse=True)
    # 5 B weights with all states do not fit one GPU of 80 GB, which is what ZeRO is for; two hold them.
    assert held[0] > MEMORY_BYTES > held[1]
    assert held[3] == pytest.approx(8 * MODELS[ONE_D].parameters, rel=0.01)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_one_like_any_other(name: str) -> None:
    made = profile(name, 16)
    assert Profile.from_json(made.to_json()) == made
    assert profile(name, 16) == made
    assert dataclasses.replace(made, sync_time=0) != made


@pytest.mark.parametrize("name", PROFILES)
def test_planners_take_it(name: str) -> None:
    lengths = np.asarray([600, 900, 1500, 3000, 9000, 40_000] * 4)
    request = PlanRequest(
        sample_ids=np.arange(len(lengths)),
        shapes=shapes(name, lengths),
        cost=cost_model(name, 16),
        world=World.build(16, sp_sizes(name, 16), RANKS_PER_NODE),
        limits=Limits(memory_bytes=MEMORY_BYTES),
    )
    plan = create("balanced").plan(request)
    assert sorted(i for m in plan.micro_batches for i in m.sample_ids) == list(range(len(lengths)))
    assert max(m.bytes for m in plan.micro_batches) <= MEMORY_BYTES
    assert plan.gap < 0.5


def test_the_documented_numbers_are_those_of_the_benchmark() -> None:
    """The tables of the documentation, computed again; they hold no time of this machine."""
    text = (Path(__file__).parent.parent / "docs" / "virtual.md").read_text()
    for name in PROFILES:
        assert benchmark.tables(name, benchmark.measure(name)).strip() in text
