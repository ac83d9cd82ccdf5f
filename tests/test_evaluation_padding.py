"""Own evaluation loaders with torch's default collate are padded, as the train loader beside them is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dcp.data.evaluation.padding import collate_of
from tests.evaluating import CASE, collate_numbered, dcp_trainer, numbered
from tests.fitting import make_trainer
from tests.pool import Pool
from tests.takeover_tools import NoLengths, Taken


class Validated(Taken):
    """Keeps the keys of its batches."""

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.keys = sorted(batch)
        values_BS, mask_BS = self.values(batch)
        self.log("val_loss", values_BS[mask_BS].mean(), sync_dist=True)


def _fit(told: bool) -> tuple[float, list[str]]:
    data = numbered(CASE, 7)
    dataset: Any = data if told else NoLengths(data)
    module = Validated(CASE)
    trainer = dcp_trainer(CASE, 2, limit_train_batches=1, num_sanity_val_steps=0)
    trainer.validate(module, DataLoader(dataset, batch_size=2), verbose=False)
    found = float(trainer.callback_metrics["val_loss"])
    trainer.fit(module, DataLoader(dataset, batch_size=2), DataLoader(dataset, batch_size=2))
    return found, module.keys


@pytest.mark.feature("Data", "torch's default collate, padded", "in training and evaluation")
def test_default_collate_pads_in_evaluation_as_in_training(pool: Pool) -> None:
    """The train loader was padded, and the same loader in validation raised torch's error about stacking."""
    expected = make_trainer("auto", CASE, devices=1).validate(
        Validated(CASE), DataLoader(numbered(CASE, 7), batch_size=7, collate_fn=collate_numbered), verbose=False
    )[0]["val_loss"]
    for told in (True, False):
        for found, keys in pool.run(_fit, 2, told):
            assert abs(found - expected) < 1e-5
            assert "attention_mask" in keys or not told


def test_what_default_collate_can_stack_is_left_to_it() -> None:
    equal = [{"input_ids": torch.arange(3), "labels": torch.arange(3)} for _ in range(4)]
    assert set(collate_of(DataLoader(equal))(equal[:2])) == {"input_ids", "labels"}  # type: ignore[arg-type]
    pairs: Any = [(torch.zeros(2, 2), 1), (torch.ones(2, 2), 0)]
    image, label = collate_of(DataLoader(pairs))(pairs)
    assert image.shape == (2, 2, 2)
    assert label.tolist() == [1, 0]
    own = DataLoader(pairs, collate_fn=len)
    assert collate_of(own) is len
    bare: Any = [torch.arange(2), torch.arange(4)]
    padded = collate_of(DataLoader(bare))(bare)
    assert padded["input_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert padded["attention_mask"].tolist() == [[True, True, False, False], [True] * 4]
