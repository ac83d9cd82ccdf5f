"""What decides the size of a step: the run's number of samples or tokens, or the planner that draws."""

from __future__ import annotations

from lightning_dcp.data.feeding import lookahead_of
from lightning_dcp.data.sampler import StepSampler
from lightning_dcp.planners.floating import Floating
from lightning_dcp.planners.protocol import Planner
from lightning_dcp.topology import World


def check_size(planner: Planner, sampler: StepSampler) -> str | None:
    """Refuse a planner that does not know how many samples a step has; what is given in vain, in a sentence.

    Raises:
        ValueError: the planner plans the samples that it is given, and nothing says how many these are; or it draws
            them, and does not say among how many.
    """
    samples, tokens = sampler.global_batch_size, sampler.global_batch_tokens
    if not planner.draws:
        if not sampler.has_size:
            raise ValueError(
                f'planner "{planner.name}" plans the samples that it is given, and neither global_batch_size nor '
                "global_batch_tokens is; give exactly one of them to DCPDataModule: the samples, or the tokens, of an "
                "optimizer step over all ranks"
            )
        return None
    bounded = planner
    if isinstance(planner, Floating) and samples is not None:
        bounded = planner.around(samples)
    lookahead_of(bounded, World.build(1, [1]))
    if not sampler.has_size or bounded != planner:
        return None
    return (
        f"global_batch_size = {samples} and global_batch_tokens = {tokens} do not decide the steps: planner "
        f'"{planner.name}" draws the samples of each step by itself. Leave both out, or use a planner that plans the '
        "samples it is given"
    )
