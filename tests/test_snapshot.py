"""A nasty module, run and put back: every piece of state bit-equal, also after an error."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_dcp.profiling.snapshot import ProbeSideEffectError, untouched


class Nasty(L.LightningModule):
    """Everything that a training_step was seen to change, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False).eval()
        self.kept_grad = nn.Linear(4, 4)
        torch.autograd.backward(self.kept_grad(torch.ones(1, 4)).sum())
        self.metric = torchmetrics.MeanMetric()
        self.listed = torchmetrics.CatMetric()
        self.plain = torch.zeros(3)
        self.array = np.zeros(2)
        self.register_buffer("replaced", torch.zeros(2))
        self.counter = 0
        self.lists: list[Any] = [1, [torch.zeros(2)]]
        self.lists.append(self.lists)
        self.dicts: dict[str, Any] = {"a": {"b": torch.ones(2)}}
        self.sets = {1}
        self.queue: deque[int] = deque([1], maxlen=3)
        self.torch_rng = torch.Generator().manual_seed(3)
        self.numpy_rng = np.random.default_rng(3)
        self.python_rng = random.Random(3)

    def training_step(self, batch: Tensor) -> Tensor:
        out = self.kept_grad(self.frozen(self.spectral(self.norm(batch))))
        self.metric.update(out.detach().mean())
        self.listed.update(out.detach().mean())
        self.plain += 1
        self.array += 1
        self.replaced = torch.ones(5)
        self.counter += 1
        self.lists[1][0].add_(1)
        self.lists.append(out)
        self.dicts["a"]["b"] = 3
        self.dicts["new"] = out
        self.sets.add(2)
        self.queue.append(2)
        self.new_attribute = out
        self.new_module = nn.Linear(1, 1)
        self.frozen.train()
        self.spectral.bias.requires_grad_(False)
        self.norm.register_forward_hook(lambda *_: None)
        torch.rand(1, generator=self.torch_rng)
        self.numpy_rng.random()
        self.python_rng.random()
        torch.rand(1), np.random.rand(), random.random()
        self.log("loss", out.sum())
        self.log_dict({"other": out.sum()})
        loss: Tensor = out.square().sum()
        return loss


def everything(module: Nasty) -> dict[str, Any]:
    state: dict[str, Any] = {f"state {k}": v.clone() for k, v in module.state_dict().items()}
    for name, p in module.named_parameters():
        state[f"grad {name}"] = None if p.grad is None else p.grad.clone()
        state[f"grad identity {name}"] = id(p.grad)
        state[f"parameter {name}"] = (id(p), p.requires_grad, p._version)
    for name, part in module.named_modules():
        state[f"training {name}"] = part.training
        state[f"keys {name}"] = (list(vars(part)), list(part._modules), list(part._buffers))
        state[f"hooks {name}"] = len(part._forward_hooks)
    state["metric"] = (module.metric._update_count, module.metric.mean_value.clone(), len(module.listed.value))
    state["tensors"] = (module.plain.clone(), id(module.plain), module.array.copy(), module.lists[1][0].clone())
    state["containers"] = (
        module.counter,
        len(module.lists),
        list(module.dicts),
        module.sets.copy(),
        list(module.queue),
    )
    state["inner"] = (id(module.lists), id(module.dicts["a"]), module.dicts["a"]["b"].clone())
    state["generators"] = (
        module.torch_rng.get_state(),
        module.numpy_rng.bit_generator.state,
        module.python_rng.getstate(),
    )
    state["random"] = (torch.get_rng_state(), str(np.random.get_state()), random.getstate())
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def difference(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(key for key in {*a, *b} if key not in a or key not in b or not same(a[key], b[key]))


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_put_back(raises: bool) -> None:
    """Lightning-AI/pytorch-lightning#9672 and #18813: a tuner changed weights and train/eval mode."""
    torch.manual_seed(0)
    module = Nasty()
    batch = torch.randn(6, 4)
    before = everything(module)
    caught = None
    try:
        with untouched(module):
            torch.autograd.backward(module.training_step(batch))
            torch.autograd.backward(module.training_step(batch))
            inside = everything_differs(module, before)
            if raises:
                raise KeyError("user")
    except KeyError as error:
        caught = error
    assert (caught is not None) == raises
    assert difference(before, everything(module)) == []
    # The body did change what is put back; otherwise this test would prove nothing.
    assert inside >= 30


def everything_differs(module: Nasty, before: dict[str, Any]) -> int:
    module.dicts["a"]["b"] = torch.zeros(2)
    return len(difference(before, everything(module)))


def test_optimizer_state_is_put_back() -> None:
    module = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[module.weight].items()}
    with untouched(module, optimizer):
        optimizer.param_groups[0]["lr"] = 9.0
        optimizer.state[module.weight]["exp_avg"].mul_(2)
        optimizer.state[module.weight]["step"] = torch.tensor(5.0)
        optimizer.state[torch.zeros(1)]["new"] = 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert set(optimizer.state) == set(module.parameters())
    assert all(torch.equal(optimizer.state[module.weight][k], v) for k, v in before.items())


def test_written_weights_are_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.train()
    with pytest.raises(ProbeSideEffectError, match=r"1\.weight"), untouched(module):
        clamp(module.eval()[1])
    assert module[0].training


def clamp(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_written_through_data_are_named(dtype: torch.dtype) -> None:
    """How averages of the weights are often kept; autograd's version counter does not see it."""
    first, second = nn.Linear(2, 2, dtype=dtype), nn.Linear(2, 2, dtype=dtype)
    module = nn.Sequential(first, second)
    version = second.weight._version
    with pytest.raises(ProbeSideEffectError, match=r"\(1\.weight\)"), untouched(module):
        second.weight.data.mul_(0.5)
    assert second.weight._version == version, "the counter would have told"
    first.weight.data[0, 0] = float("nan")
    with untouched(module):
        module(torch.ones(1, 2, dtype=dtype)).sum().backward()


def test_replaced_weights_return() -> None:
    module = nn.Linear(2, 2)
    before, address = module.weight.detach().clone(), module.weight.data_ptr()
    with untouched(module):
        module.weight.data = torch.zeros(2, 2)
    assert module.weight.data_ptr() == address
    assert torch.equal(module.weight, before)


def test_the_bodys_own_error_is_not_replaced() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(KeyError), untouched(module):
        clamp_and_fail(module)


def clamp_and_fail(module: nn.Module) -> None:
    clamp(module)
    raise KeyError("user")


class Logging(L.LightningModule):
    def training_step(self, *_: Any) -> None:
        self.log("a", 1.0)
        assert self.logger is not None
        self.logger.log_metrics({"a": 1.0})


def test_logging_reaches_no_logger(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    trainer = L.Trainer(logger=logger, accelerator="cpu", barebones=False, enable_model_summary=False)
    module = Logging()
    module.trainer = trainer
    with untouched(module):
        module.training_step()
    assert logger.experiment.metrics == []
    assert trainer.loggers == [logger]
    assert "log" not in vars(module)
    with pytest.raises(Exception, match=r"self\.log\(\)"):
        module.training_step()


def test_a_dataset_in_a_list_is_not_copied() -> None:
    module = nn.Linear(1, 1)
    data = [torch.zeros(1) for _ in range(20_000)]
    vars(module)["data"] = data
    first = data[0]
    with untouched(module):
        data.pop()
        data[0] = torch.ones(1)
    assert len(data) == 20_000
    assert data[0] is first
