"""What each rank holds, and that it is brought together exactly and a bucket at a time."""

from __future__ import annotations

import inspect
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dcp.checkpoint.gathering import Route, gather_whole
from lightning_dcp.checkpoint.meeting import LonelyCallError, Meeting
from lightning_dcp.checkpoint.optimizer_state import whole_state
from lightning_dcp.checkpoint.shards import Fragment, Shards
from lightning_dcp.checkpoint.weights import whole_weights
from tests.checkpointing import CASE, RichAdam, Run, train
from tests.pool import Pool

BUCKET = 1024


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Views make nothing; bytes are the pickled list of what lies where.
        views = ("detach", "view", "slice", "alias")
        made = isinstance(result, Tensor) and not func._schema.name.endswith(views)
        if made and result.dtype != torch.uint8:
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result


class Gather(pl.Callback):
    """Brings everything together in buckets of a hundred elements or so, and asks DeepSpeed for the same."""

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        shards = Shards(strategy.deepspeed_engine.optimizer, module)
        names = [list(shard.parameters) for shard in shards.groups]
        assert all(len({f.name for f in shard.fragments}) > 0 for shard in shards.groups)
        route = Route(
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            device=strategy.root_device,
            bucket_bytes=BUCKET,
        )
        with Largest() as largest:
            weights = whole_weights(module, shards, route)
            state = whole_state(shards, names, route)
        if route.rank:
            assert state == {}
            assert largest.bytes <= BUCKET, "a rank that writes nothing holds more than a bucket"
        zero = strategy.deepspeed_engine.optimizer
        for shard in shards.groups:
            # DeepSpeed's own link to the state is missing where an optimizer has several groups.
            lazy_init_hp_params_optimizer_state(shard.parameters.values(), shard.flat, zero.state)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            master = safe_get_full_fp32_param(parameter)
            moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
            if route.rank == 0:
                assert torch.equal(weights[name], master)
                assert weights[name].dtype == torch.float32
                saved = state["state"][name]
                for key, expected in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                    assert torch.equal(saved[key], expected)


@pytest.mark.parametrize(("ranks", "precision"), [(1, "32-true"), (2, "bf16-mixed"), (4, "32-true")])
def test_gathered_in_buckets_it_is_what_deepspeed_has(pool: Pool, ranks: int, precision: str) -> None:
    case = replace(CASE, world_size=ranks, precision=precision)
    pool.run(train, ranks, Run(case=case, module=RichAdam, steps=2, callbacks=(Gather(),)), timeout=120.0)


class Blockwise(torch.optim.SGD):
    """Keeps a state that belongs to neither an element nor a group, as quantised optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["scales"] = torch.ones(3)
        return super().step(closure)


class RichBlockwise(RichAdam):
    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Blockwise(groups, lr=0.1)


def _save_blockwise(path: str) -> list[str]:
    messages = []
    try:
        train(Run(module=RichBlockwise, steps=1, save=path))
    except Exception as error:
        messages.append(str(error))
    return messages


@pytest.mark.feature("Checkpoints", "state of quantised optimizers", "refused: save the weights alone")
def test_a_state_that_cannot_be_divided_is_refused(pool: Pool, tmp_path: Any) -> None:
    for messages in pool.run(_save_blockwise, 2, str(tmp_path / "x.ckpt"), timeout=60.0):
        assert "The state of Blockwise cannot be saved by parameter: ['scales']" in messages[0]


def _meet(late: int | None) -> str:
    """Meet, and once more in a later fit of the same process group, where a rank may stay away."""
    limit = timedelta(seconds=20 if late is None else 1)
    rank, world = dist.get_rank(), dist.get_world_size()
    first, second = Meeting(rank, world, limit), Meeting(rank, world, limit)
    for _ in range(3 if late is None else 1):
        first.wait("this")
    if late == rank:
        return "late"
    try:
        second.wait("that")
    except LonelyCallError as error:
        return str(error)
    dist.barrier()
    store = _get_default_store()
    keys = [first._key(number, who) for number in range(2) for who in (0, 1, 2, "all")]
    return f"{[store.check([key]) for key in keys].count(True)} keys are left"


def test_ranks_meet_again_and_again_and_name_who_is_missing(pool: Pool) -> None:
    assert pool.run(_meet, 3, None, timeout=60.0) == ["0 keys are left"] * 3
    answers = pool.run(_meet, 3, 1, timeout=60.0)
    assert answers[1] == "late"
    for rank in (0, 2):
        assert answers[rank].startswith("that waited 1 s for ranks [1], only ranks [0, 2] called it")


def _without_memory() -> list[str]:
    """Rank 0 has no memory for a tensor so large; then the ranks are said to hold too little."""
    rank, name = dist.get_rank(), "weight"
    route, said = Route(rank=rank, world_size=2, device=torch.device("cpu")), []
    flat = torch.zeros(4)
    for shape, length in ((torch.Size([2**60]), 2**59), (torch.Size([8]), 3)):
        held = [(Fragment(name, 0, 0, length),), (Fragment(name, length, 0, length),)]
        try:
            gather_whole(flat, {name: shape}, held, route)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return said


def test_a_rank_0_without_memory_leaves_nobody_waiting(pool: Pool) -> None:
    first, second = pool.run(_without_memory, 2, timeout=30.0)
    assert first[0].startswith("RuntimeError")
    assert second[0].startswith("StepError: rank 0: making room for a checkpoint failed with RuntimeError")
    assert "the ranks hold 6 of the 8 elements of weight" in first[1]
    assert "the ranks hold 6 of the 8 elements of weight" in second[1]


def _lone_calls() -> str:
    """In one fit rank 1 is alone, in the next rank 0 is; then all meet in a third one."""
    rank, limit = dist.get_rank(), timedelta(seconds=1)
    said = ""
    for alone in (1, 0):
        meeting = Meeting(rank, 2, limit)
        if rank == alone:
            with pytest.raises(LonelyCallError) as caught:
                meeting.wait("this")
            said = str(caught.value)
        dist.barrier()
    Meeting(rank, 2, timedelta(seconds=20)).wait("that")
    return said


def test_a_lone_call_of_an_earlier_fit_counts_for_no_later_one(pool: Pool) -> None:
    first, second = pool.run(_lone_calls, 2, timeout=60.0)
    assert first.startswith("this waited 1 s for ranks [1], only ranks [0] called it")
    assert second.startswith("this waited 1 s for ranks [0], only ranks [1] called it")


def test_names_of_deepspeed_and_lightning() -> None:
    zero, half = inspect.getsource(DeepSpeedZeroOptimizer), inspect.getsource(BF16_Optimizer)
    assert "self.bit16_groups" in zero
    assert "self.single_partition_of_fp32_groups" in zero
    assert "fp32_groups_flat_partition" not in zero
    assert "self.bf16_groups" in half
    assert "self.fp32_groups_flat_partition" in half
    assert {"start", "numel"} <= inspect.signature(fragment_address).parameters.keys()
    assert {"lp_fragment_address", "hp_fragment_address"} <= inspect.signature(tensor_fragment).parameters.keys()
    assert callable(DeepSpeedStrategy._init_optimizers)
    assert isinstance(DDPStrategy.checkpoint_io, property)
    assert "_average_model = deepcopy(pl_module)" in inspect.getsource(StochasticWeightAveraging.setup)
    assert "trainer.optimizers[0]" in inspect.getsource(StochasticWeightAveraging.on_train_epoch_start)
