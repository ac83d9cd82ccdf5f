"""Small models and runs for tests of the whole path: ``Trainer.fit`` under DCPStrategy, and the single process."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dcp.data.module import DCPDataModule
from lightning_dcp.plan import IterationPlan
from lightning_dcp.planners.protocol import PlanRequest
from lightning_dcp.profile import Profile
from lightning_dcp.seeding import seed_from
from lightning_dcp.sequence_parallel import loss_sum
from tests.synthetic import analytic_profile, random_plan

VOCABULARY = 17
HEADS = 4
LAYERS = 3


class Block(nn.Module):
    """Pre-norm causal block with grouped key/value heads and rotary-like positions."""

    def __init__(self, width: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.head_width = width // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * kv_heads * self.head_width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSC: Tensor) -> Tensor:
        b, s, c = x_BSC.shape
        h_BSC = self.norm1(x_BSC)
        query_BHSD = self.query(h_BSC).view(b, s, HEADS, -1).transpose(1, 2)
        key, value = self.key_value(h_BSC).view(b, s, 2 * self.kv_heads, -1).transpose(1, 2).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(query_BHSD, key, value, is_causal=True, enable_gqa=True)
        x_BSC = x_BSC + self.dropout(self.out(y.transpose(1, 2).reshape(b, s, c)))
        out_BSC: Tensor = x_BSC + self.mlp(self.norm2(x_BSC))
        return out_BSC


class Net(nn.Module):
    """A causal language model with two output heads; a sample uses the head that its key ``kind`` names."""

    def __init__(self, width: int = 16, kv_heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(128, width)
        self.layers = nn.ModuleList([Block(width, kv_heads, dropout) for _ in range(LAYERS)])
        self.heads = nn.ModuleList([nn.Linear(width, VOCABULARY) for _ in range(2)])

    def forward(self, input_ids: Tensor, position_ids: Tensor, kind_B: Tensor) -> Tensor:
        x_BSC: Tensor = self.embedding(input_ids) + self.position(position_ids)
        for layer in self.layers:
            x_BSC = layer(x_BSC)
        logits_BSV: Tensor = x_BSC.new_zeros(*input_ids.shape, VOCABULARY)
        for kind, head in enumerate(self.heads):
            rows = (kind_B == kind).nonzero().flatten()
            if len(rows):  # a head without a row gets no gradient on this rank
                logits_BSV = logits_BSV.index_copy(0, rows, head(x_BSC[rows]))
        return logits_BSV


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: how losses are returned and weighted, and how many ranks plan which steps."""

    world_size: int = 4
    returns: str = "mean"
    weighting: str = "token"
    samples: int = 24
    batch: int = 8
    steps: int = 5
    clip: float | None = None
    precision: str = "32-true"
    seed: int = 0
    lr: float = 0.5
    masked: str = "prompts"
    broken: float = 0.0
    dropout: float = 0.0
    sp_sizes: tuple[int, ...] | None = None
    empty_rank: bool = False
    self_check: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


class Samples(Dataset[dict[str, Any]]):
    """Random sequences of 1 to 33 tokens; most labels are ignored in some, all in a few."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(seed_from(case.seed, 1))
        self.rows = [self._row(generator, i, case.masked) for i in range(case.samples)]
        self.lengths = torch.tensor([len(row["input_ids"]) for row in self.rows]).numpy()

    def _row(self, generator: torch.Generator, index: int, masked: str) -> dict[str, Any]:
        length = int(torch.randint(2, 34, (1,), generator=generator))
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = ids.roll(-1)
        labels[-1] = -100
        if masked == "prompts":
            labels[: int(torch.randint(length + 1, (1,), generator=generator))] = -100
        if masked == "equal":
            labels[:-2] = -100
            labels[-2] = ids[-1]
        return {"input_ids": ids, "labels": labels, "kind": index % 2}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


class Data(DCPDataModule):
    """The samples as a data module."""

    def __init__(self, case: Case, tokens: int | None = None, **kwargs: Any) -> None:
        samples = case.batch if tokens is None else None
        super().__init__(global_batch_size=samples, global_batch_tokens=tokens, seed=case.seed, **kwargs)
        self.case = case

    def setup(self, stage: str | None = None) -> None:
        self.train_dataset = Samples(self.case)


class Module(pl.LightningModule):
    """Trains :class:`Net` with plain SGD and returns its loss in the way that the case says."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(seed_from(case.seed, 2) % 2**32)
        self.case = case
        self.net = Net(dropout=case.dropout)
        self.losses: list[float] = []

    def values(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Loss of each position and whether it counts, ``[B, S]`` both."""
        logits_BSV = self.net(batch["input_ids"], batch["position_ids"], torch.as_tensor(batch["kind"]))
        labels_BS = batch["labels"]
        wide = torch.promote_types(logits_BSV.dtype, torch.float32)
        values = F.cross_entropy(logits_BSV.flatten(0, 1).to(wide), labels_BS.flatten(), reduction="none")
        values = self._break(values)
        return values.view_as(labels_BS), labels_BS != -100

    def _break(self, values: Tensor) -> Tensor:
        if self.case.broken and self.trainer.global_rank == 1:
            values = values + self.case.broken * (values - values.detach())
        return values

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        values_BS, mask_BS = self.values(batch)
        returns = self.case.returns
        if returns == "mean":
            return values_BS[mask_BS].mean()  # NaN, with a zero gradient, where no label is valid
        if returns == "sum":
            return (values_BS * mask_BS).sum()
        if returns == "dict":
            return {"loss": (values_BS * mask_BS).sum(), "count": mask_BS.sum()}
        return loss_sum(values_BS, mask_BS)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.case.lr)


class SingleProcess(Module):
    """The same model on whole steps, in plain Lightning: what every plan must equal."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        values_BS, mask_BS = self.values(batch)
        if self.case.weighting == "token":
            return (values_BS * mask_BS).sum() / mask_BS.sum().clamp(min=1)
        items_B = mask_BS.sum(1)
        per_sample_B = (values_BS * mask_BS).sum(1) / items_B.clamp(min=1)
        return per_sample_B.sum() / (items_B > 0).sum().clamp(min=1)


class RandomPlanner:
    """Any valid plan, drawn anew for each step from the samples and the seed."""

    name, draws, lockstep = "random", False, False

    def __init__(self, seed: int, num_layers: tuple[int, ...] = (LAYERS,), empty_rank: bool = False) -> None:
        self.seed = seed
        self.num_layers = num_layers
        self.empty_rank = empty_rank

    def plan(self, request: PlanRequest) -> IterationPlan:
        rng = random.Random(seed_from(self.seed, *request.ids))
        world = request.world
        if self.empty_rank:
            blocks = tuple(b for b in world.blocks if b[0] + b[1] < world.world_size)
            world = type(world)(world_size=world.world_size, ranks_per_node=world.ranks_per_node, blocks=blocks)
        return random_plan(rng, request.ids, request.sizes, world, self.num_layers)


def make_trainer(strategy: Any, case: Case, **kwargs: Any) -> pl.Trainer:
    """A quiet CPU trainer that writes nothing."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": strategy,
        "max_steps": case.steps,
        "precision": case.precision,
        "gradient_clip_val": case.clip,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tempfile.gettempdir(),
    }
    return pl.Trainer(**{**settings, **kwargs})


def formula_profile(world_size: int, num_layers: tuple[int, ...]) -> Profile:
    """Costs by formula for every size; without an identity, so that it fits every model."""
    return replace(analytic_profile(range(1, world_size + 1), num_layers), identity={})


def make_strategy(case: Case, **kwargs: Any) -> Any:
    """DCPStrategy with random plans and a profile by formula."""
    from lightning_dcp.strategy import DCPStrategy

    settings: dict[str, Any] = {
        "planner": RandomPlanner(case.seed, empty_rank=case.empty_rank),
        "profile": formula_profile(case.world_size, (LAYERS,)),
        "self_check": case.self_check,
        "loss_weighting": case.weighting,
        "loss_reduction": "sum" if case.returns == "sum" else "mean",
        "sp_sizes": case.sp_sizes,
    }
    return DCPStrategy(**{**settings, **kwargs})


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run ends with."""

    start: dict[str, Tensor]
    weights: dict[str, Tensor]
    losses: list[float]
    plans: list[str]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


class _Plans(pl.Callback):
    def __init__(self) -> None:
        self.plans: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.plans.append(trainer.strategy.plan.to_json())  # type: ignore[attr-defined]


def fit_dcp(case: Case, make: Callable[[Case], pl.LightningModule] = Module, **kwargs: Any) -> Result:
    """Train a case under DCPStrategy; called by every rank of the pool."""
    module = make(case)
    start = weights_of(module)
    plans = _Plans()
    trainer = make_trainer(make_strategy(case), case, devices=case.world_size, callbacks=[plans], **kwargs)
    trainer.fit(module, datamodule=Data(case))
    return Result(start=start, weights=weights_of(module), losses=module.losses, plans=plans.plans)  # type: ignore[arg-type]


def collate_whole(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad a whole step by hand; independent of the collate under test."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = row["input_ids"]
        labels[i, : len(row["labels"])] = row["labels"]
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(longest).expand(len(rows), -1),
        "kind": torch.tensor([row["kind"] for row in rows]),
    }


def fit_single(
    case: Case,
    plans: Sequence[str],
    precision: str = "32-true",
    make: Callable[[Case], Module] = SingleProcess,
) -> Result:
    """Train the samples of the same steps in one process under plain Lightning."""
    module = make(case)
    start = weights_of(module)
    samples = Samples(case)
    steps = [
        [samples[i] for m in IterationPlan.from_json(text).micro_batches for i in m.sample_ids] for text in plans
    ]
    loader: DataLoader[Any] = DataLoader(steps, batch_size=None, collate_fn=collate_whole)  # type: ignore[arg-type]
    trainer = make_trainer("auto", case, devices=1, precision=precision)
    trainer.fit(module, loader)
    return Result(start=start, weights=weights_of(module), losses=module.losses, plans=list(plans))


def assert_same_updates(got: Result, expected: Result, tolerance: float = 1e-4) -> None:
    """Design 3: ``|a - b| <= tol |b| + 1e-7 |parameter| + 1e-6 |U|`` for the update of every tensor."""
    total = sum(float((expected.weights[n] - expected.start[n]).square().sum()) for n in expected.weights) ** 0.5
    assert total > 1e-3, "nothing was trained, so nothing was compared"
    for name, reference in expected.weights.items():
        assert torch.equal(got.start[name], expected.start[name])
        update = got.weights[name] - got.start[name]
        wanted = reference - expected.start[name]
        error = float((update - wanted).norm())
        allowed = tolerance * float(wanted.norm()) + 1e-7 * float(reference.norm()) + 1e-6 * total
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
