"""``DCPStrategy``: Lightning's DeepSpeed strategy, with a plan for every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_dcp.accumulation import StepExecutor
from lightning_dcp.agreement import Agreement
from lightning_dcp.callback import DCPCallback
from lightning_dcp.checkpoint import Section, plan_settings
from lightning_dcp.collectives import WorldCalls
from lightning_dcp.cost import RecomputePolicy
from lightning_dcp.data.alike import check_alike
from lightning_dcp.data.batch import DCPBatch
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.data.saved import SIZES
from lightning_dcp.data.takeover import TrainLoaders, check_given
from lightning_dcp.engine import ZeroEngine, build_config, check_config, read_config
from lightning_dcp.evaluation import EvaluatingStrategy
from lightning_dcp.execution import LossReduction, LossSettings
from lightning_dcp.logged import kept_logs
from lightning_dcp.logged_epoch import agree_on_step, take_over_results
from lightning_dcp.planners import Planner, create
from lightning_dcp.portable import StartMethod
from lightning_dcp.preparation import Settings, Site, prepare
from lightning_dcp.profile import Profile
from lightning_dcp.refusals import check_parameters, check_trainer, explained_optimizers
from lightning_dcp.sequence_parallel.context import LossWeighting
from lightning_dcp.upstream import (
    check_closure,
    check_given_loaders,
    forget_train_loader,
    set_closure_loss,
    skip_zero_grad,
    train_loader,
)
from lightning_dcp.watchdog import Watchdog


class DCPStrategy(EvaluatingStrategy):
    """Data-Centric Parallel on DeepSpeed ZeRO-1: every step runs by its own plan.

    The optimizer step is the one that a single process would do on the same samples, whatever the plan; only the
    time changes. Trains from a torch ``DataLoader``, or from a :class:`~lightning_dcp.data.DCPDataModule`.

    Args:
        planner: a name, such as ``"balanced"`` or ``"dcp-intra"``, or an object that satisfies
            ``lightning_dcp.planners.Planner``.
        sp_sizes: sequence-parallel sizes that plans may use beside 1; by default, of those that the heads and the world
            allow, the most that divide one another.
        max_batch_size: most samples in one micro-batch.
        max_tokens: most padded tokens of one micro-batch per rank.
        min_micro_batches: ``G_min`` of the paper (Appendix C).
        max_step_factor: ``G_max`` of the paper; planners that are given the step's samples ignore it.
        length_groups: lengths that the profile probes.
        recompute: ``"auto"`` recomputes as few layers as fit, ``"none"`` no layer, ``"full"`` every layer.
        layers: repeated layers by class, class name or path, where they are not found by themselves.
        memory_limit: share of the device's memory, or an amount such as ``"80GB"``, that no plan may pass.
        loss_weighting: the step's loss is the mean over tokens, or over samples of the mean over their tokens.
        loss_reduction: whether ``training_step`` returns a mean or a sum over the items of its batch.
        profile: a :class:`~lightning_dcp.profile.Profile`, or a file that it is kept in; by default it is measured in
            every ``setup()``.
        self_check: compare plans on two real samples before the first step; ``"strict"`` raises where a freedom
            has to be switched off.
        deepspeed_config: DeepSpeed settings, or a JSON file of them, laid over ours.
        start_method: ``"fork"`` for several processes in a notebook; ``"popen"`` runs the script once for each.
        accelerator: as in Lightning's ``DeepSpeedStrategy``; the Trainer sets it.
        parallel_devices: as in Lightning's ``DeepSpeedStrategy``; the Trainer sets them.
        cluster_environment: as in Lightning's ``DeepSpeedStrategy``.
        precision_plugin: as in Lightning's ``DeepSpeedStrategy``; the Trainer sets it.
        process_group_backend: as in Lightning's ``DeepSpeedStrategy``.
        timeout: longest time that a collective may take, after which the run ends with an error.

    Raises:
        ValueError: an argument is out of range; the message says what is allowed.
    """

    strategy_name = "dcp"

    def __init__(  # noqa: PLR0913 - what users set, by name
        self,
        planner: Planner | str = "balanced",
        *,
        sp_sizes: Sequence[int] | None = None,
        max_batch_size: int | None = None,
        max_tokens: int | None = None,
        min_micro_batches: int = 1,
        max_step_factor: float | None = None,
        length_groups: int = 6,
        recompute: RecomputePolicy = "auto",
        layers: Sequence[str] | None = None,
        memory_limit: float | str = 0.9,
        loss_weighting: LossWeighting = "token",
        loss_reduction: LossReduction = "mean",
        profile: Profile | str | Path | None = None,
        self_check: bool | Literal["strict"] = True,
        deepspeed_config: dict[str, Any] | str | Path | None = None,
        start_method: StartMethod = "popen",
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
    ) -> None:
        settings = Settings(
            planner=create(planner),
            sp_sizes=_as_tuple("sp_sizes", sp_sizes),
            max_batch_size=max_batch_size,
            max_tokens=max_tokens,
            min_micro_batches=min_micro_batches,
            max_step_factor=max_step_factor,
            length_groups=length_groups,
            recompute=recompute,
            layers=_as_tuple("layers", layers),
            memory_limit=memory_limit,
            profile=profile,
            self_check=self_check,
            loss=LossSettings(weighting=loss_weighting, reduction=loss_reduction),
        )
        self._user_config = read_config(deepspeed_config)
        check_config(self._user_config)
        super().__init__(
            settings=settings,
            start_method=start_method,
            accelerator=accelerator,
            stage=1,
            config={},  # replaced in setup(), when the model and the precision are known
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._train_loaders = TrainLoaders()

    # --- setup --------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Refuse what cannot work, then join the process group."""
        module = self._need(self.lightning_module, "lightning_module")
        check_trainer(module.trainer, module)
        callbacks: list[pl.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, DCPCallback) for callback in callbacks):
            callbacks.insert(0, DCPCallback())
        take_over_results(module.trainer)
        self._train_loaders.begin()
        check_given_loaders(module.trainer, check_given)
        super().setup_environment()

    def _convert(self, ask: Callable[[], Any], hook: str) -> Any:
        """What the Trainer's loops run over in the place of what a user's hook returned."""
        if hook != "train_dataloader":
            return super()._convert(ask, hook)
        return self._train_loaders(ask, self._need(self.lightning_module, "lightning_module").trainer)

    def setup(self, trainer: pl.Trainer) -> None:
        """Build the engine; when fitting, also groups, self-check, profile and the loader's planner."""
        module = self._need(self.lightning_module, "lightning_module")
        self._forget()
        self.config = build_config(
            self._user_config,
            num_parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
            half=str(trainer.precision).startswith("bf16"),
        )
        self._config_initialized = False
        check_parameters(module)
        with explained_optimizers():
            super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # Not by fit_loop.setup_data(): it would read the first step of a loader without a length.
            if self._loader is None:
                self._loader = train_loader(trainer)
            self._setup_steps(trainer, self._need_loader())

    def _setup_steps(self, trainer: pl.Trainer, loader: DCPLoader) -> None:
        check_alike(loader, self.world_size)
        engine = ZeroEngine(self.deepspeed_engine)
        site = Site(
            rank=self.global_rank,
            world_size=self.world_size,
            ranks_per_node=self.num_processes,
            device=self.root_device,
            precision=str(trainer.precision),
            timeout=self._timeout,
        )
        settings = self.resumed_settings(self._settings, site, engine.module, loader.shapes)
        self.world_calls = WorldCalls(self.world_size)
        self._prepared = prepare(settings, site, engine.module, loader, self._transfer, self.world_calls)
        self._bind(loader, self._prepared.profile)
        self._executor = StepExecutor(
            runner=self._prepared.runner,
            engine=engine,
            agreement=Agreement(self.world_size, self.root_device),
            transfer=self._transfer,
            rank=self.global_rank,
            device=self.root_device,
            waited=lambda: loader.waited_seconds,
        )
        if self.is_global_zero:
            loader.list_left_out(trainer.default_root_dir)
        if self.world_size > 1 and self._timeout is not None:
            watchdog = Watchdog(self._executor.where, self._timeout, self.world_size)
            self._executor.watchdog = self._hooks.enter_context(watchdog.watching())
        if self._resumed is not None:
            loader.load_state_dict(self._resumed.loader)
            self._name_changed_steps(self._resumed)
        # A schedule may have asked for the length of an epoch before it was known what is left out and resumed.
        forget_train_loader(trainer)

    def _name_changed_steps(self, section: Section) -> None:
        """Say that a planner that draws will make other steps than it would have in the run of the checkpoint."""
        then = section.settings, section.profile, section.world_size
        drawn = self.planner.draws and all(section.loader.get(name) is None for name in SIZES)
        if drawn and then != (plan_settings(self._settings), self.profile, self.world_size):
            rank_zero_warn(
                f'planner "{self.planner.name}" draws the samples of each step by settings, profile and number of '
                "ranks, which are not those of the checkpoint: the rest of the epoch is trained, each sample once, but "
                "in other steps than without the interruption"
            )

    def process_dataloader(self, dataloader: object) -> object:
        """Take note of the train loader; loaders of evaluation pass."""
        dataloader = super().process_dataloader(dataloader)
        if isinstance(dataloader, DCPLoader):
            # Not only when it is bound: a schedule asks for the length of an epoch before there is a profile.
            dataloader.announce(self.planner)
            self._loader = dataloader
            if self._profile is not None:  # reloaded
                check_alike(dataloader, self.world_size)
                self._bind(dataloader, self._profile)
        return dataloader

    def _bind(self, loader: DCPLoader, profile: Profile) -> None:
        self._profile = profile
        loader.bind(self._need(self._prepared, "planner").planning(self.global_rank, profile))

    # --- steps --------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Leave a whole step where it is: each micro-batch is moved just before its use."""
        if isinstance(batch, DCPBatch):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Remember the step that the closure is going to run."""
        super().on_train_batch_start(batch, batch_idx)
        self._item = batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step`` on the current micro-batch's shard."""
        run = super().training_step
        return self._need(self._executor, "training_step").training_step(
            lambda shard: run(shard, *args[1:], **kwargs)
        )

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Replay the closure for every micro-batch, then reduce once and step once."""
        check_closure(closure)
        item: DCPBatch = self._need(self._item, "step")
        result = super().optimizer_step(optimizer, lambda: self._accumulate(item, closure), model, **kwargs)
        self.clock.updated()
        loader = self._need_loader()
        loader.mark_consumed(item)
        self._last_step = replace(self.last_step, stray=loader.stray.mean, stray_max=loader.stray.maximum)
        self._stop_if_agreed()
        return result

    def _accumulate(self, item: DCPBatch, closure: Callable[[], Any]) -> torch.Tensor:
        trainer = self._need(self.lightning_module, "lightning_module").trainer
        executor = self._need(self._executor, "step")
        with kept_logs(trainer, self.world_calls.refuse_log) as results:
            kept = self._need(results.kept, "step")

            def run(index: int) -> None:
                results.part = index
                if index:
                    skip_zero_grad(closure)
                closure()

            self._last_step = executor.run(item, run)
        results.count_step(kept, executor.counts, self._last_step.count)
        agree_on_step(trainer)
        loss = torch.tensor(self._last_step.loss)
        set_closure_loss(closure, loss)
        return loss

    # --- checkpoints --------------------------------------------------------------------------------------------

    def checkpoint_section(self) -> Section | None:
        """The position in the data, the profile and the settings, so that a resumed run continues bit-equal."""
        if self._loader is None or self._profile is None:
            return None
        return Section(
            world_size=self.world_size,
            profile=self._profile,
            settings=plan_settings(self._settings),
            loader=self._loader.state_dict(),
        )

    def teardown(self) -> None:
        """Give the module back as it was, and stop the loader's workers."""
        self._hooks.close()
        if self._loader is not None:
            self._loader.close()
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="dcp")`` work, and the names for notebooks."""
        names = {cls.strategy_name: "popen", "dcp_notebook": "fork", "dcp_fork": "fork"}
        for name, start_method in names.items():
            if name not in strategy_registry:
                text = f"Data-Centric Parallel on DeepSpeed ZeRO-1, processes by {start_method}"
                strategy_registry.register(name, cls, description=text, start_method=start_method)


def _as_tuple(name: str, values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """A list argument; text is a sequence too, and would be taken apart into letters."""
    if isinstance(values, str) or not isinstance(values, Sequence | None):
        raise ValueError(f"{name} is {values!r}; allowed are a list, or None")
    return None if values is None else tuple(values)


DCPStrategy.register_strategies(StrategyRegistry)
