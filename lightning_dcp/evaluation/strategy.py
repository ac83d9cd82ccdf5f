"""Validation, test and prediction under ``DCPStrategy``: one micro-batch at a time, each sample once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_dcp.checkpoint import Section
from lightning_dcp.cost import CostModel
from lightning_dcp.data.evaluation import (
    EvaluationItem,
    EvaluationLoader,
    MemoryRule,
    Place,
    SampleSource,
    evaluation_loaders,
)
from lightning_dcp.evaluation.datamodule import seed_of, warn_of_validation
from lightning_dcp.evaluation.evaluator import Evaluator
from lightning_dcp.evaluation.profiles import usable_profile
from lightning_dcp.memory import least_of_all, memory_bytes
from lightning_dcp.preparation import Settings, chosen_sizes, loss_settings
from lightning_dcp.profile import Profile
from lightning_dcp.running import RunningStrategy
from lightning_dcp.selfcheck import Freedoms
from lightning_dcp.sequence_parallel.context import SPGroup
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.topology import World
from lightning_dcp.upstream import (
    around_evaluation,
    convert_loaders,
    loaders_in,
    record_indices,
    steps_pass_transfer_hooks,
)

STEPS = {"val": "validation_step", "test": "test_step", "predict": "predict_step"}


class EvaluatingStrategy(RunningStrategy):
    """Gives validation, test and prediction each sample once, on groups as small as memory allows.

    Args:
        settings: the strategy's own arguments.
        kwargs: as in Lightning's ``DeepSpeedStrategy``.
    """

    def __init__(self, settings: Settings, **kwargs: Any) -> None:
        super().__init__(settings=settings, **kwargs)
        self._evaluator: Evaluator | None = None
        self._place: Place | None = None
        self._evaluation_groups: ProcessGroups | None = None
        self._known_profile: Profile | None = None
        self._known_freedoms: Freedoms | None = None

    # --- set up -------------------------------------------------------------------------------------------------

    def connect(self, model: pl.LightningModule) -> None:
        """Stand between the user's loaders and the Trainer's loops, before the Trainer asks whether there are any."""
        super().connect(model)
        convert_loaders(model.trainer, self._convert)

    def _convert(self, ask: Callable[[], Any], hook: str) -> Any:
        """What the Trainer's loops run over in the place of what ``ask`` gets from a user's hook."""
        assert self.lightning_module is not None
        stage = hook.removesuffix("_dataloader")
        step = getattr(self.lightning_module, STEPS[stage])
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                f"{STEPS[stage]}(dataloader_iter) together with DCPStrategy: only {STEPS[stage]}(batch, batch_idx, "
                "dataloader_idx) is allowed, since each batch is moved, sharded and weighted before it. Take the batch"
            )
        place = self._evaluation_place(stage)
        found = evaluation_loaders(loaders_in(ask(), self.world_size), place)
        for loader in _leaves(found):
            if place.predicting:
                record_indices(loader)
            if isinstance(loader.source, SampleSource) and self._evaluation_groups is not None:
                self._evaluation_groups.ensure(loader.source.sp_sizes)
        return found

    def setup(self, trainer: pl.Trainer) -> None:
        """Build the engine, and what opens the items of an evaluation."""
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        self._before_transfer = self._hooks.enter_context(steps_pass_transfer_hooks(module))
        self._evaluator = Evaluator(
            module=module,
            trainer=trainer,
            group_of=self._evaluation_group,
            transfer=self._transfer,
            seed=seed_of(trainer),
            loss=loss_settings(self._settings.loss, getattr(trainer, "datamodule", None)),
        )
        self._hooks.enter_context(around_evaluation(trainer, self._evaluator.around))
        if trainer.state.fn == TrainerFn.FITTING:
            warn_of_validation(trainer, module)

    def _forget(self) -> None:
        self._known_profile = self._profile or self._known_profile
        if self._prepared is not None:
            self._known_freedoms = self._prepared.freedoms
        self._place = self._evaluation_groups = self._evaluator = None
        super()._forget()

    def teardown(self) -> None:
        """Destroy the groups of an evaluation on its own, after an orderly end."""
        if self._prepared is None:
            self._close(self._evaluation_groups)
        super().teardown()

    # --- where items are evaluated ------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; its profile also says what fits the memory when the weights are only evaluated."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if not self._is_fitting() and Section.KEY in checkpoint:
            with suppress(MisconfigurationException):  # a damaged part does not touch the weights
                self._known_profile = Section.from_dict(checkpoint[Section.KEY]).profile
        return checkpoint

    def _evaluation_place(self, stage: str) -> Place:
        """What loaders have to know; the first call of a run is made by every rank."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._place is None:
            world, rule = self._of_fit() if self._prepared is not None else self._standalone()
            self._place = Place(rank=self.global_rank, world=world, rule=rule, seed=seed_of(trainer))
        fitting = trainer.state.fn == TrainerFn.FITTING
        return Place(
            rank=self._place.rank,
            world=self._place.world,
            rule=self._place.rule,
            seed=self._place.seed,
            in_order=fitting and bool(trainer.overfit_batches),  # type: ignore[attr-defined]
            predicting=stage == "predict",
        )

    def _of_fit(self) -> tuple[World, MemoryRule | None]:
        assert self._prepared is not None
        limits, groups = self._prepared.limits, self._prepared.groups
        context = self._prepared.planning(self.global_rank, self.profile)
        self._evaluation_groups = groups
        return context.world, MemoryRule(
            cost=context.cost, memory_bytes=limits.memory_bytes, exact_shapes=limits.exact_shapes
        )

    def _standalone(self) -> tuple[World, MemoryRule | None]:
        """Without a fit: by a profile that is at hand for this model, else on single ranks."""
        settings, single = self._settings, World.build(self.world_size, [1], self.num_processes)
        trainer = self._need(self.lightning_module, "lightning_module").trainer
        profile = usable_profile(settings, self._known_profile, trainer, self.root_device)
        if profile is None:
            return single, None
        cost, checked = CostModel(profile), self._known_freedoms
        legal = [p for p in cost.sp_sizes if p <= self.world_size and (checked is None or p in checked.sp_sizes)]
        sizes = chosen_sizes(legal, settings.sp_sizes)
        limit = least_of_all(
            memory_bytes(settings.memory_limit, self.root_device, self.num_processes), self.root_device
        )
        if 1 not in cost.sp_sizes:
            return single, None
        world = World.build(self.world_size, sizes, self.num_processes)
        self._evaluation_groups = ProcessGroups(world.blocks, timeout=self._timeout, device=self.root_device)
        exact_shapes = checked is not None and checked.exact_shapes
        return world, MemoryRule(cost=cost, memory_bytes=limit, exact_shapes=exact_shapes)

    def _evaluation_group(self, first_rank: int, sp_size: int) -> SPGroup:
        if sp_size == 1:
            return SPGroup(ranks=(self.global_rank,))
        assert self._evaluation_groups is not None
        return self._evaluation_groups.of(first_rank, sp_size)

    # --- items --------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Turn an item into what hooks and steps get; anything else goes to the device as it is."""
        if isinstance(batch, EvaluationItem) and self._evaluator is not None:
            return self._evaluator.shard(batch, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _transfer(self, data: Any, dataloader_idx: int = 0) -> Any:
        """Move one collated micro-batch, with the users' hooks and the precision's conversion."""
        moved = self._before_transfer(self.precision_plugin.convert_input(data), dataloader_idx)
        return super().batch_to_device(moved, self.root_device, dataloader_idx)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``validation_step`` on this rank's part of the item."""
        run = super().validation_step
        return self._opened().step(lambda: run(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``test_step`` on this rank's part of the item."""
        run = super().test_step
        return self._opened().step(lambda: run(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``predict_step`` on this rank's part of the item."""
        run = super().predict_step
        return self._opened().predict(lambda: run(*args, **kwargs))

    def _opened(self) -> Evaluator:
        return self._need(self._evaluator, "evaluator")


def _leaves(loaders: Any) -> list[EvaluationLoader]:
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, list):
        return [leaf for loader in loaders for leaf in _leaves(loader)]
    return [loaders] if isinstance(loaders, EvaluationLoader) else []
