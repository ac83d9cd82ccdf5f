"""The self-check: wrong models are found and named, right ones keep every freedom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_dcp.execution import LossSettings
from lightning_dcp.selfcheck import Freedoms
from tests import selfcheck_tools as tools
from tests.pool import Pool
from tests.selfcheck_tools import Answer, Setting

ALL = Freedoms(exact_shapes=False, sp_sizes=(1, 2), recompute=True)
BF16 = Setting(dtype=torch.bfloat16)


def _run(pool: Pool, make: Any, setting: Setting, world_size: int = 2, **changes: Any) -> Answer:
    """The answer of all ranks, which must be one."""
    answers: list[Answer] = pool.run(tools.check, world_size, make, setting, timeout=120, **changes)
    assert all(replace(answer, warned=[]) == replace(answers[0], warned=[]) for answer in answers)
    assert all(answer.warned == [] for answer in answers[1:]), "said on rank 0 only"
    assert answers[0].changed == []
    return answers[0]


def _found(
    pool: Pool, make: Any, setting: Setting | None = None, **changes: Any
) -> tuple[bool, tuple[int, ...], bool, str]:
    """What was switched off, and the messages in one text."""
    answer = _run(pool, make, setting or Setting(), **changes)
    freedoms = answer.freedoms
    assert freedoms is not None
    assert answer.warned == list(freedoms.messages)
    return freedoms.exact_shapes, freedoms.sp_sizes, freedoms.recompute, "\n".join(freedoms.messages)


@pytest.mark.parametrize(
    ("make", "changes", "setting"),
    [
        pytest.param(tools.Language, {}, Setting(), id="rotary"),
        pytest.param(tools.Language, {"positions": "learned"}, Setting(), id="learned positions"),
        pytest.param(tools.Language, {"num_kv_heads": 2}, Setting(), id="grouped heads"),
        pytest.param(tools.Language, {"causal": False}, Setting(), id="key mask"),
        pytest.param(tools.MaskWhereNeeded, {}, Setting(shapes=((11,), (7,))), id="mask on one rank"),
        pytest.param(tools.Language, {"dropout": 0.1}, Setting(), id="dropout"),
        pytest.param(tools.ManyDropouts, {}, Setting(), id="dropout everywhere"),
        pytest.param(tools.Language, {}, Setting(shapes=((8,), (8,))), id="one length"),
        pytest.param(tools.SumAndCount, {}, Setting(), id="sum and count"),
        pytest.param(tools.SumAndCount, {}, Setting(loss=LossSettings(weighting="sample")), id="by sample"),
        pytest.param(tools.Language, {}, BF16, id="bf16 weights"),
        pytest.param(tools.InsistsOnHalf, {}, BF16, id="bf16 only"),
    ],
)
def test_right_models_keep_every_freedom(pool: Pool, make: Any, changes: dict[str, Any], setting: Setting) -> None:
    assert _run(pool, make, setting, **changes).freedoms == ALL


def test_every_size_of_the_world_is_checked(pool: Pool) -> None:
    answer = _run(pool, tools.Language, Setting(sp_sizes=(1, 2, 4)), world_size=4, num_heads=4)
    assert answer.freedoms == Freedoms(exact_shapes=False, sp_sizes=(1, 2, 4), recompute=True)
    answer = _run(pool, tools.LocalPositions, Setting(sp_sizes=(1, 2, 4)), world_size=4, num_heads=4)
    assert answer.freedoms is not None
    assert answer.freedoms.sp_sizes == (1,)
    assert "2 ranks instead of one" in answer.freedoms.messages[0]
    assert "4 ranks instead of one" in answer.freedoms.messages[0]


def test_one_size_can_fail_alone(pool: Pool) -> None:
    """Four ranks cannot share six heads; two can."""
    answer = _run(pool, tools.Language, Setting(sp_sizes=(1, 2, 4)), world_size=4)
    assert answer.freedoms is not None
    assert answer.freedoms.sp_sizes == (1, 2)
    assert "cannot be shared by p = 4 ranks" in answer.freedoms.messages[0]
    assert "'model.layers.0.attention' (SelfAttention)" in answer.freedoms.messages[0]


def test_samples_without_a_label_are_passed_over(pool: Pool) -> None:
    """Short samples often consist of a prompt alone, which trains nothing."""
    shapes = ((4,), (5,), (5,), (9,))
    setting = Setting(sample_ids=(1, 2, 3, 4), shapes=shapes, unlabelled=(1,))
    answer = _run(pool, tools.LocalPositions, setting)
    assert answer.freedoms is not None
    assert answer.freedoms.sp_sizes == (1,)
    assert "samples (2, 4)" in answer.freedoms.messages[0]


def test_one_process(pool: Pool) -> None:
    answer = _run(pool, tools.Unmasked, Setting(sp_sizes=(1,)), world_size=1)
    assert answer.freedoms is not None
    assert (answer.freedoms.exact_shapes, answer.freedoms.sp_sizes) == (True, (1,))


# --- the wrong models ---


@pytest.mark.parametrize("setting", [Setting(), BF16])
def test_positions_from_the_local_length(pool: Pool, setting: Setting) -> None:
    """Wrong by 6e-4 only in a fresh model, below the rounding of bf16: huggingface/transformers#34242."""
    exact, sizes, recompute, text = _found(pool, tools.LocalPositions, setting)
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert "what training_step passes to 'model' (Transformer1D)" in text
    assert "position_ids" in text


def test_positions_hidden_by_autocast(pool: Pool) -> None:
    exact, sizes, recompute, _ = _found(pool, tools.Autocast)
    assert (exact, sizes, recompute) == (False, (1,), True)


def test_causal_mask_of_the_local_length(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.Stack, kind="local mask")
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert "attn_mask of shape (6, 6)" in text
    assert "an exchange that 'layers.0' (Mixer) asks for" in text


def test_attention_without_the_known_function(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.Stack, kind="eager")
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert "no call of torch.nn.functional.scaled_dot_product_attention" in text
    assert "what 'layers.0' (Mixer) passes to 'layers.0.out'" in text


def test_ranks_that_disagree_on_the_mask(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.Stack, kind="own choice")
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert "the ranks of a group disagree on an attention mask" in text
    assert "'layers.0' (Mixer)" in text


def test_attention_over_the_batch(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.Stack, kind="batch")
    assert (exact, sizes, recompute) == (True, (1,), True)
    assert text.count("what 'layers.0' (Mixer) passes to") == 2


def test_attention_over_features(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.Stack, kind="features")
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert "what 'layers.0' (Mixer) passes to 'layers.0.out'" in text


def test_convolution_over_tokens(pool: Pool) -> None:
    """huggingface/accelerate#4209: what cannot be divided is named, and training goes on without."""
    exact, sizes, recompute, text = _found(pool, tools.ConvStack)
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert "the output of 'front.convolution' (Conv1d)" in text


def test_full_attention_without_a_mask(pool: Pool) -> None:
    """Padding is seen; dividing the sequence is right all the same."""
    exact, sizes, recompute, text = _found(pool, tools.Unmasked)
    assert (exact, sizes, recompute) == (True, (1, 2), True)
    assert "what 'model.layers.0.attention' (SelfAttention) passes to" in text
    assert "attention_mask" in text


@pytest.mark.parametrize(
    ("make", "what"),
    [(tools.CountedTwice, "36 instead of 18"), (tools.SummedTwice, "changes the gradient of 34 of 34 parameters")],
)
def test_replicated_loss_counted_by_every_rank(pool: Pool, make: Any, what: str) -> None:
    exact, sizes, recompute, text = _found(pool, make)
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert what in text
    assert "No module's input or output differs" in text


def test_mean_over_tokens(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.MeanStack)
    assert (exact, sizes, recompute) == (True, (1,), True)
    assert text.count("the output of 'front' (TokenMean)") == 2


def test_padding_that_is_no_number(pool: Pool) -> None:
    """Without padding sizes can be compared where they divide a length."""
    exact, sizes, recompute, text = _found(pool, tools.Poisoned, Setting(shapes=((12,), (6,))))
    assert (exact, sizes, recompute) == (True, (1, 2), True)
    assert "changes the gradient" in text
    exact, sizes, recompute, _ = _found(pool, tools.Poisoned, Setting(shapes=((11,), (5,))))
    assert (exact, sizes, recompute) == (True, (1,), True)


def test_shard_without_a_label(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.UnsafeMean)
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert "loss_sum" in text


def test_layers_that_change_when_they_run_again(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.ForgetfulStack)
    assert (exact, sizes, recompute) == (False, (1, 2), False)
    assert "what 'front.0' (Forgetful) passes to 'front.0.linear'" in text


def test_random_numbers_that_depend_on_the_plan(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.NoiseStack)
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert "the output of 'front' (Noise)" in text
    assert "rand_per_sample" in text


@pytest.mark.parametrize(("masked", "exact"), [(True, False), (False, True)])
def test_padding_of_two_axes(pool: Pool, masked: bool, exact: bool) -> None:
    setting = Setting(shapes=((3, 4), (5, 2)), sp_sizes=(1,))
    answer = _run(pool, tools.Video, setting, masked=masked)
    assert answer.freedoms is not None
    assert (answer.freedoms.exact_shapes, answer.freedoms.recompute) == (exact, True)


# --- what raises or cannot be compared ---


@pytest.mark.parametrize(
    ("make", "changes", "setting", "reason"),
    [
        (tools.Language, {}, Setting(unlabelled=(7, 3)), "have no item of the loss"),
        (tools.Scaled, {"factor": 0.0}, Setting(), "is exactly zero"),
        (tools.Detached, {}, Setting(), "is exactly zero"),
        (tools.Scaled, {"factor": float("inf")}, Setting(), "is not finite"),
    ],
)
def test_nothing_to_compare_is_said(
    pool: Pool, make: Any, changes: dict[str, Any], setting: Setting, reason: str
) -> None:
    exact, sizes, recompute, text = _found(pool, make, setting, **changes)
    assert (exact, sizes, recompute) == (False, (1, 2), True)
    assert "nothing could be checked" in text
    assert reason in text


def test_an_error_on_one_rank_keeps_no_rank_waiting(pool: Pool) -> None:
    exact, sizes, recompute, text = _found(pool, tools.RaisingStack, where="second rank")
    assert (exact, sizes, recompute) == (False, (1,), True)
    assert "ValueError in 'front': only here" in text


def test_an_error_in_the_padded_micro_batch(pool: Pool) -> None:
    """The sizes are then compared on one sample at a time."""
    exact, sizes, recompute, text = _found(pool, tools.RaisingStack, where="pair")
    assert (exact, sizes, recompute) == (True, (1, 2), True)
    assert "ValueError in 'front': here it is" in text


def test_an_error_in_every_case_is_raised_on_all_ranks(pool: Pool) -> None:
    answer = _run(pool, tools.RaisingStack, Setting(), where="always")
    assert answer.freedoms is None
    assert "ValueError in 'front': here it is" in answer.error


def test_a_step_that_writes_weights_is_refused(pool: Pool) -> None:
    answers = pool.run(tools.check, 2, tools.WritesWeights, Setting())
    assert all("model.head.weight" in answer.error for answer in answers)
    assert {key for answer in answers for key in answer.changed} <= {"parameter model.head.weight"}


def test_strict_raises_on_all_ranks(pool: Pool) -> None:
    answer = _run(pool, tools.LocalPositions, Setting(strict=True))
    assert answer.freedoms is None
    assert "sequence-parallel size" in answer.error
    assert _run(pool, tools.Language, Setting(strict=True)).freedoms == ALL
