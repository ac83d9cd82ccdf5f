"""Leave a model as it was found: run it as often as needed, then put everything back bit by bit."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer

_MANY = 10_000
"""Items from which a list is taken for data: its items are put back, but not what they contain."""

Restore = Callable[[], Any]
"""Puts the content of one value back and returns the value."""


class ProbeSideEffectError(RuntimeError):
    """A forward or backward wrote into the weights, which no probe can take back; the message names them."""


@contextmanager
def untouched(module: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
    """Undo everything that the body does to a module, also when it raises.

    Restored to the bit: buffers, gradients (``None`` stays ``None``), ``requires_grad``, train or eval of every
    submodule, hooks, submodules, all attributes (tensors, lists, dicts, sets and generators with their content,
    which covers the states of torchmetrics), the state of ``optimizer``, and the random numbers of torch (all
    devices), NumPy and ``random``. Other objects that the module holds keep their own state.

    Weights are not copied (that would double their memory): that nobody wrote into them is checked instead.
    Inside, ``log`` and ``log_dict`` of a ``LightningModule`` do nothing and its trainer's loggers are dummies.

    Args:
        module: the model.
        optimizer: its state is restored too.

    Raises:
        ProbeSideEffectError: the body wrote into parameters in place. Everything else is restored by then.
    """
    memo: dict[int, Restore] = {}
    parts = [(part, _capture(vars(part), memo)) for part in module.modules()]
    parameters = [(name, p, _Parameter(p)) for name, p in module.named_parameters()]
    state = [] if optimizer is None else [_capture(optimizer.state, memo), _capture(optimizer.param_groups, memo)]
    rng = _random_state()
    with ExitStack() as stack:
        for part, _ in parts:
            if isinstance(part, LightningModule):
                _silence(part, stack)
        try:
            yield
        finally:
            for _, restore in parts:
                restore()
            for restore in state:
                restore()
            written = [name for name, p, before in parameters if before.restore(p)]
            rng()
    if written:
        raise ProbeSideEffectError(
            f"training_step wrote into the weights in place ({', '.join(written[:3])}): such a model cannot be "
            "measured or checked without changing it. Move the write to on_train_batch_end, or pass "
            "profile=<file of an earlier run> and self_check=False"
        )


class _Parameter:
    """What a probe could change of a parameter, apart from its values."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.data = parameter.data
        self.version = parameter._version
        self.digest = _digest(parameter)
        self.requires_grad = parameter.requires_grad
        self.grad = parameter.grad
        self.grad_restore = _capture(parameter.grad, {})

    def restore(self, parameter: nn.Parameter) -> bool:
        """Put everything back; whether the values were written in place."""
        if parameter.data_ptr() != self.data.data_ptr():
            parameter.data = self.data
        parameter.requires_grad_(self.requires_grad)
        parameter.grad = self.grad_restore()
        # The version counts writes through the parameter, the digest also those through .data, as averages of the
        # weights are often kept.
        written = parameter._version != self.version
        return bool(written or not torch.equal(_digest(parameter), self.digest))


def _digest(parameter: nn.Parameter) -> Tensor:
    """Sum of the values' bits as integers: exact, so the same in any order, and without a copy."""
    data = parameter.detach()
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if data.is_meta or data.layout != torch.strided or data.element_size() not in words:
        return torch.zeros((), dtype=torch.int64)
    return data.view(words[data.element_size()]).sum(dtype=torch.int64)


def _capture(value: Any, memo: dict[int, Restore]) -> Restore:
    """Remember a value's content; containers in depth, each object once."""
    if id(value) not in memo:
        # Stands in while its own content is captured, for containers that hold themselves.
        memo[id(value)] = lambda: value
        memo[id(value)] = _capture_new(value, memo)
    return memo[id(value)]


def _capture_new(value: Any, memo: dict[int, Restore]) -> Restore:
    if isinstance(value, nn.Parameter | nn.Module):
        return lambda: value
    if isinstance(value, Tensor):
        return _capture_tensor(value)
    if isinstance(value, dict):
        return _capture_dict(value, memo)
    if isinstance(value, list | deque | set):
        return _capture_items(value, memo)
    if isinstance(value, tuple):
        parts = [_capture(item, memo) for item in value]
        return lambda: ([part() for part in parts], value)[1]
    return _capture_object(value)


def _capture_tensor(value: Tensor) -> Restore:
    if value.is_meta or value.layout != torch.strided:
        return lambda: value
    alias, content = value.detach(), value.detach().clone()

    def restore() -> Tensor:
        with torch.no_grad():
            if value.shape != alias.shape or value.data_ptr() != alias.data_ptr():
                value.data = alias
            # Not when equal: a write would count as a change of a tensor that some graph may hold.
            if not torch.equal(alias, content):
                alias.copy_(content)
        return value

    return restore


def _capture_dict(value: dict[Any, Any], memo: dict[int, Restore]) -> Restore:
    content = [(key, _capture(item, memo)) for key, item in value.items()]

    def restore() -> dict[Any, Any]:
        restored = {key: part() for key, part in content}
        if list(value) != list(restored) or any(value[key] is not item for key, item in restored.items()):
            value.clear()
            value.update(restored)
        return value

    return restore


def _capture_items(value: Any, memo: dict[int, Restore]) -> Restore:
    content = [partial(_same, item) if len(value) > _MANY else _capture(item, memo) for item in value]

    def restore() -> Any:
        restored = [part() for part in content]
        value.clear()
        value.update(restored) if isinstance(value, set) else value.extend(restored)
        return value

    return restore


def _same(value: Any) -> Any:
    return value


def _capture_object(value: Any) -> Restore:
    """Generators with their position, arrays with their content; everything else as it is."""
    setter: Callable[[Any], Any]
    content: Any
    if isinstance(value, torch.Generator):
        setter, content = value.set_state, value.get_state()
    elif isinstance(value, np.random.Generator):
        setter, content = partial(setattr, value.bit_generator, "state"), copy.deepcopy(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        setter, content = value.set_state, value.get_state()
    elif isinstance(value, random.Random):
        setter, content = value.setstate, value.getstate()
    elif isinstance(value, np.ndarray):
        setter, content = partial(value.__setitem__, ...), value.copy()
    else:
        return lambda: value

    def restore() -> Any:
        setter(content)
        return value

    return restore


def _random_state() -> Callable[[], None]:
    cpu, python, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if on_cuda else []

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(legacy)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def _silence(module: LightningModule, stack: ExitStack) -> None:
    """No logging outside of the Trainer's loop, where ``log`` raises and loggers really write.

    The snapshot of the module's attributes takes the no-ops away again.
    """
    for name in ("log", "log_dict"):
        module.__dict__[name] = _nothing
    trainer = module._trainer
    if trainer is not None:
        loggers = trainer.loggers
        trainer.loggers = [DummyLogger()]
        stack.callback(setattr, trainer, "loggers", loggers)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None
