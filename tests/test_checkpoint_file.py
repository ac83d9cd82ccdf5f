"""One file with whole weights and optimizer state by name, the same from any number of ranks and for any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dcp.checkpoint import Section
from tests.checkpointing import (
    CASE,
    Rich,
    RichAdam,
    RichSingle,
    Run,
    read,
    sample_ids,
    tensors_of,
    train,
)
from tests.fitting import (
    Result,
    Samples,
    assert_same_updates,
    collate_whole,
    fit_single,
    make_trainer,
    weights_of,
)
from tests.pool import Pool

WEIGHTS = ("state_dict", "optimizer_states", "lr_schedulers")


def run_on(ranks: int, **kwargs: Any) -> Run:
    case = replace(CASE, world_size=ranks, precision=kwargs.pop("precision", CASE.precision))
    return Run(case=case, **kwargs)


@pytest.mark.feature(
    "Checkpoints", "resume on another number of ranks", "the same samples to come; weights equal up to rounding"
)
def test_another_number_of_ranks_trains_on(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#19585, pytorch/pytorch#65650, meta-pytorch/torchft#292: 4, 2, 1 and 4 ranks one
    after the other end as one process does, and no sample is lost or repeated.
    """
    plans: list[str] = []
    resume: str | None = None
    for ranks, steps in ((4, 2), (2, 3), (1, 4), (4, 6)):
        path = str(tmp_path / f"{steps}.ckpt")
        ended = pool.run(train, ranks, run_on(ranks, steps=steps, resume=resume, save=path), timeout=120.0)[0]
        plans += ended.plans
        resume = path
    ids = sample_ids(plans)
    assert len(ids) == 6
    for epoch in (ids[:3], ids[3:]):
        assert sorted(i for step in epoch for i in step) == list(range(CASE.samples))
    single = fit_single(replace(CASE, steps=6), plans, make=RichSingle)
    start = weights_of(RichSingle(CASE))
    assert_same_updates(Result(start=start, weights=ended.weights, losses=[], plans=plans), single)
    assert ended.rates == pytest.approx([CASE.lr / 7, CASE.lr / 14])
    assert read(path)["optimizer_states"][0]["param_groups"][0]["lr"] == ended.rates[0]


@pytest.mark.feature("Checkpoints", "`trainer.save_checkpoint` after a fit")
@pytest.mark.parametrize(("precision", "module"), [("32-true", Rich), ("bf16-mixed", RichAdam)])
def test_loading_and_saving_changes_no_bit(pool: Pool, tmp_path: Path, precision: str, module: type[Rich]) -> None:
    """Weights, float32 masters and optimizer state, from 3 ranks to others; saved after the end of a fit."""
    first = tmp_path / "3.ckpt"
    pool.run(train, 3, run_on(3, precision=precision, steps=2, save=str(first), module=module), timeout=120.0)
    expected = tensors_of({key: read(first)[key] for key in WEIGHTS})
    assert {value.dtype for name, value in expected.items() if name.startswith("/optimizer")} == {torch.float32}
    for ranks in (1, 4):
        again = tmp_path / f"{ranks}.ckpt"
        run = run_on(ranks, precision=precision, steps=2, resume=str(first), save=str(again), module=module)
        pool.run(train, ranks, run, timeout=120.0)
        content = read(again)
        got = tensors_of({key: content[key] for key in WEIGHTS})
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), f"{name} on {ranks} ranks"
        assert content["optimizer_states"][0]["param_groups"] == read(first)["optimizer_states"][0]["param_groups"]


def test_content_of_the_file(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    run = run_on(2, precision="bf16-mixed", steps=2, save=str(path), module=RichAdam)
    ended = pool.run(train, 2, run, timeout=120.0)[0]
    content = read(path)
    module = RichAdam(CASE)
    weights = content["state_dict"]
    assert weights.keys() == module.state_dict().keys()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    for name, value in weights.items():
        assert value.shape == module.state_dict()[name].shape
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), (
            "a stretch of a larger tensor"
        )
        if name in trained:
            assert value.dtype == torch.float32
            assert torch.equal(value.bfloat16(), ended.weights[name])
            assert not torch.equal(value, ended.weights[name].float()), "rounded, so no master"
    tied = [weights["net.embedding.weight"], weights["net.heads.0.weight"]]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    state = content["optimizer_states"][0]
    assert state["state"].keys() == trained
    for name, values in state["state"].items():
        assert values.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert values["exp_avg"].shape == weights[name].shape
        assert float(values["step"]) == 2
        assert float(values["exp_avg"].abs().sum()) > 0
    steps = [values["step"].data_ptr() for values in state["state"].values()]
    assert len(set(steps)) == len(steps), "an optimizer that counts in place would count once for each name"
    assert [len(group["params"]) for group in state["param_groups"]] == [
        sum(p.dim() >= 2 for p in module.parameters()),
        sum(p.dim() < 2 for p in module.parameters()),
    ]
    assert content[Section.KEY]["world_size"] == 2


def _states_of_other_ranks(run: Run) -> tuple[bool, list[str]]:
    """Whether this rank's weights are the module's own memory, and what it got of the optimizer's state."""
    from lightning.pytorch.callbacks import Callback

    seen: list[Any] = []

    class Look(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            own = {p.data_ptr() for p in module.parameters()}
            weights = [v for k, v in checkpoint["state_dict"].items() if k != "table"]
            seen.append(all(v.data_ptr() in own for v in weights))
            seen.append([list(state) for state in checkpoint["optimizer_states"]])

    train(replace(run, callbacks=(Look(),)))
    return seen[0], seen[1]


def test_other_ranks_hold_no_copy(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#10745."""
    run = run_on(2, precision="bf16-mixed", steps=1, save=str(tmp_path / "x.ckpt"))
    first, second = pool.run(_states_of_other_ranks, 2, run, timeout=120.0)
    assert first == (False, [["state", "param_groups"]])
    assert second == (True, [[]])


@pytest.mark.feature(
    "Checkpoints", "files of other strategies", '`Trainer(strategy="auto")` resumes from ours, we from its'
)
def test_plain_lightning_resumes_from_it_and_it_from_plain_lightning(pool: Pool, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#15834: one file for every strategy, momentum and schedule included."""
    ours, theirs = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    before = pool.run(train, 2, run_on(2, steps=3, save=str(ours)), timeout=120.0)[0]
    # The second epoch: a plain loader has no position within one.
    after = pool.run(train, 2, run_on(2, steps=6, resume=str(ours)), timeout=120.0)[0]
    start = weights_of(RichSingle(CASE))

    def single(plans: list[str], resume: Path | None, save: Path | None) -> dict[str, torch.Tensor]:
        samples = Samples(CASE)
        steps = [[samples[i] for i in ids] for ids in sample_ids(plans)]
        loader: Any = torch.utils.data.DataLoader(steps, batch_size=None, collate_fn=collate_whole)  # type: ignore[arg-type]
        module = RichSingle(CASE)
        trainer = make_trainer("auto", CASE, devices=1, max_steps=-1, max_epochs=1 if resume is None else 2)
        trainer.fit(module, loader, ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
        return weights_of(module)

    single(before.plans, None, theirs)
    end = single(after.plans, ours, None)
    resumed = pool.run(train, 2, run_on(2, steps=6, resume=str(theirs)), timeout=120.0)[0]
    assert sample_ids(resumed.plans) == sample_ids(after.plans)
    for weights in (end, resumed.weights):
        result = Result(start=start, weights=weights, losses=[], plans=[])
        assert_same_updates(result, Result(start=start, weights=after.weights, losses=[], plans=[]))
