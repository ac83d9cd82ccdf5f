"""Finding the families of repeated layers of a model."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

_SCALARS = (bool, int, str, type(None))
_LAYER_INDEX = re.compile(r"^(layer|block|depth)?_?(idx|index|id|number|num|depth)$")
_SMALLEST_SHARE = 0.1


class RecomputeError(RuntimeError):
    """A layer cannot be recomputed, or no layer was found; the message names it and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFamily:
    """Layers of a model that are built alike, so that measuring one of them measures all.

    Attributes:
        name: path of the list they stand in, or the class they were named by.
        layers: the layers in the order of their list, which is taken for the order of the forward.
        fingerprint: what makes them alike: classes, parameter shapes and scalar attributes as text.
    """

    name: str
    layers: tuple[nn.Module, ...]
    fingerprint: str


def find_families(module: nn.Module, layers: Sequence[str | type] | None = None) -> tuple[LayerFamily, ...]:
    """Find the repeated layers of a model (paper 3.5, the ``L`` of Eq. 4).

    Without ``layers``, a family is two or more modules of one ``nn.ModuleList`` or ``nn.Sequential`` with equal
    fingerprint; one list may hold several families (Gemma 3: sliding and full attention). Lists inside a chosen
    layer are not looked at. A list with less than a tenth of the parameters of the largest is left out, and so are
    frozen layers (a teacher, an average of the weights) as long as others can be trained.

    Args:
        module: the model; a ``LightningModule`` is one.
        layers: layers to take instead: names of classes, classes, paths of lists or paths of single layers.

    Returns:
        The families in the order of ``module.named_modules()``; empty where nothing repeats.

    Raises:
        RecomputeError: a name in ``layers`` matches no module.
    """
    if layers is None:
        return _largest(_families_of_lists(module))
    if not layers:
        raise RecomputeError("layers is empty; name at least one class or path, or leave it None")
    return _group(_named_layers(module, layers))


def fingerprint(layer: nn.Module) -> str:
    """Text that is equal for two layers that cost the same.

    Class, shape, dtype and ``requires_grad`` of every parameter and all scalar attributes of all submodules. Left
    out: a layer's index (by name, and digits in strings), and the value of floats other than zero, since
    probabilities and scales may grow with depth without changing the cost. Lists, which a forward may fill, do not
    count either; an integer that a forward counts up does, so find the layers before the first step.
    """
    lines = [
        f"{name}:{tuple(p.shape)}:{p.dtype}:{'trained' if p.requires_grad else 'frozen'}"
        for name, p in layer.named_parameters()
    ]
    for path, part in layer.named_modules():
        values = [f"{key}={text}" for key, value in sorted(vars(part).items()) if (text := _text(key, value))]
        lines.append(f"{path}:{type(part).__qualname__}({', '.join(values)})")
    return "\n".join(lines)


def _text(name: str, value: Any) -> str:
    """A scalar attribute, or a tuple of them, as text; empty for what does not belong to the fingerprint."""
    if name.startswith("_") or name == "training" or _LAYER_INDEX.match(name):
        return ""
    if isinstance(value, float):
        return "0.0" if value == 0.0 else "float"
    if isinstance(value, str):
        return repr(re.sub(r"\d+", "#", value))
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, tuple) and value and all(isinstance(v, (*_SCALARS, float)) for v in value):
        return "(" + ",".join(_text("item", v) for v in value) + ")"
    return ""


def class_of(layer: nn.Module) -> type:
    """The class that the user wrote: ``torch.compile(layer)`` wraps the layer into a module of its own class."""
    return type(getattr(layer, "_orig_mod", layer))


def _families_of_lists(module: nn.Module) -> list[LayerFamily]:
    found: list[LayerFamily] = []
    chosen: list[str] = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential) or _inside(path, chosen):
            continue
        members = [(f"{path}.{key}".lstrip("."), layer) for key, layer in part.named_children()]
        for family in _group(members, list_path=path):
            if len(family.layers) > 1 and _num_parameters(family):
                found.append(family)
                chosen += [name for name, layer in members if any(layer is x for x in family.layers)]
    return found


def _inside(path: str, chosen: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in chosen)


def _group(members: Sequence[tuple[str, nn.Module]], list_path: str | None = None) -> tuple[LayerFamily, ...]:
    """Families of equal fingerprint, in the order in which their first layers stand."""
    groups: dict[str, list[tuple[int, nn.Module]]] = {}
    for index, (_, layer) in enumerate(members):
        groups.setdefault(fingerprint(layer), []).append((index, layer))
    families = []
    for text, group in groups.items():
        name = list_path if list_path is not None else class_of(group[0][1]).__name__
        if len(groups) > 1:
            name = f"{name}[{group[0][0]}]"
        families.append(LayerFamily(name=name, layers=tuple(x for _, x in group), fingerprint=text))
    return tuple(families)


def _num_parameters(family: LayerFamily) -> int:
    return sum(p.numel() for layer in family.layers for p in layer.parameters())


def _is_trained(family: LayerFamily) -> bool:
    return any(p.requires_grad for layer in family.layers for p in layer.parameters())


def _largest(families: Sequence[LayerFamily]) -> tuple[LayerFamily, ...]:
    trained = [family for family in families if _is_trained(family)] or list(families)
    limit = _SMALLEST_SHARE * max(map(_num_parameters, trained), default=0)
    return tuple(family for family in trained if _num_parameters(family) >= limit)


def _named_layers(module: nn.Module, wanted: Sequence[str | type]) -> list[tuple[str, nn.Module]]:
    """The outermost modules that match, in the order of ``named_modules()``."""
    matches: dict[str, nn.Module] = {}
    for want in wanted:
        found = dict(_matching(module, want))
        if not found:
            raise RecomputeError(f"layers={want!r} matches no module; {_inventory(module)}")
        matches |= found
    order = [path for path, _ in module.named_modules() if path in matches]
    outermost: list[str] = []
    for path in order:
        if not _inside(path, outermost):
            outermost.append(path)
    return [(path, matches[path]) for path in outermost]


def _matching(module: nn.Module, want: str | type) -> Iterator[tuple[str, nn.Module]]:
    for path, part in module.named_modules():
        if isinstance(want, type):
            if issubclass(class_of(part), want) and not issubclass(want, nn.ModuleList | nn.Sequential):
                yield path, part
        elif path == want and isinstance(part, nn.ModuleList | nn.Sequential):
            yield from ((f"{path}.{key}", layer) for key, layer in part.named_children())
        elif path == want or class_of(part).__name__ == want:
            yield path, part


def _inventory(module: nn.Module) -> str:
    """What a user can choose from: repeated classes with parameters, and lists."""
    with_parameters = [part for part in module.modules() if any(True for _ in part.parameters())]
    counts = Counter(class_of(part).__name__ for part in with_parameters if part is not module)
    repeated = ", ".join(f"{name} ({count}x)" for name, count in counts.most_common(8) if count > 1)
    lists = ", ".join(
        f"{path!r} ({len(part)})"
        for path, part in module.named_modules()
        if path and isinstance(part, nn.ModuleList | nn.Sequential)
    )
    return (
        f"classes that occur more than once: {repeated or 'none'}; lists of modules: {lists or 'none'}. "
        "Name classes ('Block' or Block) or paths ('model.layers')"
    )


def reentrant_part(layer: nn.Module) -> str | None:
    """Path of the part of a layer that visibly checkpoints itself with ``use_reentrant=True``."""
    for path, part in layer.named_modules():
        function = getattr(part, "_gradient_checkpointing_func", None)
        if isinstance(function, functools.partial) and function.keywords.get("use_reentrant"):
            return path or type(part).__name__
        if str(getattr(part, "checkpoint_impl", "")) == "CheckpointImpl.REENTRANT":
            return path or type(part).__name__
    return None
