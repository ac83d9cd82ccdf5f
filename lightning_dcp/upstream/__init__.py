"""Every private name of Lightning that we touch, with the reason; ``tests/test_upstream.py`` checks that they exist."""

from __future__ import annotations

from lightning_dcp.upstream.checkpoints import begin_average, put_below
from lightning_dcp.upstream.closure import check_closure, set_closure_loss, skip_zero_grad
from lightning_dcp.upstream.command_line import sort_types
from lightning_dcp.upstream.evaluation import around_evaluation, silent_writers
from lightning_dcp.upstream.launching import ForkLauncher, end_by_sigterm, is_interactive, notify_sigterm
from lightning_dcp.upstream.loaders import (
    check_given_loaders,
    convert_loaders,
    forget_train_loader,
    loaders_in,
    overrides_val,
    record_indices,
    train_loader,
)
from lightning_dcp.upstream.module import gives_first_weights_back, steps_pass_transfer_hooks
from lightning_dcp.upstream.results import (
    ListKind,
    LoggedAs,
    ResultCollection,
    count_as_updated,
    fill_lists,
    is_settled,
    kept_lists,
    last_value,
    logged_as,
    new_result,
    on_epoch_end,
    replace_results,
    results_of,
    settle,
    show,
    watched_at_step,
)
from lightning_dcp.upstream.step_values import forget_of_step, log_of_step, logged_by_user

__all__ = [
    "ForkLauncher",
    "ListKind",
    "LoggedAs",
    "ResultCollection",
    "around_evaluation",
    "begin_average",
    "check_closure",
    "check_given_loaders",
    "convert_loaders",
    "count_as_updated",
    "end_by_sigterm",
    "fill_lists",
    "forget_of_step",
    "forget_train_loader",
    "gives_first_weights_back",
    "is_interactive",
    "is_settled",
    "kept_lists",
    "last_value",
    "loaders_in",
    "log_of_step",
    "logged_as",
    "logged_by_user",
    "new_result",
    "notify_sigterm",
    "on_epoch_end",
    "overrides_val",
    "put_below",
    "record_indices",
    "replace_results",
    "results_of",
    "set_closure_loss",
    "settle",
    "show",
    "silent_writers",
    "skip_zero_grad",
    "sort_types",
    "steps_pass_transfer_hooks",
    "train_loader",
    "watched_at_step",
]
