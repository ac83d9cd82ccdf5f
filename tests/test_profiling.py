"""Measuring a model: what comes out, what stays untouched, and what the ranks agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dcp.cost import CostModel
from lightning_dcp.data.batch import Batch
from lightning_dcp.lengths import representatives
from lightning_dcp.plan import MicroBatch
from lightning_dcp.planners.assembly import pad
from lightning_dcp.planners.protocol import Limits
from lightning_dcp.profile import Profile, ProfileError
from lightning_dcp.profiling import measure, obtain_profile, plan_probes
from lightning_dcp.profiling.errors import is_out_of_memory
from lightning_dcp.profiling.store import profile_identity
from lightning_dcp.sequence_parallel import current
from lightning_dcp.topology import World
from tests.pool import Pool, RemoteError
from tests.profiling_tools import CPU, LIMITS, SHAPES, Model, lengths_of, load, runner_of, survey_of
from tests.synthetic import analytic_profile


class Numbered:
    """A clock whose time is counted in marks: ``step`` nanoseconds each."""

    def __init__(self, step: int) -> None:
        self.step, self.now = step, 0

    def mark(self) -> int:
        self.now += self.step
        return self.now

    def nanoseconds(self, start: int, end: int) -> int:
        return end - start


def test_profile_of_a_model() -> None:
    profile = measure(survey_of(Model(), static_bytes=77), lengths_of(), {"model": "x"})
    assert profile.num_layers == (3,)
    assert profile.static_bytes == 77
    assert profile.max_tokens == 48
    assert Profile.from_json(profile.to_json()) == profile
    assert {(m.batch_size, m.shape) for m in profile.measurements} >= {(1, (6,)), (4, (6,)), (1, (48,))}
    for m in profile.measurements:
        assert min(*m.forward, *m.backward, *m.recompute, m.constant_time) > 0
        assert m.input_bytes[0] < m.activation_bytes[0]
    cost = CostModel(profile)
    times = [cost.nanoseconds(1, (s,), 1, (0,)) for s in range(4, 60)]
    assert times == sorted(times)
    assert cost.nanoseconds(1, (48,), 1, (3,)) > cost.nanoseconds(1, (48,), 1, (0,))
    assert cost.bytes(1, (48,), 1, (3,)) < cost.bytes(1, (48,), 1, (0,))


def test_model_with_two_families_and_model_without_any() -> None:
    class Video(Model):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            out: Tensor = self.model(batch["x"]).square().mean()
            return out

    def video(micro_batch: MicroBatch) -> Batch:
        size = (micro_batch.batch_size, *micro_batch.padded_shape, 5)
        return {"x": torch.ones(size), "labels": torch.zeros(size, dtype=torch.long)}

    shapes = np.asarray([[2, 3], [4, 3], [6, 5]])
    lengths = plan_probes(shapes, (1,), LIMITS)
    profile = measure(survey_of(Video("tiny-2d", num_layers=3), load=video), lengths, {})
    assert profile.num_layers == (3, 3)
    assert all(len(m.forward) == 2 and min(m.forward) > 0 for m in profile.measurements)

    class Single(Video):
        def __init__(self) -> None:
            super().__init__("tiny-2d")
            self.model = nn.Linear(5, 5)  # type: ignore[assignment]

    profile = measure(survey_of(Single(), load=video), lengths, {})
    assert profile.num_layers == ()
    assert all(m.forward == () and m.constant_time > 0 and m.constant_bytes > 0 for m in profile.measurements)


def test_frozen_layers_have_a_cheap_backward() -> None:
    model = Model()
    model.model.embedding.requires_grad_(False)
    model.model.layers.requires_grad_(False)
    profile = measure(survey_of(model), lengths_of(num_lengths=2), {})
    # Nothing before the head needs a gradient, so the layers keep only their output and have no backward.
    assert all(m.activation_bytes[0] <= 24 * 4 * 48 * m.batch_size for m in profile.measurements)


class Stateful(Model):
    """Counts, listens and has a child in eval."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.second_layer().eval()
        self.steps = 0
        self.seen: list[Tensor] = []
        self.norm = nn.BatchNorm1d(3)
        self.model.norm.register_forward_hook(lambda *_: None)
        self.model.head.weight.grad = torch.ones_like(self.model.head.weight)

    def second_layer(self) -> nn.Module:
        return self.model.get_submodule("layers.1")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen.append(torch.rand(1))
        self.norm(torch.rand(4, 3))
        return super().training_step(batch, batch_idx)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything of a module that a later training could notice."""
    found: dict[str, Any] = {f"value {k}": v.clone() for k, v in module.state_dict().items()}
    for name, p in module.named_parameters():
        found[f"grad {name}"] = None if p.grad is None else p.grad.clone()
        found[f"flags {name}"] = (id(p), p.requires_grad, p._version)
    for name, part in module.named_modules():
        found[f"module {name}"] = (part.training, sorted(vars(part)), len(part._forward_hooks))
    found["plain"] = (getattr(module, "steps", 0), len(getattr(module, "seen", [])))
    found["random"] = (torch.get_rng_state(), str(np.random.get_state()))
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        pairs = zip(value, after[key], strict=True) if isinstance(value, tuple) else [(value, after[key])]
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs), key


def test_nothing_is_left_behind() -> None:
    """Lightning-AI/pytorch-lightning#9672 and #18813: a tuner changed weights and train/eval mode."""
    module = Stateful()
    before = state_of(module)
    measure(survey_of(module), lengths_of(num_lengths=2), {})
    assert_same(before, state_of(module))
    assert not module.second_layer().training
    assert "log" not in vars(module)


def test_nothing_is_left_behind_by_a_probe_that_raises() -> None:
    class Raising(Stateful):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch["ids"].shape[1] > 20:
                raise KeyError("user")
            return loss

    module = Raising()
    before = state_of(module)
    with pytest.raises(KeyError, match="user"):
        measure(survey_of(module), lengths_of(num_lengths=2), {})
    assert_same(before, state_of(module))


def limited(tokens: int) -> Callable[[MicroBatch], Batch]:
    """Reading raises as a device does when more than ``tokens`` per rank are asked for."""

    def read(micro_batch: MicroBatch) -> Batch:
        if micro_batch.padded_tokens / micro_batch.sp_size > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load(micro_batch)

    return read


def single_samples_only(micro_batch: MicroBatch) -> Batch:
    if micro_batch.batch_size > 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return load(micro_batch)


def test_sizes_out_of_memory_are_left_out() -> None:
    profile = measure(survey_of(Model(), load=single_samples_only), lengths_of(), {})
    assert [(m.batch_size, m.shape) for m in profile.measurements] == [
        (1, length.shape) for length in lengths_of()
    ]


def test_length_that_fits_nowhere_is_named() -> None:
    """Lightning-AI/pytorch-lightning#3103: no candidate fitted, and an unset variable was used."""
    with pytest.raises(ProfileError, match=r"shape \(48,\) does not fit into 1e\+03 GB .* sizes \[1\]"):
        measure(survey_of(Model(), load=limited(40)), lengths_of(), {})


def test_length_foreseen_not_to_fit_is_not_tried() -> None:
    asked: list[int] = []

    def read(micro_batch: MicroBatch) -> Batch:
        asked.append(micro_batch.padded_tokens)
        return load(micro_batch)

    whole = measure(survey_of(Model(), load=read), lengths_of(num_lengths=2), {})
    peak = max(2 * m.activation_bytes[0] + m.constant_bytes for m in whole.measurements)
    assert max(asked) == 48
    asked.clear()
    with pytest.raises(ProfileError, match="Raise memory_limit"):
        measure(survey_of(Model(), load=read, memory_bytes=peak // 2), lengths_of(num_lengths=2), {})
    assert max(asked) < 48


def test_middle_lengths_are_left_out_when_the_time_is_used_up() -> None:
    profile = measure(survey_of(Model(), budget_seconds=0.0), lengths_of(num_lengths=5), {})
    assert {m.shape for m in profile.measurements} == {(6,), (48,)}


def test_clock_decides_the_times() -> None:
    """Marks are 10 ns apart: forward 10, backward 10, a step without layers 10; recompute is bounded by shares."""
    profile = measure(survey_of(Model(), clocks=lambda *_: Numbered(10)), lengths_of(num_lengths=2), {})
    assert {(m.forward, m.backward, m.recompute, m.constant_time) for m in profile.measurements} == {
        ((10,), (10,), (5,), 10)
    }


def test_layer_that_runs_twice_in_a_step_costs_twice() -> None:
    class Looping(Model):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            x = self.model.embedding(batch["ids"])
            for _ in range(2):
                for layer in self.model.layers:  # type: ignore[union-attr]
                    x = layer(x)
            loss: Tensor = x.square().mean()
            return loss

    profile = measure(survey_of(Looping(), clocks=lambda *_: Numbered(10)), lengths_of(num_lengths=2), {})
    assert profile.measurements[0].forward == (20,)


class AddingInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor, *_rest: Any) -> Tensor:
        x += self.linear(torch.ones_like(x))
        return x


def test_layer_that_cannot_be_recomputed_saves_nothing_by_it() -> None:
    """Writing into its own input, which a checkpoint keeps; autograd refuses that loudly."""
    model = Model()
    model.model.layers = nn.ModuleList(AddingInPlace() for _ in range(3))
    with pytest.warns(UserWarning, match="AddingInPlace will not be recomputed"):
        profile = measure(survey_of(model), lengths_of(num_lengths=2), {})
    assert all(m.forward[0] > 0 for m in profile.measurements)
    assert all(m.input_bytes == m.activation_bytes for m in profile.measurements)


class Caching(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.store: list[Tensor] = []

    def forward(self, x: Tensor, *_rest: Any) -> Tensor:
        self.store.append(x)
        return (
            x + torch.cat(self.store, dim=1).view(x.shape) if len(self.store) < 2 else x + torch.cat(self.store, 1)
        )


def test_layer_with_a_cache_is_named() -> None:
    model = Model()
    model.model.layers = nn.ModuleList(Caching(layer) for layer in model.model.layers)  # type: ignore[union-attr]
    with pytest.raises(ProfileError, match=r"layer 1 of 'model.layers'.*use_cache=False"):
        measure(survey_of(model), lengths_of(num_lengths=2), {})


def test_reentrant_checkpointing_is_refused() -> None:
    class Reentrant(Model):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            weight = self.model.head.weight
            extra: Tensor = checkpoint(lambda w: w.square().sum(), weight, use_reentrant=True)
            return super().training_step(batch, batch_idx) + extra

    with pytest.raises(ProfileError, match="use_reentrant=False"):
        measure(survey_of(Reentrant()), lengths_of(num_lengths=2), {})


def test_compiled_model_is_measured_without_compiling_truncations() -> None:
    torch._dynamo.reset()
    graphs = []
    model = Model()
    model.model = torch.compile(model.model, backend=lambda gm, _: graphs.append(1) or gm.forward)  # type: ignore
    profile = measure(survey_of(model), lengths_of(num_lengths=2), {})
    assert profile.num_layers == (3,)
    assert graphs == []
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (MemoryError(), True),
        (RuntimeError("shape"), False),
    ],
)
def test_out_of_memory_errors(error: Exception, answer: bool) -> None:
    assert is_out_of_memory(error) == answer


# --- probes -------------------------------------------------------------------------------------------------


def test_probes_cover_the_data_and_respect_the_limits() -> None:
    shapes = np.random.default_rng(0).integers(10, 4000, size=(500, 1))
    limits = replace(LIMITS, max_batch_size=8, max_tokens=1500)
    lengths = plan_probes(shapes, (1, 2, 4), limits, 5)
    assert [length.shape for length in lengths] == list(representatives(shapes, 5))
    assert lengths[-1].shape[0] == shapes.max()
    assert [length.needed for length in lengths] == [True, *[False] * (len(lengths) - 2), True]
    assert len(lengths) == 5
    for length in lengths:
        assert length.probes[0].sp_size == 4
        for probe in length.probes:
            assert probe.batch_size <= 8
            assert probe.tokens_per_rank <= 1500
            assert all(size[0] <= length.shape[0] for size in probe.sizes)
            assert [tuple(shapes[i]) for i in probe.sample_ids] == list(probe.sizes)
            assert probe.micro_batch(0, 2).padded_shape[0] % probe.sp_size == 0
    assert {probe.batch_size for length in lengths for probe in length.probes} == {1, 4}


def test_probes_of_a_model_that_minds_padding_hold_one_shape() -> None:
    shapes = np.random.default_rng(0).integers(10, 400, size=(300, 1))
    lengths = plan_probes(shapes, (1,), replace(LIMITS, exact_shapes=True), 5)
    assert max(probe.batch_size for length in lengths for probe in length.probes) > 1
    assert all(set(probe.sizes) == {length.shape} for length in lengths for probe in length.probes)


def test_probes_of_short_samples_are_padded_as_plans_are() -> None:
    for length in plan_probes(np.asarray([[1], [3], [9]]), (1, 2, 4), LIMITS):
        for probe in length.probes:
            assert probe.micro_batch(0, 1).padded_shape == pad([probe.shape], probe.sp_size)
            assert probe.sp_size == 1 or probe.micro_batch(0, 1).padded_shape[0] >= 2 * probe.sp_size


def test_longest_sample_is_probed_whatever_max_tokens_says() -> None:
    lengths = plan_probes(SHAPES, (1, 2), Limits(memory_bytes=1, max_tokens=10), 3)
    assert [(p.batch_size, p.sp_size) for p in lengths[-1].probes] == [(1, 2)]


def test_data_of_one_length() -> None:
    lengths = plan_probes(np.full((3, 1), 16), (1,), LIMITS, 6)
    assert len(lengths) == 1
    assert lengths[0].needed
    assert [probe.batch_size for probe in lengths[0].probes] == [1, 4]


# --- several ranks ------------------------------------------------------------------------------------------


def measure_on_ranks(sp_sizes: tuple[int, ...], **changes: Any) -> str:
    world = World.build(dist.get_world_size(), sp_sizes)
    rank = dist.get_rank()
    survey = survey_of(Model(), world, rank, **changes)
    return measure(survey, lengths_of(world.sp_sizes, 2), {}).to_json()


def test_real_groups(pool: Pool) -> None:
    """Layers exchange attention over the real groups; a rank outside of the wide group sits out."""
    texts = pool.run(measure_on_ranks, 3, (1, 2))
    assert len(set(texts)) == 1
    rows = {(m.sp_size, m.batch_size, m.shape): m for m in Profile.from_json(texts[0]).measurements}
    one, two = rows[1, 1, (48,)], rows[2, 1, (48,)]
    assert min(*two.forward, *two.backward, two.constant_time) > 0
    # Half the tokens, and the exchange keeps one more copy of the hidden states or so.
    assert 0.45 * one.activation_bytes[0] < two.activation_bytes[0] < 0.75 * one.activation_bytes[0]
    assert abs(two.input_bytes[0] - one.input_bytes[0] // 2) < 6000
    assert {p for p, _, _ in rows} == {1, 2}


def with_own_clock() -> str:
    step = 1000 * (1 + dist.get_rank())
    return measure_on_ranks((1, 2), clocks=lambda *_: Numbered(step))


def test_slowest_rank_counts_on_all(pool: Pool) -> None:
    """Lightning-AI/pytorch-lightning#19789: ranks decided each for itself."""
    texts = pool.run(with_own_clock, 2)
    assert texts[0] == texts[1]
    profile = Profile.from_json(texts[0])
    assert {m.forward for m in profile.measurements} == {(2000,)}
    first, second = (CostModel(Profile.from_json(text)) for text in texts)
    assert first.nanoseconds(3, (31,), 2, (1,)) == second.nanoseconds(3, (31,), 2, (1,))


def out_of_memory_on_rank_one() -> str:
    return measure_on_ranks((1,), load=limited(20 if dist.get_rank() == 1 else 10**9))


def test_out_of_memory_on_one_rank_is_raised_on_all(pool: Pool) -> None:
    with pytest.raises(RemoteError, match=r"shape \(48,\) does not fit") as caught:
        pool.run(out_of_memory_on_rank_one, 2)
    assert set(caught.value.tracebacks) == {0, 1}
    assert all("does not fit" in text for text in caught.value.tracebacks.values())


def large_batch_fails_on_rank_one() -> str:
    return measure_on_ranks((1,), load=single_samples_only if dist.get_rank() == 1 else load)


def length_fits_in_pairs_only() -> str:
    return measure_on_ranks((1, 2), load=limited(30))


def test_length_that_fits_in_wide_groups_only(pool: Pool) -> None:
    profile = Profile.from_json(pool.run(length_fits_in_pairs_only, 2)[0])
    longest = [(m.batch_size, m.sp_size) for m in profile.measurements if m.shape == (48,)]
    assert longest == [(1, 2)]
    assert CostModel(profile).bytes(1, (48,), 1, (0,)) > CostModel(profile).bytes(1, (48,), 2, (0,))


def test_size_out_of_memory_on_one_rank_is_left_out_on_all(pool: Pool) -> None:
    texts = pool.run(large_batch_fails_on_rank_one, 2)
    assert texts[0] == texts[1]
    assert {m.batch_size for m in Profile.from_json(texts[0]).measurements} == {1}


def error_on_rank_one() -> str:
    def read(micro_batch: MicroBatch) -> Batch:
        if dist.get_rank() == 1:
            raise KeyError("broken file")
        return load(micro_batch)

    return measure_on_ranks((1,), load=read)


def test_error_on_one_rank_ends_all(pool: Pool) -> None:
    with pytest.raises(RemoteError) as caught:
        pool.run(error_on_rank_one, 2, timeout=30)
    assert "broken file" in caught.value.tracebacks[1]
    assert "failed on another rank" in caught.value.tracebacks[0]


class FailsInPairs(Model):
    """Raises on one rank between two exchanges of its pair."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if current().group.size == 2 and current().group.rank == 1:
            with self.model.register_forward_hook(self._fail):
                return super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def _fail(self, *args: Any) -> None:
        raise KeyError("broken layer")


def error_inside_a_pair() -> None:
    world = World.build(2, (1, 2))
    measure(survey_of(FailsInPairs(), world, dist.get_rank()), lengths_of(world.sp_sizes, 2), {})


def test_error_inside_a_group_ends_all_at_once(pool: Pool) -> None:
    """The peer waits in the exchanges of the backward, which the failing rank never enters."""
    with pytest.raises(RemoteError) as caught:
        pool.run(error_inside_a_pair, 2, timeout=60)
    assert "broken layer" in caught.value.tracebacks[1]
    assert "timed out" not in caught.value.tracebacks[0].lower()


def obtain(source: Any = None) -> Profile:
    module = Model()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    world = World.build(world_size, [1])
    return obtain_profile(
        source, runner=runner_of(module, world), world=world, rank=rank, device=CPU, precision="32-true",
        shapes=SHAPES, load=load, limits=LIMITS, length_groups=2,
    )  # fmt: skip


def obtain_on_unequal_machines(path: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        name = f"machine {dist.get_rank()}"
        patch.setattr("lightning_dcp.profiling.store._device_name", lambda _: name)
        return obtain(path).to_json()


def test_ranks_on_unequal_machines_use_one_profile(pool: Pool, tmp_path: Path) -> None:
    """The file is not for the second rank's device; all take what rank 0 takes."""
    path = str(tmp_path / "profile.json")
    measured = pool.run(obtain_on_unequal_machines, 2, path)
    assert measured[0] == measured[1]
    assert Profile.from_json(measured[0]).identity["device"] == "machine 0"
    assert pool.run(obtain_on_unequal_machines, 2, path) == measured


def obtain_with_little_memory_on_rank_one() -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_dcp.profiling.obtain.memory_bytes", lambda *_: 10**5 if dist.get_rank() else 10**12
        )
        return obtain()


def test_least_memory_of_all_ranks_bounds_the_probes(pool: Pool) -> None:
    """A rank that left out a probe which its group runs would leave the others waiting."""
    with pytest.raises(RemoteError) as caught:
        pool.run(obtain_with_little_memory_on_rank_one, 2, timeout=30)
    assert set(caught.value.tracebacks) == {0, 1}
    assert all("does not fit into 0.0001 GB" in text for text in caught.value.tracebacks.values())


def test_profile_of_the_strategy(tmp_path: Any) -> None:
    profile = obtain()
    runner = runner_of(Model(), World.build(1, [1]))
    identity = profile_identity(runner.module, runner.recompute, world_size=1, precision="32-true", device=CPU)
    assert dict(profile.identity) == identity
    assert profile.static_bytes == sum(p.numel() for p in Model().parameters()) * (8 + 12 + 4)
    assert obtain(profile) is profile
    written = obtain(tmp_path / "profile.json")
    assert obtain(str(tmp_path / "profile.json")) == written
    with pytest.raises(ProfileError, match=r"the given profile .* precision: 16 / 32-true"):
        obtain(replace(profile, identity={**identity, "precision": "16"}))


def test_profile_by_formula_fits_any_model_of_its_layers() -> None:
    formula = analytic_profile((1,), (3,))
    assert obtain(replace(formula, identity={})) == replace(formula, identity={})
    with pytest.raises(ProfileError, match=r"families of \(4,\) layers, the model has \(3,\)"):
        obtain(replace(analytic_profile((1,), (4,)), identity={}))
    with pytest.raises(ProfileError, match="longest sample in tokens: 32 / 48"):
        obtain(replace(analytic_profile((1,), (3,), shapes=((8,), (32,))), identity={}))


def test_a_batch_counts_with_all_its_tensors_once() -> None:
    """Video latents and the like: what is moved to the device for a micro-batch is held until its end."""

    def with_extra(micro_batch: MicroBatch) -> Batch:
        extra = torch.zeros(micro_batch.batch_size, micro_batch.padded_shape[0], 1000)
        return {**load(micro_batch), "extra": extra, "view": extra[..., :2]}

    lengths = lengths_of(num_lengths=2)
    plain = measure(survey_of(Model()), lengths, {}).measurements
    larger = measure(survey_of(Model(), load=with_extra), lengths, {}).measurements
    for a, b in zip(plain, larger, strict=True):
        assert b.constant_bytes - a.constant_bytes == 4000 * a.batch_size * a.shape[0]
