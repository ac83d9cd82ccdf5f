"""Optimizers whose groups or state would not be those that the user made."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

_NOT_ELEMENTWISE = frozenset(
    {"Adafactor", "Muon", "SparseAdam", "LBFGS", "Lamb", "LAMB", "FusedLamb", "LARS", "Lars", "Shampoo", "SOAP"}
)
"""Names of classes, here and in other libraries, whose update looks at shape, norm or history of a whole parameter."""


def names_of_groups(optimizer: Optimizer, module: torch.nn.Module) -> list[list[str]]:
    """The parameters of each group by name, before DeepSpeed replaces them by flat ones.

    Raises:
        MisconfigurationException: a parameter that is not the module's: no rank would broadcast or save it.
    """
    names = {id(p): name for name, p in module.named_parameters()}

    def name(index: int, parameter: torch.Tensor) -> str:
        if id(parameter) not in names:
            raise MisconfigurationException(
                f"parameter group {index} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is "
                f"no parameter of {type(module).__name__}: it would be in no checkpoint. Assign it, or the module that "
                "has it, to an attribute of the LightningModule (lists of modules: torch.nn.ModuleList), before "
                "configure_optimizers"
            )
        return names[id(parameter)]

    return [[name(index, p) for p in group["params"]] for index, group in enumerate(optimizer.param_groups)]


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse what DeepSpeed would take for something else.

    Raises:
        MisconfigurationException: with what was got and what to do.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        raise MisconfigurationException(
            "configure_optimizers returned an Adagrad, which DeepSpeed replaces by one of its own without groups and "
            "without the schedule; use another optimizer, such as AdamW or RMSprop"
        )
    kind = next((c.__name__ for c in type(optimizer).__mro__ if c.__name__ in _NOT_ELEMENTWISE), None)
    if kind is not None:
        raise MisconfigurationException(
            f"configure_optimizers returned {type(optimizer).__name__}, whose update of an element ({kind}) depends on "
            "the others of its parameter; ZeRO-1 gives each rank a flat stretch of all parameters, so it would train "
            "otherwise, and otherwise on each number of ranks. Use an optimizer that works element by element, such as "
            "AdamW or SGD"
        )
    for index, group in enumerate(optimizer.param_groups):
        if not any(p.requires_grad for p in group["params"]):
            raise MisconfigurationException(
                f"parameter group {index} of the optimizer has no parameter with requires_grad=True, which DeepSpeed "
                "does not support; leave the group out in configure_optimizers"
            )
