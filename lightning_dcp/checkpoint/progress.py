"""Where the Trainer's loops say that a run stands, brought in line with where its data stand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Progress = dict[str, Any]


def resumable(checkpoint: Mapping[str, Any], loader: Mapping[str, Any] | None) -> dict[str, Any]:
    """A checkpoint whose loops resume where the data stand, whether the resumed fit ends by steps or by epochs.

    - The position in the data stands in our section. Lightning's own copy of it is left out, as a run under
      another strategy has a loader that takes no state, and Lightning would refuse the file.
    - A fit that was stopped within an epoch (``max_steps``, ``max_time``, early stopping) counts the epoch as done
      when it ends. Resumed so, the rest of the epoch would never be trained: it is counted as running instead.
    - Behind the last batch of an epoch Lightning goes on with the next one without counting that it began, and
      without ``on_train_epoch_start``. A file of that run would have the wrong epoch: the epoch counts as ended.
    - Behind the end of an epoch the count of its batches is still there. A fit with ``max_steps`` would go on
      counting and end the next epoch after its first batch: the count is set to zero.

    Args:
        checkpoint: as the Trainer made it; not changed. One without loops, made by hand, has nothing to bring in line.
        loader: state of the train loader; ``None`` for the checkpoint of another strategy.
    """
    if "loops" not in checkpoint:
        return dict(checkpoint)
    loops = copy.deepcopy(checkpoint["loops"])
    fit: Progress = loops["fit_loop"]
    changed = {**checkpoint, "loops": loops}
    epoch, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    if _behind_last_batch(epoch["total"], batches):
        for progress in epoch.values():
            progress["processed"] = progress["started"]
        batches["total"]["completed"] = batches["total"]["processed"]
    ended = epoch["total"]["processed"] == epoch["total"]["started"] > 0
    if ended and batches["is_last_batch"]:
        for progress in epoch.values():
            progress["completed"] = progress["processed"]
        batches["is_last_batch"] = False
        for name in ("batch_progress", "scheduler_progress", "automatic_optimization.optim_progress"):
            _forget_current(fit[f"epoch_loop.{name}"])
        _clear(fit["epoch_loop.val_loop.batch_progress"]["total"])
    elif ended and loader is not None and _within_epoch(loader):
        for progress in epoch.values():
            progress["processed"] = progress["completed"] = progress["started"] - 1
        changed["epoch"] = epoch["current"]["processed"]
    if loader is not None:
        fit["state_dict"].pop("combined_loader", None)
    return changed


def _behind_last_batch(epoch: Progress, batches: Progress) -> bool:
    """Whether the last batch of an epoch is trained, and neither a validation nor the epoch's end has followed."""
    total = batches["total"]
    trained = total["ready"] == total["processed"] == total["completed"] + 1
    return bool(batches["is_last_batch"] and trained and epoch["processed"] == epoch["started"] - 1)


def _within_epoch(loader: Mapping[str, Any]) -> bool:
    """Whether some samples of the epoch are consumed and some are not."""
    consumed = loader["position"] + len(loader["beyond"])
    # States from before users' samplers could be taken over say nothing of the epoch: it has each sample once.
    return bool(0 < consumed < loader.get("epoch_samples", loader["num_samples"]))


def _forget_current(progress: Progress) -> None:
    for name, value in progress.items():
        if name == "current":
            _clear(value)
        elif isinstance(value, dict) and name != "total":
            _forget_current(value)


def _clear(counts: Progress) -> None:
    counts.update(dict.fromkeys(counts, 0))
