"""Which modules are a model's blocks, and which Linear layers get an adapter.

Blocks are the members of the root's own module lists (``double_blocks.0``, ``transformer_blocks.59``)
and of its custom sequential containers (a UNet's ``input_blocks.4.1``). Containers themselves are
never blocks, because models loop over them without calling them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..errors import PlanError, RequestError
from ..module_paths import find_modules

# Names of parts of a block that steer it (modulation, time embeddings) or normalise it. They see one
# vector per picture; attention and MLP layers are what a LoRA is for.
_STEERING = re.compile(
    r"^(mod|modulation|modulate|ada|adaln|adanorm|norm|emb|embed|embedding|embedder|time|timestep)\d*$"
)
BIASES, NORMS = "+biases", "+norms"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d*|\d+")


@dataclass(frozen=True)
class Block:
    """One repeated part of a model.

    Attributes:
        path: Dotted path from the root.
        module: The block.
        is_last: Whether it ends its list; parts of it may have no influence on the output.
    """

    path: str
    module: nn.Module
    is_last: bool


@dataclass(frozen=True)
class Target:
    """A layer that gets an adapter.

    Attributes:
        path: Dotted path from the root.
        layer: An ``nn.Linear``, or a module with the same attributes (quantized layers); a norm, if asked.
        in_last_block: Whether it belongs to a block that ends its list.
    """

    path: str
    layer: nn.Module
    in_last_block: bool


def find_blocks(root: nn.Module) -> list[Block]:
    """Return the blocks of ``root`` in model order."""
    blocks: list[Block] = []
    for name, child in root.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or _is_custom_sequential(child):
            members = list(_members(name, child))
            last = next(reversed(child._modules), "")
            blocks += [
                Block(path, module, path == f"{name}.{last}" or path.startswith(f"{name}.{last}."))
                for path, module in members
                if any(True for _ in module.children()) and any(is_linear(part) for part in module.modules())
            ]
    return blocks


def _is_custom_sequential(module: nn.Module) -> bool:
    # A plain Sequential is a small head or an embedding; a subclass is how UNets write a block.
    return isinstance(module, nn.Sequential) and type(module) is not nn.Sequential


def _members(path: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in container.named_children():
        child_path = f"{path}.{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _members(child_path, child)
        else:
            yield child_path, child


def is_linear(module: nn.Module) -> bool:
    """Return whether the module computes ``x @ weight.T + bias`` with a 2-D weight."""
    if isinstance(module, nn.Linear):
        return True
    names = ("in_features", "out_features", "weight")
    return all(hasattr(module, name) for name in names) and not any(True for _ in module.children())


def is_norm(module: nn.Module) -> bool:
    """Return whether the module is a layer or RMS norm with a trained scale of one dimension."""
    scale = norm_scale(module)
    kinds = isinstance(module, nn.LayerNorm) or "RMSNorm" in type(module).__name__
    return kinds and scale is not None and scale[1].ndim == 1 and not any(True for _ in module.children())


def norm_scale(module: nn.Module) -> tuple[str, nn.Parameter] | None:
    """Return a norm's scale with its name; older models call it ``scale``."""
    for name in ("weight", "scale"):
        scale = module._parameters.get(name)
        if scale is not None:
            return name, scale
    return None


def split_patterns(patterns: str) -> tuple[list[str], set[str]]:
    """Return the patterns of ``select_targets``, and which of ``BIASES`` and ``NORMS`` are among them.

    Raises:
        RequestError: If there is another word with a leading ``+``.
    """
    parts = [part.strip() for part in re.split(r"[,\n]", patterns) if part.strip()]
    extras = {part for part in parts if part.startswith("+")}
    if unknown := extras - {BIASES, NORMS}:
        raise RequestError(
            f"targets has {', '.join(sorted(unknown))}",
            limit=f"With a leading + there are {BIASES} and {NORMS}",
            way_out="Correct it, or name layers without +",
        )
    return [part for part in parts if part not in extras], extras


def select_targets(root: nn.Module, patterns: str = "") -> list[Target]:
    """Return the layers that get an adapter, in model order.

    Args:
        root: The denoiser.
        patterns: Comma-separated module paths as in ``module_paths`` (``*`` is one name). Every Linear
            at or below a match is a target; a leading ``-`` takes matches away. Without a positive
            pattern the start is every attention and MLP layer inside the blocks. ``+norms`` adds the norms
            there; ``+biases`` adds no layer (the targets' biases are trained too, see ``LoraConfig``).

    Raises:
        RequestError: If a pattern matches no Linear layer, or nothing is left.
    """
    blocks = find_blocks(root)
    wanted, extras = split_patterns(patterns)
    with_norms = NORMS in extras
    positive = [part for part in wanted if not part.startswith("-")]
    if positive:
        chosen = {path for pattern in positive for path in _layers_of(root, pattern, with_norms=with_norms)}
    else:
        chosen = {path for block in blocks for path in _default_layers(block, with_norms=with_norms)}
    for pattern in wanted:
        if pattern.startswith("-"):
            chosen -= _layers_of(root, pattern[1:].strip(), with_norms=with_norms)
    if with_norms and not any(is_norm(root.get_submodule(path)) for path in chosen):
        raise RequestError(
            f"targets={patterns!r} was asked for {type(root).__name__}",
            limit="None of the norms there has a scale that could be trained",
            way_out=f"Take {NORMS} out",
        )
    if not chosen:
        raise RequestError(
            f"targets={patterns!r} was asked for {type(root).__name__}",
            limit=f"It leaves no Linear layer out of {len(blocks)} blocks to train",
            way_out="Correct the targets, or leave them empty for attention and MLP layers",
        )
    last = tuple(f"{block.path}." for block in blocks if block.is_last)
    return [
        Target(path, module, path.startswith(last)) for path, module in root.named_modules() if path in chosen
    ]


def _default_layers(block: Block, *, with_norms: bool) -> list[str]:
    return [
        f"{block.path}.{name}"
        for name, module in block.module.named_modules()
        if (is_linear(module) and not _is_steering(name)) or (with_norms and is_norm(module))
    ]


def _is_steering(path: str) -> bool:
    return any(_STEERING.match(word.lower()) for word in _WORD.findall(path))


def _layers_of(root: nn.Module, pattern: str, *, with_norms: bool) -> set[str]:
    try:
        matches = find_modules(root, pattern)
    except PlanError as error:
        raise RequestError(
            f"targets has the pattern {pattern!r}",
            limit=str(error),
            way_out="Correct the pattern, for example double_blocks.*.img_attn",
        ) from error
    found = {
        f"{path}.{name}".strip(".")
        for path, module in matches
        for name, part in module.named_modules()
        if is_linear(part) or (with_norms and is_norm(part))
    }
    if not found:
        raise RequestError(
            f"targets has the pattern {pattern!r}",
            limit="No Linear layer is at or below what it matches",
            way_out="Name the parent of a Linear layer, or the layer itself",
        )
    return found
