"""A dry run: what it shows is what the fit does, and nothing else happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_dcp import dry_run
from lightning_dcp.plan import IterationPlan
from lightning_dcp.rehearsal import DryRun
from tests.fitting import LAYERS, Case, Data, Module, formula_profile, make_strategy, make_trainer, weights_of
from tests.pool import Pool
from tests.test_cli_fit import _in_example, _words, call

CASE = Case(world_size=3, samples=24, batch=8, steps=3, seed=5)


class Hooks(pl.Callback):
    """The hooks that were called, and the plans that were trained."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.plans: list[str] = []

    def on_fit_start(self, *args: Any) -> None:
        self.called.append("on_fit_start")

    def on_sanity_check_start(self, *args: Any) -> None:
        self.called.append("on_sanity_check_start")

    def on_train_start(self, *args: Any) -> None:
        self.called.append("on_train_start")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.plans.append(trainer.strategy.plan.to_json())  # type: ignore[attr-defined]


class Counting(Module):
    """Counts the steps that Lightning makes."""

    steps = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("a dry run evaluates nothing")

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([1, 2])  # type: ignore[arg-type]


def _trainer(case: Case, folder: str, **strategy: Any) -> pl.Trainer:
    return make_trainer(
        make_strategy(case, **strategy),
        case,
        devices=case.world_size,
        callbacks=[Hooks()],
        logger=CSVLogger(folder),
        enable_checkpointing=True,
        default_root_dir=folder,
        limit_val_batches=0,
    )


def _hooks(trainer: pl.Trainer) -> Hooks:
    return next(c for c in trainer.callbacks if isinstance(c, Hooks))  # type: ignore[attr-defined]


def _dry_then_fit(case: Case, folder: str, planner: str | None) -> tuple[DryRun, dict[str, Any]]:
    """A dry run, and then a fit of the same trainer; with another module, for comparison, a fit alone."""
    more = {} if planner is None else {"planner": planner}
    trainer, module = _trainer(case, folder, self_check=True, **more), Counting(case)
    before = weights_of(module)
    trainer.limit_val_batches = 1.0
    found = dry_run(trainer, module, Data(case))
    trainer.limit_val_batches = 0
    out: dict[str, Any] = {
        "unchanged": all(torch.equal(p, before[name]) for name, p in module.named_parameters()),
        "steps": module.steps,
        "called": list(_hooks(trainer).called),
        "written": sorted(str(path) for path in Path(folder).rglob("*")),
    }
    trainer.fit(module, datamodule=Data(case))
    out["plans"] = _hooks(trainer).plans
    alone = Counting(case)
    _trainer(case, f"{folder}/alone", self_check=True, **more).fit(alone, datamodule=Data(case))
    out["equal"] = all(torch.equal(p, weights_of(alone)[name]) for name, p in module.named_parameters())
    return found, out


@pytest.mark.feature("Command line", "dry run", "also as `lightning_dcp.dry_run(trainer, model, data)`")
@pytest.mark.parametrize("planner", [None, "dcp-intra"])
def test_a_dry_run_shows_what_the_fit_does_and_changes_nothing(
    pool: Pool, tmp_path: Path, planner: str | None
) -> None:
    case = replace(CASE, batch=8)
    results = pool.run(_dry_then_fit, 3, case, str(tmp_path), planner, timeout=180.0)
    for found, out in results:
        assert found == results[0][0], "ranks differ"
        assert out["unchanged"]
        assert out["steps"] == 0
        assert out["called"] == ["on_fit_start"]
        assert out["written"] == []
        assert out["equal"]
        assert [plan.to_json() for plan in found.plans] == out["plans"][: len(found.plans)]
        assert len(found.plans) == len(out["plans"]) == 3
    found = results[0][0]
    assert (found.world_size, found.precision, found.planner) == (3, "32-true", planner or "random")
    (family,) = found.families
    assert (family.name, family.class_name, family.layers) == ("net.layers", "Block", LAYERS)
    assert found.heads == ((4, 2),)
    assert found.kernels == ("sdpa (tensors are not on a CUDA device)",)
    assert found.sp_sizes == (1, 2)
    assert found.left_out == {"they do not divide the attention heads": (3,)}
    assert found.findings == ()
    assert found.profile_from == "given"
    assert (found.num_samples, found.num_steps) == (24, 3 if planner is None else None)
    text = str(found)
    for part in (
        "Dry run on 3 ranks (cpu, 32-true). No step was made.",
        "3 x Block in 'net.layers'",
        "4 heads, 2 for keys; kernel sdpa (tensors are not on a CUDA device)",
        "1, 2 (not used: 3: they do not divide the attention heads)",
        "passed: padding, p = 1, 2, recomputation",
        f'planner "{found.planner}"',
        f"24 samples, {found.num_tokens} tokens",
    ):
        assert part in text, part


def _origins(folder: str) -> list[tuple[str, list[str], bool]]:
    """Where the profile comes from, with one rank: measured, kept, read, of a checkpoint."""
    case = replace(CASE, world_size=1, steps=2)
    file, found = f"{folder}/profile.json", []
    for profile in (None, file, file):
        run = dry_run(_trainer(case, folder, profile=profile), Module(case), Data(case), steps=1)
        found.append((run.profile_from, [plan.to_json() for plan in run.plans], bool(run.heads)))
    trainer = make_trainer(
        make_strategy(case),
        case,
        devices=1,
        max_steps=1,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, filename="one")],
    )
    trainer.fit(Module(case), datamodule=Data(case))
    resumed = _trainer(case, folder, profile=None)
    run = dry_run(resumed, Module(case), Data(case), ckpt_path=f"{folder}/one.ckpt", weights_only=True)
    resumed.fit(Module(case), datamodule=Data(case), ckpt_path=f"{folder}/one.ckpt", weights_only=True)
    plans = [plan.to_json() for plan in run.plans]
    assert plans[:1] == _hooks(resumed).plans, "the first step to come is another"
    return [*found, (run.profile_from, plans, bool(run.heads))]


def test_where_the_profile_comes_from(pool: Pool, tmp_path: Path) -> None:
    """And on one rank, where nothing else asks for the heads; a resumed run shows the steps that are left."""
    (found,) = pool.run(_origins, 1, str(tmp_path), timeout=120.0)
    file = tmp_path / "profile.json"
    assert [where for where, _, _ in found] == [
        "measured now",
        f"measured now and kept in {file}",
        f"read from {file}",
        "of the checkpoint",
    ]
    assert file.exists()
    assert all(heads for *_, heads in found)
    assert [len(plans) for _, plans, _ in found] == [1, 1, 1, 2]


def _from_the_command_line(folder: str) -> list[Any]:
    with _in_example():
        words = [word for word in _words(folder) if "max_steps" not in word]
        shown = call("fit", *words, "--dry-run", "--dry-run-steps=2", f"--dry-run-picture={folder}/plan.png")
        refused = call("fit", *words, "--dry-run", "--trainer.strategy.memory_limit=1MB")
        other = call("fit", *words, "--dry-run", "--trainer.strategy=ddp")
    return [shown[:2], (refused[0], refused[2].splitlines()[-1]), (other[0], other[2].splitlines()[-1])]


def test_dry_run_on_the_command_line(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(formula_profile(2, (4,)).to_json())
    first, second = pool.run(_from_the_command_line, 2, str(tmp_path), timeout=120.0)
    (code, out), (too_small, sentence), (other, advice) = first
    assert code == 0
    assert out.startswith("Dry run on 2 ranks (cpu, 32-true). No step was made.\n")
    for part in ("4 x TransformerLayer in 'model.layers'", f"read from {tmp_path}/profile.json", "\n2  ", "off"):
        assert part in out, part
    assert "\n3  " not in out
    assert second[0] == (0, ""), "rank 0 prints"
    assert too_small == other == 2
    assert "memory_limit" in sentence
    assert "DDPStrategy does not make" in advice
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.png", "profile.json"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_refusals() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match="a dry run shows plans, which"):
        dry_run(trainer, Module(CASE), Data(CASE))
    trainer = make_trainer(make_strategy(CASE), CASE, devices=1)
    for steps in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"steps is {steps!r}; allowed are integers from 1"):
            dry_run(trainer, Module(CASE), Data(CASE), steps=steps)  # type: ignore[arg-type]


def _found(**changes: Any) -> DryRun:
    from lightning_dcp.planners import Limits

    base: dict[str, Any] = {
        "world_size": 8,
        "device": "NVIDIA H200",
        "precision": "bf16-mixed",
        "families": (),
        "heads": (),
        "kernels": (),
        "sp_sizes": (1,),
        "left_out": {"the self-check found another result": (2, 4), "no room for a group among the ranks": (8,)},
        "self_check": True,
        "exact_shapes": True,
        "recompute": False,
        "findings": ("Self-check, padding: it differs.",),
        "limits": Limits(memory_bytes=80 * 10**9),
        "profile": replace(formula_profile(2, (3,)), sync_time=5_000_000),
        "profile_from": "measured now",
        "planner": "balanced",
        "plans": (),
        "num_samples": 1000,
        "num_tokens": 50_000,
        "num_steps": None,
    }
    return DryRun(**{**base, **changes})


def test_what_is_switched_off_is_said() -> None:
    text = " ".join(str(_found()).split())
    for part in (
        "none repeats, so nothing can be recomputed",
        "no call of scaled_dot_product_attention was seen",
        "1 (not used: 2, 4: the self-check found another result; 8: no room for a group among the ranks)",
        "switched off: padding, p = 2, p = 4, recomputation Self-check, padding: it differs.",
        "80.0 GB a rank",
        "no step is left to be planned",
    ):
        assert part in text, part
    said = " ".join(str(_found(exact_shapes=False, recompute=True, left_out={})).split())
    assert "nothing switched off, but: Self-check, padding: it differs." in said
    assert "self-check off" in " ".join(str(_found(self_check=False)).split())


def test_the_estimate_of_an_epoch() -> None:
    """By hand: plans of 2 s in all for 1000 of 50,000 tokens, in two steps; a step's end takes 5 ms."""
    from lightning_dcp.plan import MicroBatch

    def plan(first: int, nanoseconds: int, tokens: int) -> IterationPlan:
        micro_batch = MicroBatch(
            sample_ids=(first,),
            shapes=((tokens,),),
            padded_shape=(tokens,),
            first_rank=0,
            sp_size=1,
            nanoseconds=nanoseconds,
            bytes=10**9,
        )
        return IterationPlan(world_size=1, micro_batches=(micro_batch,), lower_bound=nanoseconds // 2)

    plans = (plan(0, 1_500_000_000, 700), plan(1, 500_000_000, 300))
    run = _found(plans=plans)
    assert run.steps_of_epoch == 100
    assert run.seconds_of_epoch == pytest.approx(50 * 2 + 100 * 0.005)
    assert _found(plans=plans, num_steps=40).seconds_of_epoch == pytest.approx(50 * 2 + 40 * 0.005)
    text = str(run)
    assert "about 100 steps: about 100.5 s" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if line.startswith(("1  ", "2  "))]
    assert rows[0] == [
        "1",
        "1",
        "700",
        "1:",
        "1",
        "1",
        "0",
        "1.500",
        "0.0",
        "%",
        "0.0",
        "%",
        "100.0",
        "%",
        "1.0",
        "GB",
    ]
    assert rows[1][7] == "0.500"
