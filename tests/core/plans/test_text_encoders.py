"""Tensor parallelism of ComfyUI's text encoders: real gloo processes, tiny models of its own classes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import check_plan, largest_rank_bytes
from comfyui_ferry.core.plans import TEXT_ENCODER_PLANS, find_text_encoder_plan
from ferry_support.model_sections import PartRow, check_part, skip_without_results
from ferry_support.parity import TOLERANCE
from ferry_support.ranks import run_ranks
from ferry_support.tensor_parity import encoder_errors, weight_bytes
from ferry_support.tiny_encoders import build_gemma3, build_language_model, build_qwen_vl, build_t5, encode
from ferry_support.tiny_models import is_newer_comfyui
from torch import nn

pytestmark = pytest.mark.comfy

ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "T5": build_t5,
    "UMT5": lambda: build_t5(model_type="umt5", is_gated_act=False),
    "Qwen2.5-VL": build_qwen_vl,
    "Llama": lambda: build_language_model("Llama2"),
    "Mistral": lambda: build_language_model("Mistral3Small24B"),
    "Qwen3": lambda: build_language_model("Qwen3_4B"),
    "Gemma 2": lambda: build_language_model("Gemma2_2B"),
}
NEWER = {
    "Qwen3, fused": lambda: build_language_model("Qwen3_8B", merged_qkv=True, merged_mlp=True),
    "Gemma 3": build_gemma3,
    "Ovis 2.5": lambda: build_language_model("Ovis25_2B"),
}
ROWS = (
    PartRow("T5", "T5-XXL: FLUX.1, Stable Diffusion 3 and 3.5, LTX-Video", ("T5",)),
    PartRow("T5 with biases in every block", "UMT5-XXL: Wan", ("UMT5",)),
    PartRow("Qwen25_7BVLI", "Qwen-Image, HunyuanVideo 1.5, LongCat-Image", ("Qwen2.5-VL",)),
    PartRow("Qwen3_4B, Qwen3_8B", "Z-Image, FLUX.2-klein", ("Qwen3", "Qwen3, fused")),
    PartRow("Ovis25_2B", "Ovis-Image", ("Ovis 2.5",), newer_only=True),
    PartRow("Mistral3Small24B", "FLUX.2-dev", ("Mistral",)),
    PartRow("Llama2", "Llama 3 8B: HunyuanVideo 1.0, HiDream", ("Llama",)),
    PartRow("Gemma2_2B", "Lumina 2", ("Gemma 2",)),
    PartRow("Gemma3_12B", "LTX-2", ("Gemma 3",), newer_only=True),
)
INTRO = """\
By *Parallel Text Encoder* (tensor parallel, uneven heads, padded prompts); scaled fp8 and int8 with
ComfyUI 0.33 as well (`tests/core/comfy_adapter/test_parallel_clip.py`)."""
# Case -> ranks -> error, of this run.
SEEN: dict[str, dict[int, float]] = {}


def class_path(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_the_whole_encoder(world_size: int) -> None:
    """Five heads, and three key heads of two query heads each, with a padded prompt."""
    models = {}
    for name, build in (ENCODERS | (NEWER if is_newer_comfyui() else {})).items():
        model = build()
        models[name] = (model, find_text_encoder_plan(class_path(model)), encode(model))
    for seen in run_ranks(encoder_errors, world_size, models, encode):
        assert seen.keys() == models.keys()
        for name, what in seen.items():
            # fp32: partial sums of the ranks in another order.
            assert what["error"] <= TOLERANCE, (name, what)
            SEEN.setdefault(name, {})[world_size] = what["error"]
            assert what["restored"], name
            # Two of three heads on two ranks; the vision tower's merger stays whole.
            assert what["held"] < 0.75, (name, what)


def test_the_published_table_is_what_was_seen() -> None:
    skip_without_results({len(errors) for errors in SEEN.values()} != {2})
    check_part("text encoders", "Text encoders", INTRO, ROWS, SEEN)


def test_half_of_the_large_encoders_is_on_each_of_two_ranks() -> None:
    import comfy.ops
    from comfy.text_encoders.llama import Qwen25_7BVLI
    from comfy.text_encoders.t5 import T5

    xxl = {
        "num_layers": 24, "d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 10240, "vocab_size": 32128,
        "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True, "model_type": "t5",
    }  # fmt: skip
    for cls, config in ((T5, xxl), (Qwen25_7BVLI, {})):
        model = cls(config, torch.bfloat16, "meta", comfy.ops.disable_weight_init)
        plan = find_text_encoder_plan(class_path(model))
        check_plan(model, plan)
        assert largest_rank_bytes(model, plan, 2) <= 0.51 * weight_bytes(model)


def test_every_plan_names_a_class_of_the_newer_comfyui() -> None:
    import importlib

    for plan in TEXT_ENCODER_PLANS:
        module, _, name = plan.class_path.rpartition(".")
        assert hasattr(importlib.import_module(module), name) or not is_newer_comfyui(), plan.name


def test_an_encoder_without_a_plan_is_refused() -> None:
    with pytest.raises(RequestError, match=r"comfy\.sd1_clip\.Other was asked.*T5 \(comfy"):
        find_text_encoder_plan("comfy.sd1_clip.Other")
