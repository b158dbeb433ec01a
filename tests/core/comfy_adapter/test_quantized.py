"""Quantized weights in a worker: the very numbers that ComfyUI has, whole and cut, with and without a LoRA.

Whole samplings with such weights are in ``test_tensor_model.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.comfy_adapter import quantized
from comfyui_ferry.core.comfy_adapter.model_export import (
    class_path,
    describe_model,
    named_parameters,
    named_tensors,
)
from comfyui_ferry.core.comfy_adapter.patch_messages import encode_patches
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import ParallelDims, RankLayout, build_mesh
from comfyui_ferry.core.plans import find_plan
from ferry_support.parity import relative_error, world_group
from ferry_support.quantized_patchers import quantized_patcher
from ferry_support.ranks import run_ranks
from ferry_support.sampling import ULYSSES_2, parallel, with_lora
from ferry_support.tiny_models import flux_call, is_newer_comfyui, noise

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _newer_only():
    if not is_newer_comfyui():
        pytest.skip("0.3.75 holds quantized weights in another way")


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if quantized.is_quantized(tensor) else tensor  # type: ignore[operator]


def expected_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return every weight as ComfyUI's own patching makes it."""
    with torch.inference_mode():
        patched = {
            name.removeprefix("diffusion_model."): model.patch_weight_to_device(name, return_weight=True)
            for name in model.patches
        }
    return dict(named_parameters(model.model.diffusion_model)) | patched


@pytest.mark.parametrize("form", ["float8_e4m3fn", "nvfp4", "mxfp8", "int8_tensorwise"])
def test_each_rank_has_its_part_of_what_comfyui_computes(form: str) -> None:
    """Of fp8 a part; of the layouts with scales for rows or blocks the whole."""
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel

    model = with_lora(quantized_patcher("flux", form))
    description = describe_model(model.model)
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model.model.diffusion_model).items()}
    message = encode_patches(model.patches)
    plain, patched = dict(named_parameters(model.model.diffusion_model)), expected_weights(model)

    def held(worker: WorkerModel, expected: dict[str, torch.Tensor]) -> int:
        num_quantized = 0
        for name, tensor in named_parameters(worker.module).items():
            whole = values_of(expected[name])
            part = whole if worker.shards is None else worker.shards.take(name, whole)
            assert part is not None, name
            assert torch.equal(values_of(tensor), part), name
            num_quantized += quantized.is_quantized(tensor)
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
    if form.startswith("float8"):
        run_ranks(lambda: check(RankLayout(0, None, world_group())), 2)


@pytest.mark.parametrize(
    ("form", "dims"),
    [
        ("float8_e4m3fn", ParallelDims(tp=2)),
        # PyTorch has no products of nvfp4 and mxfp8 on the CPU.
        ("int8_tensorwise", ParallelDims(ulysses=2)),
    ],
    ids=str,
)
def test_products_of_quantized_inputs_equal_one_rank(form: str, dims: ParallelDims) -> None:
    """As on GPUs with kernels for the layout: inputs are quantized too, by scales that all ranks agree on."""
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel

    model = quantized_patcher("flux", form).model
    description = describe_model(model)
    description["quantized"]["arguments"]["disabled"] = []
    for layer in description["quantized"]["layers"].values():
        layer["attributes"]["_full_precision_mm"] = False
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model.diffusion_model).items()}
    call = flux_call(x=noise(1, 16, 12, 10), transformer_options={})

    def output(layout: RankLayout) -> torch.Tensor:
        return WorkerModel(description, tensors, device=torch.device("cpu"), layout=layout).forward(call)

    alone = output(RankLayout(0, None))
    # Sums in another order may push an input over the edge between two quantized values.
    for shared in run_ranks(lambda: output(build_mesh(dims)), 2):
        assert relative_error(shared, alone) <= 1e-2


def test_what_would_change_numbers_is_refused_by_name() -> None:
    degrees = {"gpus": 2, "cfg_degree": 1, "ulysses_degree": 1, "tensor_parallel_degree": 2}
    with pytest.raises(RequestError, match=r"tensor_parallel_degree .* is a TensorWiseINT8Layout"):
        parallel(quantized_patcher("flux", "int8_tensorwise"), degrees)
    with pytest.raises(RequestError, match=r"weight is a TensorCoreNVFP4Layout without an input scale"):
        parallel(quantized_patcher("flux", "nvfp4", input_scales=False), ULYSSES_2)
    parallel(quantized_patcher("flux", "int8_tensorwise"), ULYSSES_2)
    narrow = quantized_patcher("flux", num_heads=6, axes_dim=[2, 2, 4])
    parallel(narrow, degrees)  # computed from plain values: the CPU does not multiply fp8
    network = narrow.model.diffusion_model
    network.single_blocks[1].linear2._full_precision_mm = False
    with pytest.raises(RequestError, match=r"=2 .* single_blocks\.1\.linear2\.weight would be cut to 120 of"):
        parallel(narrow, degrees)
    parallel(narrow, degrees | {"gpus": 3, "tensor_parallel_degree": 3})
    assert quantized.max_cut(network, find_plan(class_path(network)), most=4) == 1
    smoothed = quantized_patcher("flux")
    layer = smoothed.model.diffusion_model.double_blocks[0].img_attn.proj
    scale = layer.weight._params.scale
    object.__setattr__(layer.weight._params, "scale", scale.expand(layer.out_features, 1))
    with pytest.raises(RequestError, match=r"img_attn\.proj\.weight is a .* with several scales"):
        parallel(smoothed, degrees)
    object.__setattr__(layer.weight._params, "scale", scale)
    layer.pre_quant_scale = torch.nn.Parameter(torch.ones(layer.in_features), requires_grad=False)
    with pytest.raises(RequestError, match=r"img_attn\.proj\.pre_quant_scale holds a value for each channel"):
        parallel(smoothed, degrees)


def test_other_layouts_are_refused_by_name() -> None:
    model = quantized_patcher("flux").model
    weight = model.diffusion_model.double_blocks[0].img_attn.proj.weight
    weight._layout_cls = "TensorCoreConvRotW4A4Layout"
    with pytest.raises(RequestError, match=r"img_attn\.proj\.weight is a QuantizedTensor TensorCoreConvRot"):
        describe_model(model)
