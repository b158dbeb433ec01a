"""A lent MODEL: usable by autograd, patched as asked, and given back as it was."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy


def snapshot(model):
    """Everything a MODEL holds: objects, values, flags, attributes."""
    tensors = {}
    for path, module in model.model.named_modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    with torch.inference_mode():
                        values = tensor.detach().clone()
                    tensors[f"{path}.{name}"] = (
                        id(tensor), type(tensor), tensor.is_inference(), tensor.requires_grad,
                        tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.grad, values,
                    )  # fmt: skip
    attributes = {
        path: {
            name: value
            for name, value in module.__dict__.items()
            if not name.startswith("_") and name not in ("current_weight_patches_uuid",)
        }
        for path, module in model.model.named_modules()
    }
    tables = {
        path: (list(module._modules), list(module._parameters), list(module._buffers))
        for path, module in model.model.named_modules()
    }
    return tensors, attributes, tables


def assert_same(before, after):
    assert before[0].keys() == after[0].keys()
    for name, values in before[0].items():
        assert values[:-1] == after[0][name][:-1], name
        assert torch.equal(values[-1], after[0][name][-1]), name
    assert before[1] == after[1]
    assert before[2] == after[2]


def borrow(model, dtype=torch.float32, keep_on_host=True):
    from comfyui_ferry.core.comfy_adapter.trainable_model import borrowed_model

    return borrowed_model(model, dtype=dtype, keep_on_host=keep_on_host)


@pytest.mark.parametrize("inside_inference_mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_given_back_as_it_was(inside_inference_mode, dtype):
    model = PATCHERS["flux"].build()
    before = snapshot(model)
    with torch.inference_mode(inside_inference_mode):
        with borrow(model, dtype) as patcher:
            tensors = [*patcher.model.parameters(), *patcher.model.buffers()]
            assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors)
            assert not torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled() is inside_inference_mode
    assert_same(before, snapshot(model))


def test_weights_that_ask_for_gradients_get_none_meanwhile():
    model = PATCHERS["flux"].build()
    weights = model.model.diffusion_model
    with torch.inference_mode():
        weights.requires_grad_(True)
    before = snapshot(model)
    with borrow(model) as patcher:
        assert not any(parameter.requires_grad for parameter in patcher.model.parameters())
    assert_same(before, snapshot(model))


def test_an_exception_gives_it_back_too():
    model = PATCHERS["flux"].build()
    before = snapshot(model)

    class Stop(BaseException):
        pass

    with pytest.raises(Stop), torch.inference_mode(), borrow(model):
        raise Stop
    assert_same(before, snapshot(model))


def test_tied_weights_stay_tied():
    model = PATCHERS["flux"].build()
    blocks = model.model.diffusion_model.double_blocks
    blocks[1].img_mlp[0].weight = blocks[0].img_mlp[0].weight
    before = snapshot(model)
    with borrow(model) as patcher:
        lent = patcher.model.diffusion_model.double_blocks
        assert lent[1].img_mlp[0].weight is lent[0].img_mlp[0].weight
    assert_same(before, snapshot(model))


def test_there_is_one_copy_of_the_weights_at_a_time():
    model = PATCHERS["flux"].build()
    weight = model.model.diffusion_model.double_blocks[0].img_mlp[0].weight
    address = weight.data_ptr()
    with borrow(model) as patcher:
        lent = patcher.model.diffusion_model.double_blocks[0].img_mlp[0].weight
        assert lent.data_ptr() == address
        assert weight.numel() == 0
        lent.data = lent.data.clone()  # as the offload engine moves it into its own memory
    assert model.model.diffusion_model.double_blocks[0].img_mlp[0].weight is weight
    assert weight.data_ptr() != address


def test_upstream_loras_and_object_patches_are_applied():
    from comfy.model_sampling import CONST, ModelSamplingFlux

    class Shifted(ModelSamplingFlux, CONST):
        pass

    model = PATCHERS["flux"].build().clone()
    key = "diffusion_model.double_blocks.0.img_mlp.0.weight"
    plain = model.model.state_dict()[key].clone()
    change = torch.full_like(plain, 0.5)
    model.add_patches({key: ("diff", (change,))}, 1.0)
    sampling = Shifted()
    model.add_object_patch("model_sampling", sampling)
    before = snapshot(model)
    with borrow(model) as patcher:
        torch.testing.assert_close(patcher.model.state_dict()[key], plain + 0.5)
        assert patcher.model.model_sampling is sampling
    after = snapshot(model)
    # ComfyUI itself restores a patched weight as a new Parameter of the same values.
    for state in (before, after):
        state[0][key] = state[0][key][4:]
    assert_same(before, after)


def test_the_training_flag_of_newer_versions_is_set_and_restored():
    import comfy.model_management as management

    if not hasattr(management, "in_training"):
        pytest.skip("0.3.75 has no such flag")
    with borrow(PATCHERS["flux"].build()):
        assert management.in_training is True
    assert management.in_training is False


def wrap(model):
    import comfy.patcher_extension

    model.add_wrapper(comfy.patcher_extension.WrappersMP.APPLY_MODEL, lambda executor, *args: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrap, "apply_model"),
        (lambda model: model.set_model_unet_function_wrapper(lambda *args: None), "model_function_wrapper"),
        (lambda model: model.set_additional_models("other", [PATCHERS["flux"].build()]), "other"),
        (lambda model: model.set_injections("bypass_lora", []), "bypass_lora"),
        (lambda model: model.attachments.update(ferry_parallel=object()), "Parallel Model"),
    ],
)
def test_what_only_acts_on_sampling_is_refused(change, message):
    from comfyui_ferry.core.comfy_adapter.trainable_model import check_trainable

    model = PATCHERS["flux"].build()
    check_trainable(model)
    change(model)
    with pytest.raises(RequestError, match=message):
        check_trainable(model)


@pytest.mark.parametrize(
    ("native", "asked", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float32, "bf16", torch.bfloat16),
    ],
)
def test_the_dtype_it_trains_in(native, asked, expected):
    from comfyui_ferry.core.comfy_adapter.trainable_model import training_dtype

    model = PATCHERS["flux"].build()
    model.model.manual_cast_dtype = native
    assert training_dtype(model, asked) == expected


def test_fp16_is_not_trained_in():
    from comfyui_ferry.core.comfy_adapter.trainable_model import training_dtype

    model = PATCHERS["flux"].build()
    model.model.manual_cast_dtype = torch.float16
    assert training_dtype(model, "auto") in (torch.bfloat16, torch.float32)
