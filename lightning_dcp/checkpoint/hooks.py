"""The checkpoint hooks of the strategy: one ordinary Lightning file, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_dcp.agreement import raise_together
from lightning_dcp.checkpoint.averaging import adapt_averaging
from lightning_dcp.checkpoint.files import AtomicCheckpointIO
from lightning_dcp.checkpoint.gathering import Route
from lightning_dcp.checkpoint.meeting import Meeting
from lightning_dcp.checkpoint.optimizer_state import load_state, whole_state
from lightning_dcp.checkpoint.progress import resumable
from lightning_dcp.checkpoint.randomness import random_state, restore_random_state
from lightning_dcp.checkpoint.refusals import check_optimizer, names_of_groups
from lightning_dcp.checkpoint.same import check_same
from lightning_dcp.checkpoint.section import Section, resumed_profile, warn_of_changes
from lightning_dcp.checkpoint.shards import Shards
from lightning_dcp.checkpoint.weights import load_masters, whole_weights
from lightning_dcp.cost import IntArray
from lightning_dcp.portable import PortableDeepSpeedStrategy
from lightning_dcp.preparation import Settings, Site
from lightning_dcp.profile import Profile
from lightning_dcp.profiling.store import profile_identity, same_for_all
from lightning_dcp.recompute import RecomputeSwitch, find_families
from lightning_dcp.upstream import put_below


class CheckpointedStrategy(PortableDeepSpeedStrategy):
    """Saves whole weights and optimizer state by name into one file, and resumes from it on any number of ranks.

    Every rank has to call what saves. Rank 0 collects the parts and writes; no other rank holds more than its own.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._resumed: Section | None = None
        self._last_section: Section | None = None
        self._group_names: list[list[str]] | None = None
        self._meeting: Meeting | None = None

    # --- what a subclass says of itself -------------------------------------------------------------------------

    def checkpoint_section(self) -> Section | None:
        """What of the run goes into a checkpoint beside weights and optimizer; ``None`` outside of a fit."""
        return None

    def saving_is_refused(self) -> bool:
        """Whether nothing can be saved now, and somebody else raises the error."""
        return False

    # --- set up -------------------------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads files: the user's plugin, or a writer whose files appear whole or not at all."""
        plugin = self._checkpoint_io
        if plugin is None:
            plugin = self._checkpoint_io = AtomicCheckpointIO()
        else:
            put_below(plugin, AtomicCheckpointIO)
        return plugin

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO) -> None:
        self._checkpoint_io = plugin

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are whole, so they are loaded into the module before the engine is built over it."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The Trainer hands the saved optimizer state to :meth:`load_optimizer_state_dict`."""
        return True

    def setup_environment(self) -> None:
        """Join the process group, and make averaging callbacks fit."""
        module = self.lightning_module
        assert module is not None
        adapt_averaging(module.trainer.callbacks, module)  # type: ignore[attr-defined]
        self._resumed = None
        if self._is_fitting():
            self._last_section = None
        super().setup_environment()
        self._meeting = Meeting(self.global_rank, self.world_size, self._timeout)

    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        optimizer, schedule = super()._init_optimizers()
        assert self.lightning_module is not None
        self._group_names = names_of_groups(optimizer, self.lightning_module)
        check_optimizer(optimizer)
        return optimizer, schedule

    # --- saving -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights, float32 where the optimizer keeps them so; called by every rank, see :func:`whole_weights`.

        Raises:
            LonelyCallError: some ranks did not call it.
        """
        if not self._meets("saving a checkpoint"):
            return {}
        assert self.lightning_module is not None
        return whole_weights(self.lightning_module, self._shards(), self._route)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole optimizer state by parameter name; called by every rank, see :func:`whole_state`.

        Raises:
            LonelyCallError: some ranks did not call it.
            MisconfigurationException: the optimizer's state cannot be divided by parameter.
        """
        shards = self._shards()
        if shards is None:
            return super().optimizer_state(optimizer)
        if not self._meets("saving the optimizer's state"):
            return {}
        return whole_state(shards, self._names(shards), self._route)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank 0, with the run's own section; called by every rank.

        Raises:
            LonelyCallError: some ranks did not call it.
            OSError: on rank 0, the file cannot be written; ``StepError`` with the same sentence elsewhere.
        """
        if not self._meets("saving a checkpoint"):
            return
        section = self.checkpoint_section() or self._last_section
        if section is not None:
            section = replace(section, random=self._gathered(random_state()))
            checkpoint = {**resumable(checkpoint, section.loader), Section.KEY: section.to_dict()}
        error = None
        if self.is_global_zero:
            try:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            except Exception as raised:
                error = raised
        raise_together(error, self.world_size, f"writing {filepath}")

    def _meets(self, doing: str) -> bool:
        if self.saving_is_refused():
            return False
        if self._meeting is not None:
            self._meeting.wait(doing)
        return True

    def _gathered(self, value: Any) -> list[Any]:
        """The value of each rank, on rank 0; one gather, called by every rank."""
        if self.world_size == 1:
            return [value]
        everyone = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(value, everyone, dst=0)
        return everyone or []

    @property
    def _route(self) -> Route:
        return Route(rank=self.global_rank, world_size=self.world_size, device=self.root_device)

    def _shards(self) -> Shards | None:
        # Not from the engine: after a fit there may be one for evaluation, and the shards are those of the fit.
        assert self.lightning_module is not None
        return Shards(self.optimizers[0], self.lightning_module) if self.optimizers else None

    def _names(self, shards: Shards) -> list[list[str]]:
        # Where the optimizer comes from the DeepSpeed configuration, it has the trainable parameters.
        return self._group_names or [list(shard.parameters) for shard in shards.groups]

    # --- resuming -----------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; called by every rank, before ``setup``.

        Raises:
            FileNotFoundError, MisconfigurationException: there is no such file, it is no checkpoint of one file, or
                the ranks have read different ones.
            StepError: another rank could not read it.
        """
        checkpoint: dict[str, Any] = {}
        error = None
        self._resumed = None
        try:
            checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
            if self._is_fitting() and Section.KEY in checkpoint:
                self._resumed = Section.from_dict(checkpoint[Section.KEY])
            elif self._is_fitting() and checkpoint.get("pytorch-lightning_version") == lightning.__version__:
                checkpoint = resumable(checkpoint, None)
        except Exception as raised:
            error = raised
        raise_together(error, self.world_size, f"reading {checkpoint_path}")
        check_same(checkpoint, self.world_size, checkpoint_path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights into the module, as under any strategy without shards."""
        Strategy.load_model_state_dict(self, checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of masters and optimizer state; called by every rank, after ``setup``.

        Raises:
            MisconfigurationException: the optimizer's groups are not those of the checkpoint.
        """
        shards = self._shards()
        assert shards is not None
        weights = (checkpoint.get("current_model_state", {}), checkpoint["state_dict"])
        load_masters(shards, weights)
        for saved in checkpoint["optimizer_states"]:
            load_state(shards, self._names(shards), saved)

    def resumed_settings(
        self, settings: Settings, site: Site, module: torch.nn.Module, shapes: IntArray
    ) -> Settings:
        """The settings to prepare a run with: those given, and the checkpoint's profile where it fits.

        Names in a warning what is set otherwise than in the run that wrote the checkpoint. One broadcast, called by
        every rank; without a checkpoint nothing happens.
        """
        section = self._resumed
        if section is None:
            return settings
        warn_of_changes(section, settings, site.world_size)
        if isinstance(settings.profile, Profile):
            return settings
        switch = RecomputeSwitch(find_families(module, settings.layers))
        identity = profile_identity(
            module, switch, world_size=site.world_size, precision=site.precision, device=site.device
        )
        profile = resumed_profile(section, same_for_all(identity), int(shapes.prod(axis=1).max()))
        return settings if profile is None else replace(settings, profile=profile)

    def on_train_start(self) -> None:
        """Go on with each rank's random numbers, where the number of ranks is the same."""
        super().on_train_start()
        section, self._resumed = self._resumed, None
        if section is not None and len(section.random) == self.world_size:
            restore_random_state(section.random[self.global_rank])

    def teardown(self) -> None:
        """Remember where a fit ended, so that it can still be saved after a validation."""
        self._last_section = self.checkpoint_section() or self._last_section
        super().teardown()

    def _is_fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING
