"""Small models, right and wrong ones, and the self-check run on them inside a pool's worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dcp.data.batch import Batch
from lightning_dcp.data.collate import CollateRules, collate
from lightning_dcp.execution import LossSettings, MicroBatchRunner
from lightning_dcp.models import build
from lightning_dcp.plan import MicroBatch
from lightning_dcp.recompute import RecomputeSwitch, find_families
from lightning_dcp.selfcheck import Freedoms, SelfCheckError, self_check
from lightning_dcp.sequence_parallel import current, gather, loss_sum
from lightning_dcp.sequence_parallel.context import SPGroup
from lightning_dcp.sequence_parallel.groups import ProcessGroups
from lightning_dcp.sequence_parallel.sharding import shard_batch
from lightning_dcp.topology import World

VOCABULARY = 64


class Hooks:
    """The default sharding and counting of the data module."""

    def shard(self, batch: Batch, group: SPGroup) -> Batch:
        return shard_batch(batch, group, sequence_length=current().padded_shape[0])

    def loss_items(self, batch: Batch) -> int:
        return int((batch["labels"] != -100).sum() if "labels" in batch else batch["attention_mask"].sum())


def mean_loss(logits_BSV: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class Language(pl.LightningModule):
    """The tiny Transformer-1D, used as it should be."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.model = build("tiny-1d", **changes)

    def training_step(self, batch: Batch, _index: int) -> Any:
        self.log("loss", 0.0)
        return mean_loss(self.logits(batch), batch)

    def logits(self, batch: Batch) -> Tensor:
        logits: Tensor = self.model(batch["input_ids"], batch["position_ids"], batch["attention_mask"])
        return logits


class SumAndCount(Language):
    def training_step(self, batch: Batch, _index: int) -> Any:
        losses_BS = F.cross_entropy(
            self.logits(batch).transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none"
        )
        return loss_sum(losses_BS, batch["labels"] != -100)


class LocalPositions(Language):
    """Wrong: positions counted from the start of the shard."""

    def logits(self, batch: Batch) -> Tensor:
        tokens = batch["input_ids"]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits: Tensor = self.model(tokens, positions, batch["attention_mask"])
        return logits


class Unmasked(Language):
    """Wrong with padding: attention over the whole sequence without a mask."""

    def __init__(self) -> None:
        super().__init__(causal=False)

    def logits(self, batch: Batch) -> Tensor:
        logits: Tensor = self.model(batch["input_ids"], batch["position_ids"])
        return logits


class CountedTwice(Language):
    """Wrong: the loss of the whole sequence, computed on every rank of the group, with the whole count."""

    def training_step(self, batch: Batch, _index: int) -> Any:
        logits, labels = gather(self.logits(batch)), gather(batch["labels"])
        return {
            "loss": mean_loss(logits, {"labels": labels}) * (labels != -100).sum(),
            "count": (labels != -100).sum(),
        }


class SummedTwice(Language):
    """Wrong: as above, but the sum is taken for that of a shard."""

    def training_step(self, batch: Batch, _index: int) -> Any:
        logits, labels = gather(self.logits(batch)), gather(batch["labels"])
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return {"loss": total, "count": (batch["labels"] != -100).sum()}


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    mixed: Tensor = F.scaled_dot_product_attention(q, k, v, **options)
    return mixed


class Mixer(nn.Module):
    """One layer of attention whose axes, mask and kernel are chosen by name."""

    def __init__(self, kind: str, width: int = 24, heads: int = 6) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BSC: Tensor) -> Tensor:
        length = x_BSC.shape[1]
        if self.kind == "batch":
            x_BSC = x_BSC.transpose(0, 1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x_BSC).chunk(3, -1))
        if self.kind == "features":
            # The features of a token attend to each other: its axis stands where the sequence should.
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mixed = attend(q, k, v).flatten(2)
        else:
            mixed = self._attend(q, k, v, length).transpose(1, 2).flatten(2)
        result: Tensor = x_BSC + self.out(mixed)
        return result.transpose(0, 1) if self.kind == "batch" else result

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        if self.kind == "batch":
            return attend(q, k, v)
        if self.kind == "local mask":
            return attend(q, k, v, attn_mask=causal)
        if self.kind == "own choice":
            return attend(q, k, v, is_causal=current().group.rank == 0)
        if self.kind == "eager":
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~causal, float("-inf"))
            mixed: Tensor = scores.softmax(-1) @ v
            return mixed
        return attend(q, k, v, dropout_p=0.2, is_causal=True)


class Stack(pl.LightningModule):
    """Embedding, something in front, two mixers, head."""

    def __init__(self, kind: str = "causal", front: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.front = front or nn.Identity()
        self.layers = nn.ModuleList(Mixer(kind) for _ in range(2))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, VOCABULARY)

    def training_step(self, batch: Batch, _index: int) -> Any:
        x_BSC = self.front(self.embedding(batch["input_ids"]))
        for layer in self.layers:
            x_BSC = layer(x_BSC)
        return mean_loss(self.head(self.norm(x_BSC)), batch)


class CausalConvolution(nn.Module):
    """Looks at the two tokens before; those of the shard before are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(24, 24, 3)

    def forward(self, x_BSC: Tensor) -> Tensor:
        out: Tensor = self.convolution(F.pad(x_BSC.transpose(1, 2), (2, 0)))
        return out.transpose(1, 2)


class TokenMean(nn.Module):
    """A mean over all tokens, padding included."""

    def forward(self, x_BSC: Tensor) -> Tensor:
        return x_BSC - x_BSC.mean(1, keepdim=True)


class Forgetful(nn.Module):
    """Counts its calls and computes something else the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.calls = 0

    def forward(self, x_BSC: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x_BSC * (1.0 + 0.1 * self.calls)).relu()
        return out


class Noise(nn.Module):
    """Random numbers that are no dropout."""

    def forward(self, x_BSC: Tensor) -> Tensor:
        return x_BSC + torch.randn_like(x_BSC)


class DropPath(nn.Module):
    """Drops whole tokens, without any function named dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_prob = 0.3

    def forward(self, x_BSC: Tensor) -> Tensor:
        return x_BSC * (torch.rand(x_BSC.shape[:2]) >= self.drop_prob).unsqueeze(-1)


class OwnDropout(nn.Dropout):
    """A dropout module with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return input * torch.bernoulli(torch.full_like(input, 1.0 - self.p))


class ManyDropouts(Stack):
    """Dropout in every place where it may be kept."""

    def __init__(self) -> None:
        super().__init__("dropped")
        self.front = nn.Sequential(nn.Dropout(0.3), nn.AlphaDropout(0.1), DropPath(), OwnDropout(0.2))
        self.embedding_dropout = 0.2
        self.multi = nn.MultiheadAttention(24, 6, dropout=0.4, batch_first=True)

    def training_step(self, batch: Batch, _index: int) -> Any:
        x = F.dropout(self.embedding(batch["input_ids"]), 0.25, training=True)
        x = F.dropout(self.front(x), self.embedding_dropout, self.training)
        # With is_causal and without weights the mask is a hint that is never read.
        hint = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)
        x = x + self.multi(x, x, x, attn_mask=hint, is_causal=True, need_weights=False)[0]
        for layer in self.layers:
            x = layer(x)
        return mean_loss(self.head(self.norm(x)), batch)


class ConvStack(Stack):
    """Wrong: a convolution over tokens."""

    def __init__(self) -> None:
        super().__init__(front=CausalConvolution())


class MeanStack(Stack):
    """Wrong: a mean over tokens."""

    def __init__(self) -> None:
        super().__init__(front=TokenMean())


class NoiseStack(Stack):
    """Not comparable: noise that depends on the plan."""

    def __init__(self) -> None:
        super().__init__(front=Noise())


class ForgetfulStack(Stack):
    """Wrong under recompute: layers that count their calls."""

    def __init__(self) -> None:
        super().__init__(front=nn.Sequential(Forgetful(), Forgetful()))


class Raising(nn.Module):
    """Raises where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.calls = 0

    def forward(self, x_BSC: Tensor) -> Tensor:
        self.calls += 1
        group = current().group
        if self.where == "always" or (self.where == "pair" and x_BSC.shape[0] == 2):
            raise ValueError("here it is")
        if self.where == "second rank" and group.rank == 1:
            raise ValueError("only here")
        return x_BSC


class RaisingStack(Stack):
    """Raises in its front."""

    def __init__(self, where: str) -> None:
        super().__init__(front=Raising(where))


class Scaled(Language):
    """The loss times a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def training_step(self, batch: Batch, _index: int) -> Any:
        return super().training_step(batch, _index) * self.factor


class Detached(Language):
    """Wrong: a loss without a gradient."""

    def training_step(self, batch: Batch, _index: int) -> Any:
        return super().training_step(batch, _index).detach()


class UnsafeMean(Language):
    """Wrong: the gradient of a shard without a label is 0 / 0."""

    def training_step(self, batch: Batch, _index: int) -> Any:
        mask_BS = (batch["labels"] != -100).float()
        labels_BS = batch["labels"].clamp(min=0)
        losses_BS = F.cross_entropy(self.logits(batch).transpose(1, 2), labels_BS, reduction="none")
        return (losses_BS * mask_BS).sum() / mask_BS.sum()


class Autocast(LocalPositions):
    """Wrong positions, hidden below the rounding of autocast."""

    def training_step(self, batch: Batch, _index: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(batch, _index)


class InsistsOnHalf(Language):
    """Right, but refuses to run in float32."""

    def training_step(self, batch: Batch, _index: int) -> Any:
        if self.model.head.weight.dtype != torch.bfloat16:
            raise TypeError("only bfloat16")
        return super().training_step(batch, _index)


class Poisoned(Language):
    """Wrong with padding: not a number, though with the right count."""

    def training_step(self, batch: Batch, _index: int) -> Any:
        poison = torch.where(batch["attention_mask"].all(), 1.0, float("nan"))
        return super().training_step(batch, _index) * poison


class MaskWhereNeeded(Language):
    """Right: a mask on those ranks only that hold padding."""

    def __init__(self) -> None:
        super().__init__(causal=False)

    def logits(self, batch: Batch) -> Tensor:
        mask = batch["attention_mask"]
        logits: Tensor = self.model(batch["input_ids"], batch["position_ids"], None if mask.all() else mask)
        return logits


class WritesWeights(Language):
    """Writes into its weights during the step, which cannot be taken back."""

    def training_step(self, batch: Batch, _index: int) -> Any:
        with torch.no_grad():
            self.model.head.weight.add_(1.0)
        return super().training_step(batch, _index)


class Video(pl.LightningModule):
    """The tiny Transformer-2D on frames of patches."""

    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        self.model = build("tiny-2d")
        self.masked = masked

    def training_step(self, batch: Batch, _index: int) -> Any:
        mask_BFP = batch["attention_mask"]
        output_BFPO = self.model(batch["x"], mask_BFP if self.masked else None)
        errors_BFP = (output_BFPO - batch["x"].roll(1, -1)).square().mean(-1)
        return loss_sum(errors_BFP, mask_BFP)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is checked."""

    shapes: tuple[tuple[int, ...], ...] = ((11,), (5,))
    sp_sizes: tuple[int, ...] = (1, 2)
    sample_ids: tuple[int, ...] = (7, 3)
    unlabelled: tuple[int, ...] = ()
    strict: bool = False
    dtype: torch.dtype = torch.float32
    loss: LossSettings = field(default_factory=LossSettings)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank saw."""

    freedoms: Freedoms | None
    error: str
    changed: list[str]
    warned: list[str]


def sample(sample_id: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Tokens, or patches of five features for two axes."""
    generator = torch.Generator().manual_seed(sample_id)
    if len(shape) == 2:
        return {"x": torch.randn(*shape, 5, generator=generator)}
    return {"input_ids": torch.randint(0, VOCABULARY, shape, generator=generator)}


def check(make: Callable[..., pl.LightningModule], setting: Setting, **changes: Any) -> Answer:
    """Run the self-check on a fresh model; the same weights on every rank."""
    torch.manual_seed(3)
    module = make(**changes).to(setting.dtype)
    first = next(iter(module.parameters()))
    first.grad = torch.full_like(first, 0.5)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    world = World.build(world_size, setting.sp_sizes)
    switch = RecomputeSwitch(find_families(module))
    runner = MicroBatchRunner(
        module=module,
        groups=ProcessGroups(world.blocks),
        recompute=switch,
        hooks=Hooks(),
        seed=5,
        loss=setting.loss,
    )
    before = state_of(module)
    freedoms, error = None, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            freedoms = self_check(
                runner=runner,
                load=lambda micro_batch: load(micro_batch, setting),
                sample_ids=setting.sample_ids,
                shapes=setting.shapes,
                world=world,
                num_layers=switch.num_layers,
                rank=rank,
                device=torch.device("cpu"),
                strict=setting.strict,
            )
        except SelfCheckError as raised:
            error = str(raised)
    after = state_of(module)
    changed = [key for key in before | after if not same(before.get(key), after.get(key))]
    warned = [str(w.message) for w in caught if "Self-check" in str(w.message)]
    return Answer(freedoms=freedoms, error=error, changed=changed, warned=warned)


def load(micro_batch: MicroBatch, setting: Setting) -> Batch:
    torch.rand(1)  # readers draw
    samples = [sample(*pair) for pair in zip(micro_batch.sample_ids, micro_batch.shapes, strict=True)]
    text = "input_ids" in samples[0]
    batch = collate(samples, micro_batch, CollateRules(shift_labels=text, pad_values={"input_ids": 9, "x": 1e4}))
    for row, sample_id in enumerate(micro_batch.sample_ids):
        if sample_id in setting.unlabelled:
            batch["labels"][row] = -100
    return batch


def state_of(module: pl.LightningModule) -> dict[str, Any]:
    """Everything that the check must not change."""
    state: dict[str, Any] = {"rng": torch.get_rng_state(), "sdpa": F.scaled_dot_product_attention}
    state |= {"dropout": F.dropout, "all_to_all": dist.all_to_all_single, "all_gather": dist.all_gather}
    state |= {"autocast": torch.autocast.__enter__, "matmul": torch.get_float32_matmul_precision()}
    for name, parameter in module.named_parameters():
        state[f"parameter {name}"] = parameter.detach().clone()
        state[f"identity {name}"] = id(parameter)
        state[f"gradient {name}"] = None if parameter.grad is None else parameter.grad.clone()
    for name, part in module.named_modules():
        state |= {f"buffer {name}.{key}": buffer.clone() for key, buffer in part.named_buffers(recurse=False)}
        state[f"hooks {name}"] = len(part._forward_hooks)
        state[f"training {name}"] = part.training
        for key, value in vars(part).items():
            if isinstance(value, bool | int | float | str):
                state[f"attribute {name}.{key}"] = value
        state[f"attributes {name}"] = sorted(vars(part))
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(a == b)
