"""The reduction by hand equals one process: uneven ranks, unused parameters, empty ranks, both precisions."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dcp.engine import EngineConfigError, ZeroEngine, build_config, check_config
from tests.pool import Pool

MICRO_BATCHES = {0: 3, 1: 1, 2: 0}


class TwoHeads(nn.Module):
    """A trunk and two heads; a micro-batch uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 1), nn.Linear(5, 1)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        value: torch.Tensor = self.heads[head](torch.tanh(self.trunk(x))).sum()
        return value


def _data(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(4, 6, generator=generator)


def _model() -> TwoHeads:
    torch.manual_seed(3)
    return TwoHeads()


def _engine(module: nn.Module, half: bool, clip: float = 0.0) -> ZeroEngine:
    config = build_config(None, num_parameters=sum(p.numel() for p in module.parameters()), half=half)
    config |= {"gradient_accumulation_steps": 1, "gradient_clipping": clip}
    if half:
        config["bf16"] = {"enabled": True}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return ZeroEngine(engine)


def _train(half: bool, steps: int, clip: float, scale: float) -> list[torch.Tensor]:
    """Ranks run 3, 1 and 0 micro-batches; rank 0 uses both heads in turn, rank 1 only the second."""
    deepspeed.init_distributed("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    engine = _engine(_model(), half, clip)
    for step in range(steps):
        engine.begin()
        count = MICRO_BATCHES[rank]
        for index in range(count):
            head = index % 2 if rank == 0 else 1
            x = _data(rank, 10 * step + index).to(torch.bfloat16 if half else torch.float32)
            engine.engine.backward(engine.engine(x, head).float() * world / scale)
        if count == 0:
            zero = torch.stack([p.sum() for p in engine.module.parameters()]).sum() * 0.0
            engine.engine.backward(zero)
        if scale != 1.0:
            engine.scale_gradients(scale)
        engine.reduce()
        engine.engine.step()
    return [p.detach().float().clone() for p in engine.module.parameters()]


def _reference(steps: int, clip: float, ranks: int) -> list[torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for index in range(MICRO_BATCHES[rank]):
                head = index % 2 if rank == 0 else 1
                model(_data(rank, 10 * step + index), head).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _assert_close(results: list[list[torch.Tensor]], reference: list[torch.Tensor], tolerance: float) -> None:
    for values in results:
        for value, same, expected in zip(values, results[0], reference, strict=True):
            assert torch.equal(value, same), "ranks differ"
            assert torch.allclose(value, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.feature(
    "Trainer",
    "parameters without a gradient on some ranks or in some steps",
    "where no rank uses one, momentum and weight decay go on",
)
@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_uneven_ranks_unused_heads_and_an_empty_rank(pool: Pool, clip: float, scale: float) -> None:
    """microsoft/DeepSpeed ZeRO-1 with missing gradients: deepspeedai/DeepSpeed#1355, huggingface/transformers#9168."""
    _assert_close(pool.run(_train, 3, False, 4, clip, scale), _reference(4, clip, 3), 1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_bf16_with_uneven_ranks(pool: Pool, clip: float) -> None:
    _assert_close(pool.run(_train, 3, True, 2, clip, 1.0), _reference(2, clip, 3), 0.05)


def _sum_of_gradients() -> list[float]:
    deepspeed.init_distributed("gloo")
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    engine = _engine(module, half=True)
    engine.begin()
    for gradient in (256.0, 1.0, 1.0, 1.0, 1.0):
        engine.engine.backward(engine.engine(torch.full((1, 1), gradient, dtype=torch.bfloat16)).sum())
    engine.reduce()
    engine.engine.step()
    return [float(p) for p in module.parameters()]


def test_bf16_accumulates_gradients_in_float32(pool: Pool) -> None:
    """In bf16 256 + 1 is 256 again, so the four ones would be lost; 260 and the update of 0.5 * 260 are exact."""
    assert pool.run(_sum_of_gradients, 2, timeout=60.0) == [[-130.0], [-130.0]]


def _head_unused_everywhere() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    deepspeed.init_distributed("gloo")
    engine = _engine(_model(), half=False)
    engine.begin()
    engine.engine.backward(engine.engine(_data(0, 0), 0) * 0.5)
    engine.reduce()
    engine.engine.step()
    before = [p.detach().clone() for p in _model().heads[1].parameters()]
    after = [p.detach().clone() for p in engine.module.heads[1].parameters()]  # type: ignore[index, union-attr]
    return before, after


def test_a_head_that_no_rank_uses_stays(pool: Pool) -> None:
    for before, after in pool.run(_head_unused_everywhere, 2):
        assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))


def _abandoned_step() -> list[torch.Tensor]:
    deepspeed.init_distributed("gloo")
    engine = _engine(_model(), half=False)
    for scale, keep in ((1e3, False), (0.5, True)):
        engine.begin()
        engine.engine.backward(engine.engine(_data(0, 0), 0) * scale)
        if not keep:
            engine.abandon()
            continue
        engine.reduce()
        engine.engine.step()
    return [p.detach().clone() for p in engine.module.parameters()]


def test_an_abandoned_step_leaves_nothing(pool: Pool) -> None:
    model = _model()
    model(_data(0, 0), 0).mul(0.5).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for values in pool.run(_abandoned_step, 2):
        assert all(torch.allclose(v, p, atol=1e-6) for v, p in zip(values, model.parameters(), strict=True))


@pytest.mark.feature("Trainer", "offloading to CPU or NVMe", "refused")
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"zero_optimization": {"stage": 2}}, "ZeRO stage 2 .* only stage 1"),
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3 .* only stage 1"),
        ({"zero_optimization": {"overlap_comm": True}}, "overlap_comm=True .* only False"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer .* not supported"),
        ({"gradient_accumulation_steps": 4}, "the planner chooses"),
    ],
)
def test_refused_settings(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngineConfigError, match=sentence):
        check_config(config)


def test_user_settings_lie_over_ours() -> None:
    user = {"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": True}
    config = build_config(user, num_parameters=100, half=False)
    assert config["zero_optimization"]["reduce_bucket_size"] == 7
    assert config["zero_optimization"]["stage"] == 1
    assert config["wall_clock_breakdown"] is True
    assert user == {"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": True}


@pytest.mark.parametrize(("parameters", "bucket"), [(10, 10), (10**12, 200_000_000), (0, 2)])
def test_the_bucket_is_no_larger_than_the_model(parameters: int, bucket: int) -> None:
    config = build_config(None, num_parameters=parameters, half=False)
    assert config["zero_optimization"]["reduce_bucket_size"] == bucket
