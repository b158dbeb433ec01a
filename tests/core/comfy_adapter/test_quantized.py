"""Scaled fp8 weights in a worker: the very numbers that ComfyUI has, whole and cut, with and without a LoRA.

Whole samplings with such weights are in ``test_tensor_model.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.comfy_adapter import quantized
from comfyui_ferry.core.comfy_adapter.model_export import describe_model, named_parameters, named_tensors
from comfyui_ferry.core.comfy_adapter.patch_messages import encode_patches
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import RankLayout
from ferry_support.parity import relative_error, world_group
from ferry_support.ranks import run_ranks
from ferry_support.sampling import with_lora
from ferry_support.scaled_fp8 import scaled_fp8_patcher
from ferry_support.tiny_models import flux_call, is_newer_comfyui, noise
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _newer_only():
    if not is_newer_comfyui():
        pytest.skip("0.3.75 holds scaled fp8 in another way")


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if quantized.is_scaled_fp8(tensor) else tensor  # type: ignore[operator]


def expected_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return every weight as ComfyUI's own patching makes it."""
    with torch.inference_mode():
        patched = {
            name.removeprefix("diffusion_model."): model.patch_weight_to_device(name, return_weight=True)
            for name in model.patches
        }
    return dict(named_parameters(model.model.diffusion_model)) | patched


@pytest.mark.parametrize("layout", ["float8_e4m3fn", "float8_e5m2"])
def test_each_rank_has_its_part_of_what_comfyui_computes(layout: str) -> None:
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel

    model = with_lora(scaled_fp8_patcher("flux", layout))
    description = describe_model(model.model)
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model.model.diffusion_model).items()}
    assert sum(tensor.dtype == getattr(torch, layout) for tensor in tensors.values()) > 10
    message = encode_patches(model.patches)
    plain, patched = dict(named_parameters(model.model.diffusion_model)), expected_weights(model)

    def held(worker: WorkerModel, expected: dict[str, torch.Tensor]) -> int:
        num_quantized = 0
        for name, tensor in named_parameters(worker.module).items():
            whole = values_of(expected[name])
            part = whole if worker.shards is None else worker.shards.take(name, whole)
            assert part is not None, name
            assert torch.equal(values_of(tensor), part), name
            num_quantized += quantized.is_scaled_fp8(tensor)
        return num_quantized

    def check(layout: RankLayout) -> None:
        with torch.inference_mode():
            worker = WorkerModel(description, tensors, device=torch.device("cpu"), layout=layout)
            num_quantized = held(worker, plain)
            worker.apply_patches(message)
            assert held(worker, patched) == num_quantized > 10
            worker.apply_patches({})
            held(worker, plain)

    check(RankLayout(0, None))
    run_ranks(lambda: check(RankLayout(0, None, world_group())), 2)


def test_products_of_quantized_inputs_equal_one_rank() -> None:
    """As on GPUs with fp8 kernels: inputs are quantized too, each rank's part by the scale of the whole."""
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel

    module = scaled_fp8_patcher("flux").model
    description = describe_model(module)
    description["quantized"]["arguments"]["disabled"] = []
    for layer in description["quantized"]["layers"].values():
        layer["attributes"]["_full_precision_mm"] = False
    tensors = {name: tensor.detach() for name, tensor in named_tensors(module.diffusion_model).items()}
    call = flux_call(x=noise(1, 16, 12, 10), transformer_options={})

    def output(group: Any = None) -> torch.Tensor:
        layout = RankLayout(0, None, group)
        return WorkerModel(description, tensors, device=torch.device("cpu"), layout=layout).forward(call)

    alone = output()
    # An input at the edge of two fp8 values may be rounded to the other one: 1 in 16 of it. None is seen.
    for shared in run_ranks(lambda: output(world_group()), 2):
        assert relative_error(shared, alone) <= 1e-3


def test_other_layouts_are_refused_by_name() -> None:
    from comfy.quant_ops import QuantizedTensor

    model = PATCHERS["flux"].build().model
    layer = model.diffusion_model.double_blocks[0].img_attn.proj
    quantized_weight = QuantizedTensor.from_float(layer.weight.detach(), "TensorCoreNVFP4Layout")
    layer.weight = torch.nn.Parameter(quantized_weight, requires_grad=False)
    with pytest.raises(RequestError, match=r"img_attn\.proj\.weight is a QuantizedTensor TensorCoreNVFP4"):
        describe_model(model)
