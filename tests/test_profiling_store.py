"""Files of profiles: used only where they fit, written whole or not at all, decided alike on all ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dcp.models.presets import build
from lightning_dcp.profile import Profile, ProfileError
from lightning_dcp.profiling import Wanted, load_or_measure, profile_identity, write_profile
from lightning_dcp.recompute import RecomputeSwitch, find_families
from tests.pool import Pool, RemoteError
from tests.synthetic import analytic_profile

CPU = torch.device("cpu")
IDENTITY = {"model": "a", "precision": "32-true", "world_size": "2"}
WANTED = Wanted(identity=IDENTITY, max_tokens=16384)


def profile_for(**identity: str) -> Profile:
    return replace(analytic_profile(), identity={**IDENTITY, **identity})


def never() -> Profile:
    raise AssertionError("measured although a profile fits")


def test_file_is_written_once_and_read_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    measured = load_or_measure(path, WANTED, profile_for, rank=0)
    assert load_or_measure(path, WANTED, never, rank=0) == measured
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    load_or_measure(tmp_path / "profile.json", WANTED, profile_for, rank=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", sorted(IDENTITY))
def test_named_file_for_something_else_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile_for(**{field: "other"}), path)
    with pytest.raises(ProfileError, match=rf"profile\.json .*{field}: other / {IDENTITY[field]}"):
        load_or_measure(path, WANTED, never, rank=0)


def test_longer_samples_than_measured_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile_for(), path)
    with pytest.raises(ProfileError, match="longest sample in tokens: 16384 / 16385"):
        load_or_measure(path, replace(WANTED, max_tokens=16385), never, rank=0)


@pytest.mark.parametrize("content", ["", "{", '{"format": "other"}', "\x00"])
def test_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ProfileError, match=r"profile\.json"):
        load_or_measure(path, WANTED, never, rank=0)


def test_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        load_or_measure(tmp_path, WANTED, never, rank=0)


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile_for(), path)

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_profile(profile_for(model="b"), path)
    assert Profile.from_json(path.read_text()) == profile_for()
    assert len(list(tmp_path.iterdir())) == 1


def test_file_that_cannot_be_written_costs_only_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of rank 0 alone would leave the others waiting in their next exchange."""

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.warns(UserWarning, match=r"could not be kept in .*profile\.json \(disk full\)"):
        assert load_or_measure(tmp_path / "profile.json", WANTED, profile_for, rank=0) == profile_for()
    assert list(tmp_path.iterdir()) == []


def identity_of(module: nn.Module, **changes: Any) -> dict[str, str]:
    settings = {"world_size": 2, "precision": "32-true", "device": CPU, **changes}
    return profile_identity(module, RecomputeSwitch(find_families(module)), **settings)


def test_identity_names_what_changed() -> None:
    base = identity_of(build("tiny-1d"))
    assert identity_of(build("tiny-1d")) == base
    frozen = build("tiny-1d")
    frozen.head.requires_grad_(False)
    for other, fields in [
        (identity_of(build("tiny-1d", num_layers=4)), {"model", "layers"}),
        (identity_of(build("tiny-1d", vocab_size=65)), {"model"}),
        # Equal parameters, another cost: attention with dropout takes another path.
        (identity_of(build("tiny-1d", dropout=0.1)), {"layers"}),
        (identity_of(build("tiny-1d").bfloat16()), {"model", "layers"}),
        (identity_of(frozen), {"model"}),
        (identity_of(build("tiny-1d"), world_size=4), {"world_size"}),
        (identity_of(build("tiny-1d"), precision="bf16-true"), {"precision"}),
    ]:
        assert {name for name in base if base[name] != other[name]} == fields
    assert base["device"].startswith("cpu: ")
    assert "layers x 3" in base["layers"]


def read_on_ranks(folder: str, model: str) -> str:
    # Each rank sees a folder of its own, as machines without a shared disk do: rank 0's file decides.
    path = Path(folder) / str(dist.get_rank()) / "profile.json"
    return load_or_measure(path, WANTED, lambda: profile_for(model=model), rank=dist.get_rank()).to_json()


def test_ranks_decide_by_the_file_of_rank_zero(pool: Pool, tmp_path: Path) -> None:
    texts = pool.run(read_on_ranks, 2, str(tmp_path), "a")
    assert texts[0] == texts[1]
    assert (tmp_path / "0" / "profile.json").exists()
    assert not (tmp_path / "1").exists()
    # Nobody measures now, also not rank 1, which has no file.
    assert pool.run(read_on_ranks, 2, str(tmp_path), "measured anew") == texts


def test_misfit_is_raised_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    write_profile(profile_for(model="other"), tmp_path / "0" / "profile.json")
    with pytest.raises(RemoteError) as caught:
        pool.run(read_on_ranks, 2, str(tmp_path), "a")
    assert set(caught.value.tracebacks) == {0, 1}
    assert all("model: other / a" in text for text in caught.value.tracebacks.values())
