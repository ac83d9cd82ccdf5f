"""What ends a step is measured without touching the model, agreed between the ranks, and kept."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dcp.profile import Profile
from lightning_dcp.profiling import measure, obtain_profile
from lightning_dcp.profiling.clock import clock_for
from lightning_dcp.profiling.stepend import _StepEnd, measure_step_end
from lightning_dcp.topology import World
from tests.pool import Pool
from tests.profiling_tools import CPU, LIMITS, SHAPES, Model, lengths_of, load, runner_of, survey_of
from tests.test_profiling import Numbered, assert_same, state_of


def _model(half: bool = False) -> nn.Module:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    return module.to(torch.bfloat16) if half else module


def _step_end(module: nn.Module, world_size: int = 1) -> int:
    return measure_step_end(module, world_size, CPU, clock_for(CPU, world_size))


@pytest.mark.parametrize("half", [False, True])
def test_the_model_is_only_read(half: bool) -> None:
    module = _model(half=half)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    before = state_of(module)
    assert _step_end(module) > 0
    assert_same(before, state_of(module))


def test_nothing_to_train_takes_no_time() -> None:
    assert _step_end(_model().requires_grad_(False)) == 0
    assert _step_end(nn.Identity()) == 0


@pytest.mark.parametrize("half", [False, True])
def test_every_gradient_is_reduced_once_and_in_full(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a bucket, also where a parameter is larger than one."""
    monkeypatch.setattr("lightning_dcp.profiling.stepend.DEFAULT_BUCKET", 1000)
    module = _model(half=half)
    parameters = [p.detach() for p in module.parameters()]
    end = _StepEnd.build(parameters, 2, CPU)
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(_StepEnd, "_reduce", lambda self, filled: reduced.append(self.bucket[:filled].clone()))
    end._reduce_all()
    assert max(len(bucket) for bucket in reduced) <= 1000
    number = sum(p.numel() for p in parameters)
    assert sum(len(bucket) for bucket in reduced) == number
    if not half:
        assert torch.equal(torch.cat(reduced), torch.cat([p.reshape(-1) for p in parameters]))
    assert len(end.master) == -(-number // 2)
    assert end.bucket.dtype == end.master.dtype == torch.float32
    assert end.whole.dtype == parameters[0].dtype


def _agreed() -> tuple[int, int, tuple[int, bool]]:
    rank = dist.get_rank()
    module = _model()
    counted = measure_step_end(module, 2, CPU, Numbered(1 + 4 * rank))
    timed = _step_end(module, 2)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            patch.setattr(_StepEnd, "build", _out_of_memory)
        failed = _step_end(module, 2)
    return counted, timed, (failed, any("could not be measured" in str(w.message) for w in caught))


def _out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def _cannot(*_: Any) -> Any:
    raise MemoryError


def _broken(*_: Any) -> Any:
    raise ValueError("odd")


def _fails_on_rank_1(method: str, failure: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(_StepEnd, method, failure)
        try:
            return str(_step_end(_model(), 2))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def test_what_one_rank_meets_before_it_communicates_ends_all(pool: Pool) -> None:
    """The temporary buffers of an update count too, and so does every other error."""
    assert pool.run(_fails_on_rank_1, 2, "_update", _cannot) == ["0", "0"]
    first, second = pool.run(_fails_on_rank_1, 2, "build", _broken)
    assert first == "StepError: the end of a step could not be measured: another rank has raised an error"
    assert second == "ValueError: odd"


def test_ranks_agree_on_the_slowest_also_when_one_has_no_memory(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#19789: a rank that runs out of memory alone must not leave the others waiting."""
    first, second = pool.run(_agreed, 2)
    assert first[0] == second[0] == 5
    assert first[1] == second[1] > 0
    assert first[2] == (0, True)
    assert second[2] == (0, False), "one warning, of rank 0"


def test_profiles_have_it_and_files_keep_it(tmp_path: Path) -> None:
    profile = measure(survey_of(Model()), lengths_of(num_lengths=2), {})
    assert profile.sync_time > 0
    model, world, path = Model(), World.build(1, [1]), tmp_path / "profile.json"

    def obtain() -> Profile:
        return obtain_profile(
            path, runner=runner_of(model, world), world=world, rank=0, device=CPU, precision="32-true", shapes=SHAPES,
            load=load, limits=LIMITS, length_groups=2,
        )  # fmt: skip

    first = obtain()
    assert first.sync_time > 0
    assert obtain() == first
