"""Counting on the meta device, for ComfyUI's own classes."""

from __future__ import annotations

import pytest
import torch
from ferry_support.tiny_cases import CASES
from ferry_support.tiny_models import is_newer_comfyui

pytestmark = pytest.mark.comfy

# One of each class, each with all that it can be given.
NAMES = (
    "flux1-kontext control", "flux2-klein", "qwen edit, control", "wan i2v", "z-image",
    "sd3.5-medium batch 2",
    "hunyuan-1.5", "ltxv token times", "ltx2", "sdxl",
)  # fmt: skip


def _work(name, **changes):
    from comfyui_ferry.core.parallel.dry_run import count_work
    from ferry_support.parity import forward_of, moved, plan_of

    case = CASES[name]
    model, inputs = case.build().to("meta"), moved(case.inputs(), torch.device("meta"))

    def call(override):
        options = {"optimized_attention_override": override}
        return forward_of(model)(**inputs | {"transformer_options": options})

    return count_work(model, plan_of(model), call, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_every_class_can_be_counted(name):
    if CASES[name].newer_only and not is_newer_comfyui():
        pytest.skip("not in this ComfyUI")
    work = _work(name)
    assert work.linear_flops > 0 and work.attention
    assert 0 < work.cut_weight_bytes < work.weight_bytes
    assert any(call.over_sequence for call in work.attention)
    assert work.reductions > 0 and work.reduced_elements > 0


def test_the_counts_of_qwen_image_by_hand():
    work = _work("qwen", conditionings=2)
    (call,) = work.attention
    assert call.queries == call.keys and call.count == 2
    assert (call.heads, call.head_channels) == (3, 16)
    tokens, width, layers = call.queries, 48, 2
    # Query, key, value, output: 4; feed-forward: 8; a token and layer. Modulation and embeddings come on top.
    blocks = 2 * 12 * width * width * tokens * layers
    assert blocks < work.linear_flops < 2 * blocks
    # Attention's output and the feed-forward's, of text and image.
    assert work.reductions == 4 * layers
    assert work.reduced_elements == 2 * tokens * width * layers
    assert work.conditionings == 2
    assert work.operations > 100
