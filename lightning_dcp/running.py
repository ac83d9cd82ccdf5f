"""What a run of steps holds: what users may ask of it, and what is refused inside a micro-batch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dcp.accumulation import StepExecutor
from lightning_dcp.checkpoint import CheckpointedStrategy
from lightning_dcp.collectives import WorldCalls
from lightning_dcp.data.batch import DCPBatch
from lightning_dcp.data.loader import DCPLoader
from lightning_dcp.metrics import FlopCount
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners import Planner
from lightning_dcp.planners.diagnosis import diagnose
from lightning_dcp.preparation import Prepared, Settings
from lightning_dcp.profile import Profile
from lightning_dcp.records import StepRecord
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.timing import StepClock
from lightning_dcp.upstream import end_by_sigterm, notify_sigterm
from lightning_dcp.watchdog import last_word, leave_word

T = TypeVar("T")


class RunningStrategy(CheckpointedStrategy):
    """The state of a fit, from setup to teardown.

    Args:
        settings: the strategy's own arguments.
        kwargs: as in Lightning's ``DeepSpeedStrategy``.
    """

    def __init__(self, settings: Settings, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._settings = settings
        self._prepared: Prepared | None = None
        self._profile: Profile | None = None
        self._executor: StepExecutor | None = None
        self._loader: DCPLoader | None = None
        self._item: DCPBatch | None = None
        self._last_step: StepRecord | None = None
        self._hooks = ExitStack()
        self.world_calls = WorldCalls(1)

    # --- what users may ask -------------------------------------------------------------------------------------

    @property
    def planner(self) -> Planner:
        """The planner of all steps; known before setup()."""
        return self._settings.planner

    @property
    def settings(self) -> Settings:
        """The strategy's own arguments, checked; known before setup()."""
        return self._settings

    @property
    def prepared(self) -> Prepared:
        """What setup() has found and made for the steps."""
        return self._need(self._prepared, "prepared")

    @property
    def loader(self) -> DCPLoader:
        """The train loader."""
        return self._need_loader()

    @property
    def groups(self) -> ProcessGroups:
        """Sequence-parallel process groups of the run."""
        return self._need(self._prepared, "groups").groups

    @property
    def profile(self) -> Profile:
        """The profile that plans are made with."""
        return self._need(self._profile, "profile")

    @property
    def flops(self) -> FlopCount | None:
        """Operations of a sample by its shape; ``None`` where they could not be counted."""
        return self._need(self._prepared, "flops").flops

    @property
    def plan(self) -> IterationPlan:
        """Plan of the running step, or of the last one."""
        return self._need(self._item, "plan").plan.iteration

    @property
    def last_step(self) -> StepRecord:
        """Record of the last finished step."""
        return self._need(self._last_step, "last_step")

    @property
    def clock(self) -> StepClock:
        """Where the time between two steps goes."""
        return self._need(self._executor, "clock").clock

    @property
    def consumed_samples(self) -> int:
        """Samples trained so far, over all ranks and epochs."""
        return self._need(self._loader, "consumed_samples").consumed_samples

    @property
    def consumed_tokens(self) -> int:
        """Tokens trained so far, without padding, over all ranks and epochs."""
        return self._need(self._loader, "consumed_tokens").consumed_tokens

    def explain_gap(self, plan: IterationPlan) -> str:
        """Why a plan of this run lasts longer than its lower bound: the cause and what can be done, in a sentence."""
        return diagnose(self._need_loader().request_of(plan), plan)

    def _need(self, value: T | None, name: str) -> T:
        if value is None:
            raise RuntimeError(
                f"DCPStrategy.{name} exists only after setup(): call it inside or after trainer.fit"
            )
        return value

    def _need_loader(self) -> DCPLoader:
        if self._loader is None:
            raise MisconfigurationException(
                "DCPStrategy got no DCPLoader for training; it plans steps by the lengths of the samples. Give the "
                "Trainer a torch DataLoader over a dataset with __len__ and __getitem__, or a "
                "lightning_dcp.DCPDataModule that sets self.train_dataset in setup()"
            )
        return self._loader

    def _forget(self) -> None:
        self._hooks.close()
        self._prepared = self._executor = self._profile = None
        self._loader = self._item = self._last_step = None

    def teardown(self) -> None:
        """Destroy the groups of the fit."""
        self._close(self._prepared.groups if self._prepared is not None else None)
        if self._executor is not None and self._executor.agreement.stop_asked:
            # Where no step followed that could tell the others.
            end_by_sigterm(self._need(self.lightning_module, "lightning_module").trainer)
        super().teardown()

    def _close(self, groups: ProcessGroups | None) -> None:
        """Destroy groups after an orderly end; after an error another rank may be inside an exchange.

        There are none, and the module may have no trainer, in a notebook whose forked processes did the work.
        """
        module = self.lightning_module
        if groups is not None and module is not None and not module.trainer.interrupted:
            groups.close()

    # --- SIGTERM ------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Take note of SIGTERM, then join the process group."""
        module = self._need(self.lightning_module, "lightning_module")
        notify_sigterm(module.trainer, self._ask_to_stop)
        super().setup_environment()
        leave_word(self.global_rank, "")  # not that of an earlier run over the same store

    def _ask_to_stop(self) -> bool:
        """Whether the next step tells all ranks; called by the handler of SIGTERM."""
        module = self.lightning_module
        # Also in a validation within the fit: a rank that ended there would leave the others in its collectives.
        if self._executor is None or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return False
        self._executor.agreement.stop_asked = True
        return True

    def _stop_if_agreed(self) -> None:
        """End the run after the step in which all ranks learnt that one of them got SIGTERM."""
        module = self.lightning_module
        if self._executor is not None and module is not None and self._executor.agreement.stopping:
            end_by_sigterm(module.trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Leave word for the ranks that wait for this one; they notice when its connections close."""
        super().on_exception(exception)
        if self.world_size > 1:
            last_word(exception, self.global_rank, self.world_size)

    # --- inside a micro-batch -----------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Refuse a reduction over all ranks inside a micro-batch; elsewhere as under any strategy.

        The mean of integers is float64: the backend would round it down to an integer.
        """
        if self.world_calls.refuse("a reduction over all ranks"):
            return tensor
        whole = isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        if whole and str(reduce_op).lower() in {"mean", "avg"}:
            tensor = tensor.to(torch.float64)
        return super().reduce(tensor, group, reduce_op)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a barrier inside a micro-batch; elsewhere as under any strategy."""
        if not self.world_calls.refuse("a barrier"):
            super().barrier(*args, **kwargs)

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refuse a gather over all ranks inside a micro-batch; elsewhere as under any strategy."""
        if self.world_calls.refuse("all_gather"):
            return tensor.expand(self.world_size, *tensor.shape)
        return super().all_gather(tensor, *args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Refuse a broadcast inside a micro-batch; elsewhere as under any strategy."""
        if self.world_calls.refuse("a broadcast"):
            return obj
        result: T = super().broadcast(obj, src)
        return result

    def saving_is_refused(self) -> bool:
        """Refuse to save inside a micro-batch; the error comes at the end of the step, on every rank."""
        return self.world_calls.refuse("trainer.save_checkpoint")
