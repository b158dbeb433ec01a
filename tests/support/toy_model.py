"""A plain PyTorch model with two streams, and its plan: what a model author outside ComfyUI writes.

It has what real models have: joint attention with positions and masks, cross-attention, in-place
blocks, modulation by frame, an index that cuts the image tokens, residuals from outside.
"""

from __future__ import annotations

from typing import Any

import torch
from comfyui_ferry.core.parallel import ModelPlan, ParallelMethod
from comfyui_ferry.core.parallel.plan import (
    ControlResiduals,
    ExpandThenShard,
    Gather,
    Local,
    LocalAttention,
    LocalIndex,
    LocalSlices,
    ModuleRule,
    Replicated,
    SelfAttention,
    Shard,
    Split,
)
from torch import nn
from torch.nn import functional as F

from .tiny_models import Inputs, noise, randomize

WIDTH = 12
HEADS = 3
TEXT, IMAGE = 5, 17


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None,
    skip_reshape: bool = False, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention by the convention that ``core.parallel.attention.local`` describes."""
    if not skip_reshape:
        q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class ToyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_text, self.qkv_image = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.cross = ToyCross()
        self.joint = ToyJoint()

    def forward(self, image, text, position, frames, cut, rows, memory, mask, transformer_options):
        joint = torch.cat((self.qkv_text(text), self.qkv_image(image)), 1)
        mixed = self.joint(joint, position, mask, transformer_options)
        text += mixed[:, : text.shape[1]]
        image += mixed[:, text.shape[1] :] * (frames if frames.shape[1] > 1 else 1.0)
        image += self.cross(image, memory, transformer_options)
        if cut is not None:
            image = torch.cat((image[:, :cut] * 2, image[:, cut:] * 0.5), 1)
        for start, stop, factor in rows or ():
            image[:, start:stop] *= factor
        return image, text


class ToyJoint(nn.Module):
    def forward(self, joint, position, mask, transformer_options):
        override = transformer_options.get(
            "override", lambda function, *args, **kwargs: function(*args, **kwargs)
        )
        q, k, v = joint.chunk(3, -1)
        return override(attention, q + position, k + position, v, HEADS, mask)


class ToyCross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, image, memory, transformer_options):
        override = transformer_options.get(
            "override", lambda function, *args, **kwargs: function(*args, **kwargs)
        )
        k, v = self.kv(memory).chunk(2, -1)
        return override(attention, self.q(image), k, v, HEADS)


class ToyModel(nn.Module):
    """Two blocks between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(2))
        self.out = nn.Linear(WIDTH, 2)

    def forward(
        self, image, text, position, frames, memory, mask=None, cut=None, rows=None, control=None,
        transformer_options=None,
    ):  # fmt: skip
        image, text, options = image * 1.0, text * 1.0, transformer_options or {}
        for index, block in enumerate(self.blocks):
            image, text = block(image, text, position, frames, cut, rows, memory, mask, options)
            if control is not None:
                add = control["blocks"][index]
                image[:, : add.shape[1]] += add
        return self.out(image)


PLAN = ModelPlan(
    name="Toy",
    class_path="ferry_support.toy_model.ToyModel",
    heads="heads",
    rules=(
        ModuleRule("blocks.0", inputs=(Split("text", "text"), Split("image", "image"))),
        ModuleRule(
            "blocks.*",
            inputs=(
                Local("text", ("text",)),
                Local("image", ("image",)),
                Shard("position", ("text", "image")),
                ExpandThenShard("frames", "image"),
                LocalIndex("cut", "image"),
                LocalSlices("rows", "image"),
                Replicated("memory"),
                Replicated("mask"),
                Replicated("transformer_options"),
            ),
        ),
        ModuleRule("blocks.*.joint", attention=SelfAttention(("text", "image"))),
        ModuleRule("blocks.*.cross", attention=LocalAttention()),
        ModuleRule("out", gather=Gather(("image",), discard=("text",))),
    ),
    methods=frozenset({ParallelMethod.ULYSSES}),
    control=ControlResiduals("control", keys=("blocks",), stream="image"),
)


def build_toy() -> ToyModel:
    model = ToyModel()
    randomize(model)
    return model


def toy_call(*, text: int = TEXT, image: int = IMAGE, batch: int = 2, **more: Any) -> Inputs:
    """Return the keyword arguments of one call."""
    inputs = {
        "image": noise(batch, image, WIDTH), "text": noise(batch, text, WIDTH),
        "position": noise(1, text + image, WIDTH), "frames": noise(batch, 1, WIDTH),
        "memory": noise(batch, 4, WIDTH),
    }  # fmt: skip
    return inputs | more
