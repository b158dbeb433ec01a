"""Run a transformer of one's own on several GPUs by a plan, and compare with one.

    pip install -e . && torchrun --nproc-per-node 2 docs/examples/parallel_transformer.py --ring 1

The model knows nothing of ranks. It does one thing for its users: whoever calls it may give an ``override``
for its attention. The plan says what is a token sequence; the engine does the rest, for any length.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from comfyui_ferry.core.parallel import ModelPlan, ParallelDims, ParallelMethod, build_mesh, parallelize
from comfyui_ferry.core.parallel.plan import (
    Gather,
    Local,
    ModuleRule,
    Replicated,
    SelfAttention,
    Shard,
    Split,
)
from torch import nn

Override = Callable[..., torch.Tensor] | None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: Any = None, **options: Any
) -> torch.Tensor:
    """``[B, S, H * D]``, or ``[B, H, S, D]`` with ``skip_reshape``, to ``[B, S, H * D]``."""
    if not options.get("skip_reshape"):
        q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    output = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return output.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention and feed-forward, each with its residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, position: torch.Tensor, override: Override) -> torch.Tensor:
        """``x`` and ``position`` are ``[B, S, width]``."""
        q, k, v = self.qkv(x).chunk(3, -1)
        arguments = (q + position, k + position, v, self.heads)
        x = x + self.out(attention(*arguments) if override is None else override(attention, *arguments))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """Blocks between two projections."""

    def __init__(self, width: int = 60, heads: int = 5, depth: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.project = nn.Linear(8, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, transformer_options: dict[str, Any] | None = None
    ) -> torch.Tensor:
        """``x`` is ``[B, S, 8]``, ``position`` ``[B, S, width]``."""
        override = (transformer_options or {}).get("override")
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, position, override)
        return self.project(x)


PLAN = ModelPlan(
    name="Transformer",
    class_path=f"{Transformer.__module__}.{Transformer.__qualname__}",
    heads="heads",
    rules=(
        ModuleRule("blocks.0", inputs=(Split("x", "tokens"),)),
        ModuleRule(
            "blocks.*",
            inputs=(Local("x", ("tokens",)), Shard("position", ("tokens",)), Replicated("override")),
            attention=SelfAttention(("tokens",)),
        ),
        ModuleRule("project", gather=Gather(("tokens",))),
    ),
    methods=frozenset({ParallelMethod.ULYSSES, ParallelMethod.RING}),
)


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ring", type=int, default=1, help="Ring degree; the rest of the ranks is Ulysses")
    ring = parser.parse_args().ring
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    torch.manual_seed(0)  # the same weights and inputs on every rank
    model = Transformer().to(device).eval().requires_grad_(False)
    x, position = torch.randn(2, 131, 8, device=device), torch.randn(1, 131, 60, device=device)
    alone = model(x, position)
    layout = build_mesh(ParallelDims(ring=ring, ulysses=dist.get_world_size() // ring))
    handle = parallelize(model, PLAN, group=layout.sequence_group)
    parallel = handle.run(model, x, position, {"override": handle.attention_override})
    handle.remove()
    difference = ((parallel - alone).abs().max() / alone.abs().max()).item()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, 131 tokens, 5 heads: relative difference {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
