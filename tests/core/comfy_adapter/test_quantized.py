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
from comfyui_ferry.core.comfy_adapter.quantized_parts import max_cut
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.parallel import ParallelDims, RankLayout, build_mesh
from comfyui_ferry.core.plans import find_plan
from ferry_support.parity import TOLERANCE, relative_error, world_group
from ferry_support.quantized_patchers import quantized_patcher
from ferry_support.ranks import run_ranks
from ferry_support.sampling import ULYSSES_2, parallel, with_lora
from ferry_support.tiny_models import flux_call, is_newer_comfyui, noise, wan_call

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


# Heads as wide as the runs that share a scale.
WIDE = {"hidden_size": 96, "num_heads": 3, "axes_dim": [8, 12, 12]}


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


@pytest.mark.parametrize("form", ["float8_e4m3fn", "nvfp4", "mxfp8", "int8_tensorwise", "int8 by channels"])
def test_each_rank_has_its_part_of_what_comfyui_computes(form: str) -> None:
    """Values and scales of the whole; int8 has columns of zeros behind its part of a row."""
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel

    model = with_lora(quantized_patcher("flux", form, **WIDE))
    description = describe_model(model.model)
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model.model.diffusion_model).items()}
    message = encode_patches(model.patches)
    plain, patched = dict(named_parameters(model.model.diffusion_model)), expected_weights(model)

    def held(worker: WorkerModel, expected: dict[str, torch.Tensor]) -> int:
        num_quantized = 0
        for name, tensor in named_parameters(worker.module).items():
            whole = values_of(expected[name])
            part = whole if worker.held.shards is None else worker.held.shards.take(name, whole)
            assert part is not None, name
            values = values_of(tensor)
            if values.shape != part.shape and form.startswith("int8"):
                assert not values[:, part.shape[1] :].any(), name
                values = values[:, : part.shape[1]]
            assert torch.equal(values, part), name
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
    run_ranks(lambda: check(RankLayout(0, None, world_group())), 2)


@pytest.mark.parametrize(
    ("kind", "form", "dims"),
    [
        ("flux", "float8_e4m3fn", ParallelDims(tp=2)),
        ("flux", "int8_tensorwise", ParallelDims(ulysses=2)),
        ("flux", "int8 by channels", ParallelDims(tp=2)),
        # Its feed-forward multiplies past the layer's forward.
        ("wan", "int8_tensorwise", ParallelDims(tp=3)),
        ("flux", "mxfp8", ParallelDims(tp=2)),
        ("flux", "nvfp4", ParallelDims(tp=3)),
    ],
    ids=str,
)
def test_products_of_quantized_inputs_equal_one_rank(
    kind: str, form: str, dims: ParallelDims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs with kernels for the layout: inputs are quantized too, by scales that all ranks agree on."""
    import comfy_kitchen
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel

    def no_kernel(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError

    # Then the layouts multiply the plain values of quantized inputs and weights.
    monkeypatch.setattr(comfy_kitchen, "scaled_mm_mxfp8", no_kernel)
    monkeypatch.setattr(comfy_kitchen, "scaled_mm_nvfp4", no_kernel)

    model = quantized_patcher(kind, form, **(WIDE if kind == "flux" else {})).model
    description = describe_model(model)
    description["quantized"]["arguments"]["disabled"] = []
    for layer in description["quantized"]["layers"].values():
        layer["attributes"]["_full_precision_mm"] = False
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model.diffusion_model).items()}
    make = {"flux": flux_call, "wan": lambda **call: wan_call(channels=16, **call)}[kind]
    shape = {"flux": (1, 16, 12, 10), "wan": (1, 16, 3, 10, 7)}[kind]
    calls = [make(x=noise(*shape, seed=seed), transformer_options={}) for seed in range(3)]

    def outputs(layout: RankLayout) -> list[torch.Tensor]:
        worker = WorkerModel(description, tensors, device=torch.device("cpu"), layout=layout)
        return [worker.forward(call) for call in calls]

    alone = outputs(RankLayout(0, None))
    for shared in run_ranks(lambda: outputs(build_mesh(dims)), dims.world_size):
        errors = list(map(relative_error, shared, alone))
        # Sums in another order may push an input over the edge between two quantized values, which is rare.
        assert min(errors) <= TOLERANCE and max(errors) <= 1e-2, errors


def test_what_would_change_numbers_is_refused_by_name() -> None:
    degrees = {"gpus": 2, "cfg_degree": 1, "ulysses_degree": 1, "tensor_parallel_degree": 2}
    unscaled = quantized_patcher("flux", "nvfp4", input_scales=False)
    parallel(unscaled, ULYSSES_2)
    for layer in filter(quantized.is_mixed_linear, unscaled.model.diffusion_model.modules()):
        layer._full_precision_mm = False
    with pytest.raises(RequestError, match=r"weight is a TensorCoreNVFP4Layout without an input scale"):
        parallel(unscaled, ULYSSES_2)
    with pytest.raises(RequestError, match=r"linear2\.weight would be cut at channel 24, inside a run of 16"):
        parallel(quantized_patcher("flux", "nvfp4", hidden_size=24, axes_dim=[2, 2, 4]), degrees)
    rotated = quantized_patcher("flux", "int8_tensorwise")
    params = rotated.model.diffusion_model.single_blocks[0].linear1.weight._params
    object.__setattr__(params, "convrot", True)
    with pytest.raises(RequestError, match=r"single_blocks\.0\.linear1\.weight is a .* \(ConvRot\)"):
        parallel(rotated, degrees)
    narrow = quantized_patcher("flux", num_heads=6, axes_dim=[2, 2, 4])
    parallel(narrow, degrees)  # computed from plain values: the CPU does not multiply fp8
    network = narrow.model.diffusion_model
    network.single_blocks[1].linear2._full_precision_mm = False
    with pytest.raises(RequestError, match=r"=2 .* single_blocks\.1\.linear2\.weight would be cut to 120 of"):
        parallel(narrow, degrees)
    parallel(narrow, degrees | {"gpus": 3, "tensor_parallel_degree": 3})
    assert max_cut(network, find_plan(class_path(network)), most=4) == 1
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
