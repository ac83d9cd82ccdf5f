"""Every private name of Lightning that we touch, with the reason; ``tests/test_upstream.py`` checks that they exist."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from signal import SIGKILL
from typing import Any, NamedTuple, Union, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint, ModelPruning
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_dcp.data.batch import DCPBatch
from lightning_dcp.data.evaluation import EvaluationItem, EvaluationLoader
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.module import DCPDataModule


def train_loader(trainer: pl.Trainer) -> DCPLoader | None:
    """The train loader before the Trainer asks for it; ``DCPDataModule`` gives the same object again then."""
    source = trainer.fit_loop._data_source
    loader = source.dataloader() if source.is_defined() else None
    return loader if isinstance(loader, DCPLoader) else None


def check_closure(closure: Any) -> None:
    """Refuse another closure than the Trainer's: its zero_grad could not be skipped, and gradients would be lost.

    Raises:
        MisconfigurationException: an override of ``optimizer_step`` wrapped or dropped it.
    """
    if not isinstance(closure, Closure):
        raise MisconfigurationException(
            f"optimizer.step() got the closure {closure!r}; allowed is the optimizer_closure that the Trainer hands to "
            "LightningModule.optimizer_step, as it is, since it runs once for each micro-batch. In the override call "
            "optimizer.step(closure=optimizer_closure)"
        )


def skip_zero_grad(closure: Any) -> None:
    """Make a replayed closure keep the gradients of the micro-batches before it.

    The closure runs step, zero_grad, backward. ``optimizer.zero_grad`` must run at the first micro-batch only;
    Lightning decides that by a modulo of the batch index, which cannot express a number that changes every step.
    """
    closure._zero_grad_fn = None


def set_closure_loss(closure: Any, loss: Tensor) -> None:
    """Let ``outputs["loss"]`` of ``on_train_batch_end`` be the step's mean instead of the last micro-batch's loss."""
    closure._result.loss = loss


ResultCollection = _ResultCollection
"""What ``self.log`` writes to; it weights by a batch size that it guesses, and counts a value when it is logged."""


ListKind = tuple[torch.dtype, tuple[int, ...]]
"""Element type of a list of tensors that a torchmetrics object keeps, and the shape behind the first axis."""


def kept_lists(metric: Any) -> dict[str, ListKind]:
    """The lists of values that a torchmetrics object keeps and has something in, to be gathered over the ranks."""
    lists = {
        name: getattr(metric, name) for name, default in metric._defaults.items() if isinstance(default, list)
    }
    return {name: (kept[0].dtype, tuple(kept[0].shape[1:])) for name, kept in lists.items() if kept}


def fill_lists(metric: Any, kinds: dict[str, ListKind]) -> None:
    """Put an empty tensor of the right kind into empty lists.

    torchmetrics sends an empty float32 tensor for an empty list. Where the others send integers, gloo ends the process.
    """
    for name, (dtype, shape) in kinds.items():
        kept = getattr(metric, name)
        if isinstance(kept, list) and not kept:
            kept.append(torch.empty(0, *shape, dtype=dtype, device=metric.device))


class LoggedAs(NamedTuple):
    """The arguments of ``self.log`` that must be the same at every call of a key; plain values, to be sent."""

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduction: str
    enable_graph: bool
    add_dataloader_idx: bool
    dataloader_idx: int | None
    metric_attribute: str | None
    sync_dist: bool

    def described(self, is_metric: bool) -> str:
        """As a user wrote it."""
        names = ("on_step", "on_epoch", "prog_bar", "logger", "sync_dist")
        text = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"{text}, reduce_fx={self.reduction!r}, {'a metric' if is_metric else 'a value'} in {self.fx}"


def logged_as(meta: Any) -> LoggedAs:
    """What a key was logged with, out of Lightning's own record of it."""
    return LoggedAs(
        fx=meta.fx,
        name=meta.name,
        prog_bar=meta.prog_bar,
        logger=meta.logger,
        on_step=meta.on_step,
        on_epoch=meta.on_epoch,
        reduction=meta.reduce_fx.__name__,
        enable_graph=meta.enable_graph,
        add_dataloader_idx=meta.add_dataloader_idx,
        dataloader_idx=meta.dataloader_idx,
        metric_attribute=meta.metric_attribute,
        sync_dist=meta.sync.should,
    )


def new_result(arguments: LoggedAs, trainer: pl.Trainer, *, is_tensor: bool) -> Any:
    """An empty result, as Lightning would make it at the first call of ``self.log`` with these arguments."""
    plain = arguments._asdict()
    sync_dist, reduction = plain.pop("sync_dist"), plain.pop("reduction")
    meta = _Metadata(**plain, reduce_fx=reduction)
    meta.sync = _Sync(_should=sync_dist, fn=trainer.strategy.reduce)
    return _ResultMetric(meta, is_tensor)


def watched_at_step(trainer: pl.Trainer) -> frozenset[str]:
    """Keys that a callback or a schedule reads after the running optimizer step; the same on all ranks."""
    step = trainer.global_step + 1
    names = {
        callback.monitor
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
        and (callback._train_time_interval is not None or _is_due(step, callback._every_n_train_steps))
    }
    names |= {c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step"}
    return frozenset(name for name in names if name is not None)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def replace_results(trainer: pl.Trainer, kind: type[ResultCollection]) -> None:
    """Give every loop that logs another collection of results; the Trainer makes its own with the loops, once.

    Args:
        trainer: before its loops run.
        kind: class of the collections; where a loop has one already it is kept.
    """
    loops: tuple[Any, ...] = (
        trainer.fit_loop.epoch_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
    )
    for loop in loops:
        if not isinstance(loop._results, kind):
            loop._results = kind(training=loop._results.training)


def on_epoch_end(trainer: pl.Trainer, call: Callable[[pl.Trainer], None]) -> None:
    """Have something called on every rank when the steps of an epoch are done, before any hook reads their results.

    No hook of the strategy or of a callback stands there: callbacks before ours could read the results first.
    """
    connector = trainer._logger_connector
    if "epoch_end_reached" in vars(connector):
        return
    original = connector.epoch_end_reached

    def reached() -> None:
        original()
        call(trainer)

    connector.epoch_end_reached = reached  # type: ignore[method-assign]


def sort_types(parser: Any) -> None:
    """Put the types of a command line's settings into an order in which each can be reached.

    Of several types jsonargparse takes the first that a text can be read as:

    - ``--trainer.limit_val_batches=1`` means one batch. Lightning says ``Optional[Union[int, float]]``, but ``typing``
      keeps what it made of equal arguments, and unions are equal in any order: after an ``Optional[Union[float, int]]``
      elsewhere in Lightning the 1 is a 1.0, all batches.
    - ``--trainer.strategy=lightning_dcp.DCPStrategy`` means the class; ``Union[str, Strategy]`` makes a name of it.

    Args:
        parser: of jsonargparse, with its arguments added.
    """
    for action in parser._actions:
        types = get_args(getattr(action, "_typehint", None))
        if int in types and float in types and types.index(float) < types.index(int):
            action._typehint = Union[(int, float, *(t for t in types if t not in (int, float)))]
        if action.dest == "trainer.strategy" and str in types:
            action._typehint = Union[(*(t for t in types if t is not str), str)]


_OF_STEP = "DCPCallback"
"""What stands, in the Trainer's results, in the place of the hook that a value was logged in."""


def log_of_step(trainer: pl.Trainer, values: Mapping[str, float], bar: Container[str]) -> None:
    """Log values of a step, as ``self.log`` does with ``on_step=True``, in a hundredth of its time.

    ``self.log`` takes a third of a millisecond for each value. Its checks are made here for the first step only, and
    what it keeps is written to after that. Nothing is asked of a hook that it may be called in, and a user may log the
    same name in any hook.

    Args:
        trainer: in its training loop.
        values: finite numbers by key; they stay on the CPU.
        bar: keys that the progress bar shows.
    """
    results = trainer._results
    assert results is not None
    tensors = torch.tensor(list(values.values()), dtype=torch.float64).unbind()
    for name, value in zip(values, tensors, strict=True):
        metric = results.get(f"{_OF_STEP}.{name}")
        if metric is None:
            results.log(_OF_STEP, name, value, prog_bar=name in bar, on_step=True, on_epoch=False, batch_size=1)
        else:
            metric.forward(value, 1)
            metric.has_reset = False


def logged_by_user(trainer: pl.Trainer, name: str) -> bool:
    """Whether user code logs a key in the training loop."""
    results = trainer._results
    return results is not None and any(m.meta.name == name and m.meta.fx != _OF_STEP for m in results.values())


def forget_of_step(trainer: pl.Trainer, name: str) -> bool:
    """Log a key of :func:`log_of_step` no longer; whether it was logged."""
    results = trainer._results
    return results is not None and results.pop(f"{_OF_STEP}.{name}", None) is not None


Convert = Callable[[Callable[[], Any], str], Any]


class _ConvertedSource(_DataLoaderSource):
    """Where a loop of the Trainer gets its loaders, with a conversion behind it."""

    def __init__(self, source: _DataLoaderSource, convert: Convert) -> None:
        super().__init__(source.instance, source.name)
        self.convert = convert

    def dataloader(self) -> Any:
        """What the user gave or a hook returned, converted."""
        return self.convert(super().dataloader, self.name)

    def is_defined(self) -> bool:
        """Whether there are loaders, as far as that is known before the data module was set up.

        Every ``DCPDataModule`` has a ``val_dataloader``, which is no reason for the Trainer to miss a
        ``validation_step``; where a dataset is set, the strategy says so later.
        """
        module = self.instance
        if self.name != "val_dataloader" or not isinstance(module, DCPDataModule) or overrides_val(module):
            return super().is_defined()
        trainer = module.trainer
        return trainer is not None and is_overridden("validation_step", trainer.lightning_module)


def overrides_val(module: DCPDataModule) -> bool:
    """Whether a user's data module says itself what its validation loaders are."""
    return is_overridden("val_dataloader", module, parent=DCPDataModule)


def loaders_in(collection: Any, world_size: int) -> Any:
    """The loaders that a ``CombinedLoader`` holds; anything else as it is.

    Raises:
        MisconfigurationException: they are not gone through one after the other.
    """
    if not isinstance(collection, CombinedLoader):
        return collection
    if collection._mode != "sequential" and world_size > 1:
        raise MisconfigurationException(
            f"evaluation over CombinedLoader(mode={collection._mode!r}) on {world_size} ranks: only "
            'mode="sequential" is allowed, since each sample is evaluated on one rank and batches of several loaders '
            "would be cut in different places. Give a list of loaders, or use one device"
        )
    return collection.iterables if collection._mode == "sequential" else collection


def record_indices(loader: EvaluationLoader) -> None:
    """Let prediction writers see the indices: the Trainer reads them from a wrapper of its own class only."""
    loader.batch_sampler = _IndexBatchSamplerWrapper(loader.batch_sampler)


def convert_loaders(trainer: pl.Trainer, convert: Convert) -> None:
    """Put a conversion between the user's loaders and the Trainer's loops, for as long as the trainer lives.

    ``process_dataloader`` of a strategy would come too late: the Trainer has put a ``DistributedSampler`` in by then,
    which gives some samples twice.

    Args:
        trainer: with its data attached.
        convert: gets a function that asks for what the user gave or the hook returns, a loader or a collection of
            them, and the name of the hook (``"train_dataloader"``, ``"val_dataloader"``, ``"test_dataloader"``,
            ``"predict_dataloader"``).
    """
    for loop in (trainer.fit_loop, *_evaluation_loops(trainer), trainer.predict_loop):
        source = loop._data_source
        if isinstance(source, _ConvertedSource):
            source.convert = convert
        else:
            loop._data_source = _ConvertedSource(source, convert)


def check_given_loaders(trainer: pl.Trainer, check: Callable[[Any], None]) -> None:
    """Check the train loaders that were given to ``trainer.fit``; a hook may need ``setup``, which comes later.

    Args:
        trainer: with its data attached.
        check: gets the loaders.
    """
    source = trainer.fit_loop._data_source
    if trainer.state.fn == TrainerFn.FITTING and source.is_defined() and not source.is_module():
        check(source.instance)


def forget_train_loader(trainer: pl.Trainer) -> None:
    """Let the fit loop ask again for its loader, and for the number of its steps, before it begins."""
    trainer.fit_loop._combined_loader = None


def gives_first_weights_back(callback: ModelPruning) -> bool:
    """Whether pruning starts again from the first weights (lottery ticket hypothesis), which it sets by ``.data``."""
    return bool(callback._use_lottery_ticket_hypothesis)


@contextmanager
def steps_pass_transfer_hooks(module: pl.LightningModule) -> Iterator[Callable[[Any, int], Any]]:
    """Keep the Trainer from handing a whole step to ``on_before_batch_transfer``.

    The hook is written for one batch, and is called once per micro-batch just before its use. Yields the original
    bound method for that.
    """
    original = module._on_before_batch_transfer

    def before_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
        ours = isinstance(batch, DCPBatch | EvaluationItem)
        return batch if ours else original(batch, dataloader_idx)

    module.__dict__["_on_before_batch_transfer"] = before_transfer
    try:
        yield original
    finally:
        module.__dict__.pop("_on_before_batch_transfer", None)


def is_interactive() -> bool:
    """Whether the Trainer takes this for a notebook or another interactive session, where there is no script."""
    return bool(accelerator_connector._IS_INTERACTIVE)  # type: ignore[attr-defined]


class ForkLauncher(_MultiProcessingLauncher):
    """Runs the Trainer's functions in forked processes; weights and metrics come back from rank 0.

    Args:
        strategy: whose processes are started.
        leave: called before each fork; leaves the process group of an earlier fit in this process, of which the
            forked processes would have a dead copy.
    """

    def __init__(self, strategy: Any, leave: Callable[[], None]) -> None:
        super().__init__(strategy, start_method="fork")
        self._leave = leave

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Fork, run and join; where that is interrupted, no process goes on behind the notebook's back."""
        self._leave()
        try:
            return super().launch(function, *args, **kwargs)
        except BaseException:
            self.kill(SIGKILL)
            for process in self.procs:
                process.join()
            raise


def notify_sigterm(trainer: pl.Trainer, asked: Callable[[], bool]) -> None:
    """Take SIGTERM without Lightning's broadcast in the signal handler.

    Wherever the signal finds a rank, that broadcast meets another collective of the other ranks: they hang or die with
    an error about sizes. Call it before the Trainer registers its handlers.

    Args:
        trainer: whose handler is replaced.
        asked: called when the signal arrives; ``True`` where the strategy tells the other ranks, and ends the run with
            :func:`end_by_sigterm`. Otherwise this rank ends where Lightning looks next.
    """
    connector = trainer._signal_connector

    def notified(signum: int, _frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        if not asked():
            connector.received_sigterm = True

    connector._sigterm_notifier_fn = notified  # type: ignore[method-assign,assignment]


def end_by_sigterm(trainer: pl.Trainer) -> None:
    """Let the Trainer raise its ``SIGTERMException`` at the end of the batch; called by all ranks in the same one."""
    trainer._signal_connector.received_sigterm = True


def _evaluation_loops(trainer: pl.Trainer) -> tuple[Any, ...]:
    return trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop


Around = Callable[[Any, Callable[[], None]], bool]
"""Gets an item and what runs it with all hooks; says whether what was predicted counts."""


@contextmanager
def around_evaluation(trainer: pl.Trainer, around: Around) -> Iterator[None]:
    """Run something around each item of validation, test and prediction, with all its hooks and logging.

    No public hook encloses them: the module's own ``on_validation_batch_end`` comes after those of all callbacks.

    Args:
        trainer: whose loops.
        around: see :data:`Around`.
    """
    loops = dict.fromkeys(_evaluation_loops(trainer), "_evaluation_step")
    loops[trainer.predict_loop] = "_predict_step"
    for loop, name in loops.items():
        vars(loop)[name] = _enclosed(trainer, getattr(loop, name), around, name == "_predict_step")
    try:
        yield
    finally:
        for loop, name in loops.items():
            vars(loop).pop(name, None)


def _enclosed(
    trainer: pl.Trainer, step: Callable[..., None], around: Around, predicting: bool
) -> Callable[..., None]:
    def enclosed(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        def run() -> None:
            step(batch, batch_idx, dataloader_idx, dataloader_iter)

        if not predicting:
            around(batch, run)
            return
        loop = trainer.predict_loop
        kept = [values[dataloader_idx] for values in (loop._predictions, loop.epoch_batch_indices)]
        lengths = [len(values) for values in kept]
        if not around(batch, run):
            for values, length in zip(kept, lengths, strict=True):
                del values[length:]

    return enclosed


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """What is called in the place of a writer's hook."""


@contextmanager
def silent_writers(trainer: pl.Trainer) -> Iterator[None]:
    """Keep predictions that do not count from the writers that write by batch."""
    writers = [c for c in trainer.callbacks if isinstance(c, BasePredictionWriter)]  # type: ignore[attr-defined]
    for writer in writers:
        vars(writer)["on_predict_batch_end"] = _write_nothing
    try:
        yield
    finally:
        for writer in writers:
            vars(writer).pop("on_predict_batch_end", None)
