"""Gradients in float64 before the engine, whose masters are float32: local sums of losses, added up by the test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dcp.execution import LossSettings, MicroBatchRunner
from lightning_dcp.plan import IterationPlan
from lightning_dcp.recompute import RecomputeSwitch, find_families
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.topology import World
from tests.fitting import Case, Data, Module, Samples, SingleProcess, collate_whole
from tests.pool import Pool
from tests.synthetic import random_plan

Gradients = dict[str, torch.Tensor]


def _plan(case: Case, sizes: Sequence[int]) -> IterationPlan:
    world = World.build(case.world_size, sizes)
    samples = Samples(case)
    ids = range(case.batch)
    shapes = [(int(samples.lengths[i]),) for i in ids]
    return random_plan(random.Random(case.seed), list(ids), shapes, world, (3,))


def _gradients(case: Case, sizes: Sequence[int]) -> Gradients:
    data = Data(case)
    data.setup()
    module = Module(case).double()
    module.train()
    plan = _plan(case, sizes)
    groups = ProcessGroups(World.build(case.world_size, sizes).blocks)
    groups.ensure()
    runner = MicroBatchRunner(
        module=module,
        groups=groups,
        recompute=RecomputeSwitch(find_families(module)),
        hooks=data,
        seed=0,
        loss=LossSettings(
            weighting=case.weighting,  # type: ignore[arg-type]
            reduction="sum" if case.returns == "sum" else "mean",
        ),
    )
    loader = data.train_dataloader()
    names = [name for name, _ in module.named_parameters()]
    total = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    count = torch.zeros((), dtype=torch.float64)
    for micro_batch in plan.of_rank(dist.get_rank()):
        with runner.step(micro_batch, loader.load(micro_batch)) as outcome:
            grads = torch.autograd.grad(outcome.objective, list(module.parameters()), allow_unused=True)
            count += torch.as_tensor(outcome.count, dtype=torch.float64)
        assert not outcome.context.failures
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                total[name] += grad
    dist.all_reduce(count)
    for value in total.values():
        dist.all_reduce(value)
        value /= count
    return total


def _reference(case: Case) -> Gradients:
    module = SingleProcess(case).double()
    samples = Samples(case)
    batch: dict[str, Any] = collate_whole([samples[i] for i in range(case.batch)])
    module.training_step(batch, 0).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


WAYS = [("mean", "token"), ("sum", "token"), ("dict", "token"), ("loss_sum", "token"), ("loss_sum", "sample")]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("returns", "weighting"), WAYS)
@pytest.mark.parametrize(("world_size", "sizes"), [(4, (1, 2, 4)), (3, (1, 2)), (6, (1, 2, 4))])
def test_gradients_equal_one_process_to_twelve_digits(
    pool: Pool, world_size: int, sizes: tuple[int, ...], returns: str, weighting: str, seed: int
) -> None:
    """huggingface/transformers#34242, verl-project/verl#2857, deepspeedai/DeepSpeed#5248, NVIDIA/Megatron-LM#1464."""
    case = Case(world_size=world_size, returns=returns, weighting=weighting, seed=seed)
    expected = _reference(case)
    total = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    for gradients in pool.run(_gradients, world_size, case, sizes):
        for name, reference in expected.items():
            error = float((gradients[name] - reference).norm())
            # The loss of a key's bias is zero but for rounding, hence the part of the whole norm.
            assert error <= 1e-12 * float(reference.norm()) + 1e-14 * total, f"{name}: {error:.2e}"
