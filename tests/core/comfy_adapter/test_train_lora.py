"""Training whole MODELs: right gradients in every mode, nothing left behind, files that load."""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import os
import re
import textwrap
import types

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, SaveError, TrainingError
from ferry_support.merged_lora import merged
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS, TRAINABLE

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]

# The same kernels on the same values; only the order in which gradients of a shared tensor are added
# may differ. 3e-7 is seen; 1.2e-6 for the UNet, whose skip connections add gradients everywhere.
EXACT = {"flux": 1e-6, "qwen": 1e-6, "wan": 1e-6, "z-image": 1e-6, "sd3": 1e-6, "sdxl": 5e-6}
# Against weights with the LoRA merged in: one matmul instead of two, through the whole network.
# 3e-5 is seen.
MERGED = 5e-4


def request(**changes):
    from comfyui_ferry.core.comfy_adapter.train_lora import SaveSettings, TrainingRequest
    from comfyui_ferry.core.training import LoraConfig, OffloadSettings, TrainingConfig

    lora = {"rank": 4, "alpha": 8.0} | changes.pop("lora", {})
    training = {"steps": 3, "learning_rate": 1e-3} | changes.pop("training", {})
    offload = changes.pop("offload", {})
    saves = {"prefix": changes.pop("save_prefix", "")} | changes.pop("saves", {})
    return TrainingRequest(
        LoraConfig(**lora), TrainingConfig(**training), OffloadSettings(**offload), SaveSettings(**saves),
        **({"save_dtype": "fp32"} | changes),
    )  # fmt: skip


def train(kind, model=None, *, latents=None, captions=None, **changes):
    from comfyui_ferry.core.comfy_adapter.train_lora import run_lora_training

    tiny = PATCHERS[kind]
    model = model or tiny.build()
    with torch.inference_mode():  # as ComfyUI runs nodes
        return run_lora_training(
            model, latents or [tiny.latent(0, 2)], captions or [tiny.caption(0), tiny.caption(1)],
            request(**changes),
        )  # fmt: skip


def fill(adapters):
    """Move the adapters away from their start, where half of all gradients are zero."""
    for index, adapter in enumerate(adapters.adapters().values()):
        adapter.lora_up.data.copy_(0.05 * noise(*adapter.lora_up.shape, seed=index))


def gradients(kind, device="cpu", **changes):
    """The gradient of every LoRA tensor of one batch, in one mode."""
    from comfyui_ferry.core.comfy_adapter.prepared_model import prepared_model
    from comfyui_ferry.core.comfy_adapter.trainable_model import borrowed_model
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess

    asked = request(**changes)
    model = PATCHERS[kind].build(load_device=device)
    on_host = asked.offload.enabled
    with borrowed_model(model, dtype=torch.float32, keep_on_host=on_host) as patcher:
        process = ComfyProcess(patcher, patcher.load_device, seed=0)
        samples, batch = data(kind, patcher)
        with prepared_model(patcher, asked) as run:
            run.rewrite(process, samples, seed=0)
            fill(run.adapters)
            backward(process, batch)
            if run.manager is not None:
                run.manager.after_backward()
                stats = run.manager.stats()
                assert stats.streamed_bytes > 0
            found = {
                f"{path}.{name}": parameter.grad.to("cpu", copy=True)
                for path, adapter in run.adapters.adapters().items()
                for name, parameter in adapter.named_parameters()
                if parameter.grad is not None
            }
    assert all(parameter.grad is None for parameter in model.model.parameters())
    return found


def data(kind, patcher):
    from comfyui_ferry.core.comfy_adapter.training_inputs import read_samples
    from comfyui_ferry.core.training import draw_batches

    tiny = PATCHERS[kind]
    samples = read_samples(patcher, [tiny.latent(0, 2)], [tiny.caption(0), tiny.caption(1, 9)])
    return samples, draw_batches(samples, seed=0, micro_step=0)[0]


def backward(process, batch):
    from comfyui_ferry.core.training import LOSSES, sample_losses

    losses = sample_losses(
        process, batch.clean.to(process.device), batch.conditions, noise=batch.noise.to(process.device),
        positions=batch.positions, loss=LOSSES["MSE"],
    )  # fmt: skip
    losses.mean().backward()


def worst(actual, expected):
    assert actual.keys() == expected.keys()
    assert len(expected) > 10
    return max(
        float((actual[name] - value).norm() / value.norm().clamp_min(1e-12))
        for name, value in expected.items()
        if value.norm() > 0
    )


def rewrite_by_text(network):
    """Take in-place additions out of the blocks by text, as a person would: no code of ours."""
    for block in network.modules():
        kind = type(block)
        if kind.__module__.startswith("comfy.") and "forward" in kind.__dict__:
            source = textwrap.dedent(inspect.getsource(kind.forward))
            changed = re.sub(r"^( *)(img|txt|x) \+= (.*)$", r"\1\2 = \2 + (\3)", source, flags=re.MULTILINE)
            if changed != source:
                scope = dict(inspect.getmodule(kind).__dict__)
                code = "from __future__ import annotations\n" + changed
                types.FunctionType(compile(code, "rewritten", "exec"), scope)()
                block.forward = types.MethodType(scope["forward"], block)


def merged_gradients(kind):
    """The same gradients from plain autograd: LoRA merged into the weights, nothing of ours installed."""
    from comfyui_ferry.core.comfy_adapter.trainable_model import borrowed_model
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess
    from comfyui_ferry.core.training import LoraAdapters, LoraConfig, select_targets

    model = PATCHERS[kind].build()
    found = {}
    with borrowed_model(model, dtype=torch.float32, keep_on_host=False) as patcher:
        network = patcher.model.diffusion_model
        config = LoraConfig(rank=4, alpha=8.0)
        adapters = LoraAdapters(select_targets(network), config, seed=0, device="cpu")
        fill(adapters)
        rewrite_by_text(network)
        weights, leaves = {}, {}
        for path, adapter in adapters.adapters().items():
            layer = network.get_submodule(path)
            leaves[path] = (
                adapter.lora_down.detach().requires_grad_(), adapter.lora_up.detach().requires_grad_(),
            )  # fmt: skip
            weights[path] = layer.weight
            del layer._parameters["weight"]
            layer.weight = weights[path].detach() + 2.0 * leaves[path][1] @ leaves[path][0]
        _, batch = data(kind, patcher)
        backward(ComfyProcess(patcher, torch.device("cpu"), seed=0), batch)
        for path, (down, up) in leaves.items():
            layer = network.get_submodule(path)
            del layer.weight
            layer._parameters["weight"] = weights[path]
            for name, leaf in (("lora_down", down), ("lora_up", up)):
                if leaf.grad is not None:
                    found[f"{path}.{name}"] = leaf.grad
        for module in network.modules():
            module.__dict__.pop("forward", None)
    return found


PLAIN = {"offload": {"enabled": False}, "gradient_checkpointing": False}
MODES = {
    "checkpointing": {"offload": {"enabled": False}, "gradient_checkpointing": True},
    "offload": {"offload": {}, "gradient_checkpointing": False},
    "both": {"offload": {}, "gradient_checkpointing": True},
    "both, larger parts": {"offload": {"split_threshold_mb": 0.05}, "gradient_checkpointing": True},
    "both, optimizer on cpu": {"offload": {"optimizer_on_cpu": True}, "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def plain_gradients():
    found = {}

    def get(kind):
        if kind not in found:
            found[kind] = gradients(kind, **PLAIN)
        return found[kind]

    return get


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", TRAINABLE)
def test_gradients_are_the_same_in_every_mode(kind, mode, plain_gradients):
    assert worst(gradients(kind, **MODES[mode]), plain_gradients(kind)) <= EXACT[kind]


@pytest.mark.parametrize("kind", TRAINABLE)
def test_gradients_are_those_of_plain_autograd(kind, plain_gradients):
    assert worst(plain_gradients(kind), merged_gradients(kind)) <= MERGED


@pytest.mark.parametrize("kind", TRAINABLE)
def test_a_training_in_every_mode_gives_the_same_lora(kind):
    reference = train(kind, **PLAIN)
    for mode in ("both", "both, optimizer on cpu"):
        result = train(kind, **MODES[mode])
        # Adam divides by the gradient's size: elements near zero turn rounding into whole steps.
        assert result.loss_map["loss"] == pytest.approx(reference.loss_map["loss"], rel=1e-4)
        for name, value in reference.lora.items():
            torch.testing.assert_close(result.lora[name], value, rtol=1e-2, atol=1e-3)


def test_one_latent_is_learned():
    """Streamed; the tests of the families' own values learn one with each of the others."""
    tiny = PATCHERS["flux"]
    result = train(
        "flux", latents=[tiny.latent()], captions=[tiny.caption()], offload={},
        lora={"rank": 16, "alpha": 16.0}, training={"steps": 60, "learning_rate": 5e-3, "batch_size": 2},
    )  # fmt: skip
    losses = result.loss_map["loss"]
    assert len(losses) == 60
    # Random weights, so the start is far off: 0.3 is seen.
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def values(model):
    with torch.inference_mode():
        return {name: value.clone() for name, value in model.model.state_dict().items()}


def attributes(model):
    return {
        path: {name: value for name, value in module.__dict__.items() if name[0] != "_"}
        for path, module in model.model.named_modules()
    }


def assert_untouched(model, before):
    after = values(model)
    assert list(after) == list(before[0])
    assert all(torch.equal(value, before[0][name]) for name, value in after.items())
    assert attributes(model) == before[1]
    assert all(parameter.grad is None for parameter in model.model.parameters())
    assert all(parameter.is_inference() for parameter in model.model.parameters())


@pytest.mark.parametrize("kind", TRAINABLE)
def test_the_model_is_untouched(kind):
    model = PATCHERS[kind].build()
    before = values(model), attributes(model)
    state = torch.get_rng_state()
    train(kind, model)
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), state)


def alive():
    gc.collect()
    return {id(item): item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)}


def test_nothing_of_it_stays_in_memory():
    model = PATCHERS["flux"].build()
    train("flux", model, **MODES["both, optimizer on cpu"])
    before = alive()
    result = train("flux", model, **MODES["both, optimizer on cpu"])
    kept = {id(tensor) for tensor in result.lora.values()}
    left = [tensor.shape for key, tensor in alive().items() if key not in before and key not in kept]
    assert left == []


def test_the_seed_alone_decides():
    torch.manual_seed(0)
    first = train("flux", training={"seed": 5})
    torch.manual_seed(1)
    second = train("flux", training={"seed": 5})
    assert first.loss_map == second.loss_map
    assert all(torch.equal(value, second.lora[name]) for name, value in first.lora.items())
    assert train("flux", training={"seed": 6}).loss_map != first.loss_map


def interrupt_at(monkeypatch, call):
    """Make ComfyUI's interrupt come at the given poll, as the Cancel button does."""
    import comfy.model_management as management

    polls = itertools.count()
    original = management.throw_exception_if_processing_interrupted

    def poll():
        if next(polls) == call:
            management.interrupt_current_processing(True)
        original()

    monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", poll)


def test_an_interrupt_ends_it_cleanly_and_training_goes_again(output, monkeypatch):
    import comfy.model_management as management

    model = PATCHERS["flux"].build()
    before = values(model), attributes(model)
    expected = train("flux", model)
    # Every layer polls: the later numbers fall into a forward or into a recomputation in the backward.
    for poll in (0, 1, 40, 90, 140, 200, 260):
        with monkeypatch.context() as patch:
            interrupt_at(patch, poll)
            with pytest.raises(management.InterruptProcessingException):
                train("flux", model, save_prefix="never")
        assert_untouched(model, before)
        assert getattr(management, "in_training", False) is False
        assert train("flux", model).loss_map == expected.loss_map
    other = train(
        "flux", model, lora={"rank": 2}, training={"seed": 3}, latents=[{"samples": noise(2, 16, 4, 4)}]
    )
    assert other.loss_map != expected.loss_map


def test_an_upstream_lora_takes_part():
    model = PATCHERS["flux"].build()
    key = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    patched = model.clone()
    patched.add_patches({key: ("diff", (0.3 * noise(144, 48),))}, 1.0)
    plain, with_patch = train("flux", model), train("flux", patched)
    assert plain.loss_map["loss"][0] != with_patch.loss_map["loss"][0]
    # The same weights, put there by hand.
    merged = PATCHERS["flux"].build()
    with torch.inference_mode():
        merged.model.state_dict()[key].add_(0.3 * noise(144, 48))
    assert with_patch.loss_map["loss"] == pytest.approx(train("flux", merged).loss_map["loss"], rel=1e-5)


def test_several_sizes_and_caption_lengths_in_one_batch():
    tiny = PATCHERS["flux"]
    latents = [{"samples": noise(1, 16, 8, 6)}, {"samples": noise(2, 16, 4, 4)}]
    captions = [tiny.caption(0, 7), tiny.caption(1, 5), tiny.caption(2, 7)]
    result = train("flux", latents=latents, captions=captions, training={"batch_size": 3})
    assert all(math.isfinite(loss) for loss in result.loss_map["loss"])


def test_bf16_is_close_to_fp32():
    # Not Flux: it embeds guidance * 1000 in its own dtype, and 3500 is 3504 in bf16.
    fp32 = train("wan", compute_dtype="fp32")
    bf16 = train("wan", compute_dtype="bf16")
    assert bf16.loss_map["loss"] != fp32.loss_map["loss"]
    # Eight bits of mantissa; 0.7 % of the output is seen.
    assert bf16.loss_map["loss"] == pytest.approx(fp32.loss_map["loss"], rel=0.03)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_the_saved_file_holds_what_is_returned(kind, output):
    import comfy.utils

    result = train(kind, save_prefix="loras/tiny", save_dtype="bf16")
    assert result.path == output / "loras" / "tiny_00001_.safetensors"
    for name, value in result.lora.items():
        assert value.device.type == "cpu"
        assert not value.requires_grad
        assert value.dtype == (torch.float32 if name.endswith(".alpha") else torch.bfloat16)
        assert not name.endswith(".alpha") or float(value) == 8.0
    # The file may name layers as diffusers does; to ComfyUI's loader it is the same.
    loaded = comfy.utils.load_torch_file(str(result.path))
    model = PATCHERS[kind].build()
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    actual, expected = (merged(model, lora) for lora in (loaded, result.lora))
    assert any(not torch.equal(before[name], value) for name, value in expected.items())
    for name, value in expected.items():
        # A packed layer is patched in three parts; ComfyUI merges in fp32.
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": [{"samples": noise(3, 16, 8, 6)}]}, "3 latents and 2 captions"),
        ({"latents": [{"samples": torch.full((2, 16, 8, 6), math.nan)}]}, "NaN"),
        ({"captions": [[]]}, "0 captions"),
        ({"lora": {"targets": "nowhere"}}, "nothing matches 'nowhere'"),
        ({"save_prefix": "../outside"}, "output folder"),
        ({"save_prefix": f"loras/{'x' * 230}"}, "at most 200 bytes of it"),
        ({"save_prefix": "a\0b"}, "control characters"),
        ({"latents": [{}]}, "one tensor"),
        ({"save_dtype": "fp8"}, r"lora_dtype='fp8'.*bf16"),
        ({"compute_dtype": "fp16"}, r"training_dtype='fp16'.*bf16"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(changes, message, output, monkeypatch):
    import comfy.model_management as management

    monkeypatch.setattr(management, "unload_all_models", lambda: pytest.fail("training started"))
    with pytest.raises(RequestError, match=message):
        train("flux", **({"save_prefix": "loras/x"} | changes))
    assert os.listdir(output) == []


def test_a_caption_of_another_models_text_encoder_is_refused(output):
    ((embedding, _),) = PATCHERS["sdxl"].caption(0)
    model = PATCHERS["sdxl"].build()
    before = values(model), attributes(model)
    with pytest.raises(RequestError, match=r"a caption without pooled_output.*SDXL is conditioned"):
        train("sdxl", model, captions=[[[embedding, {}]]], save_prefix="loras/x")
    assert_untouched(model, before)
    assert os.listdir(output) == []


def test_a_nan_loss_names_the_step_and_saves_nothing(output):
    model = PATCHERS["flux"].build()
    with torch.inference_mode():
        model.model.diffusion_model.final_layer.linear.weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match=r"NaN or infinite|nan%"):
        train("flux", model, save_prefix="loras/x")
    assert os.listdir(output) == []


def test_a_lora_that_is_refused_can_be_mended_without_training_it_again(output):
    """A learning rate that moves nothing in fp16."""
    small, larger = {"steps": 1, "learning_rate": 1e-30}, {"steps": 2, "learning_rate": 1e-2}
    with pytest.raises(SaveError, match=r"all zero.*resume_from x_00001/step_00000001.safetensors"):
        train("flux", save_prefix="x", save_dtype="fp16", training=small)
    assert os.listdir(output) == ["training_states"]
    result = train("flux", save_prefix="x", saves={"resume_from": "latest"}, training=larger)
    assert result.steps == 2 and result.path is not None


def test_a_rewrite_that_changes_the_model_is_refused(monkeypatch):
    from comfy.ldm.flux.layers import SingleStreamBlock

    original = SingleStreamBlock.forward

    def forward(self, x, *args, **kwargs):
        x = original(self, x, *args, **kwargs)
        view = x[:, :]
        view += x.flip(-1)  # meant to be seen through x
        return x

    monkeypatch.setattr(SingleStreamBlock, "forward", forward)
    with pytest.raises(TrainingError, match="changes the model's output"):
        train("flux")


def test_the_loss_map_can_be_drawn():
    from comfyui_ferry.core.comfy_adapter.train_lora import drawable

    assert drawable([1.0, 2.0, 1.0]) == [1.0, 2.0, 1.0]
    for flat in ([0.5], [0.5, 0.5]):
        shown = drawable(flat)
        assert shown[: len(flat)] == flat
        assert max(shown) - min(shown) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TRAINABLE)
def test_gradients_on_a_gpu(kind):
    plain = gradients(kind, "cuda", **PLAIN)
    # fp32 on both; other kernels than on the CPU.
    assert worst(plain, gradients(kind, **PLAIN)) <= 1e-2
    # GPU kernels may add in another order from run to run; convolutions do so in TF32 (2.3e-4 is seen).
    tolerance = 2e-3 if kind == "sdxl" else 1e-5
    for mode in MODES.values():
        assert worst(gradients(kind, "cuda", **mode), plain) <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["both", "both, larger parts", "both, optimizer on cpu"])
def test_a_gpu_holds_a_part_of_the_model(mode):
    sizes = {"hidden_size": 1024, "num_heads": 8, "axes_dim": [16, 56, 56], "depth": 6,
             "depth_single_blocks": 32, "dtype": torch.bfloat16}  # fmt: skip
    model = PATCHERS["flux"].build(load_device="cuda", **sizes)
    before = values(model)
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in before.values())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    result = train("flux", model, latents=[{"samples": noise(2, 16, 32, 32)}], **MODES[mode])
    peak = torch.cuda.max_memory_allocated() - start
    print(f"{mode}: weights {weight_bytes >> 20} MB, peak {peak >> 20} MB, {result.loss_map}")
    assert all(math.isfinite(loss) for loss in result.loss_map["loss"])
    # Two blocks of each kind (0.15), and what recordings keep for each kind.
    assert peak < (0.25 if "parts" in mode else 0.4) * weight_bytes
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that multiplied matrices
    assert torch.cuda.memory_allocated() - start < 0.05 * weight_bytes
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    assert all(parameter.device.type == "cpu" for parameter in model.model.parameters())


def outputs_at(kind, patcher, process_of):
    """What a patched model predicts for one fixed noisy latent."""
    tiny = PATCHERS[kind]
    from comfyui_ferry.core.comfy_adapter.training_inputs import read_samples

    samples = read_samples(patcher, [tiny.latent(0, 1)], [tiny.caption(0)])
    process = process_of(patcher)
    noisy = samples[0].latent + 0.5 * noise(*samples[0].latent.shape, seed=9)
    with torch.no_grad():
        return process.denoise(noisy, torch.tensor([0.6]), [samples[0].condition])


@pytest.mark.parametrize(
    ("kind", "algorithm", "mode", "targets"),
    [
        ("flux", "LoRA", "both", "double_blocks"),
        ("flux", "DoRA", "both, optimizer on cpu", "double_blocks"),
        ("flux", "LoKr", "both, optimizer on cpu", "double_blocks, +norms"),
        ("flux", "LoHa", "both", "double_blocks, +biases"),
        ("wan", "LoRA", "both", "+norms, +biases"),
        ("sdxl", "LoRA", "both", "+norms, +biases"),
    ],
)
def test_a_file_samples_as_it_was_trained(kind, algorithm, mode, targets, output, monkeypatch):
    import comfy.sd
    import comfy.utils
    from comfyui_ferry.core.comfy_adapter import prepared_model as module
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess

    def process_of(patcher):
        return ComfyProcess(patcher, torch.device("cpu"), seed=0)

    trained = []
    original = module.PreparedModel.train

    def train_and_look(run, *arguments, **options):
        training = original(run, *arguments, **options)
        trained.append(outputs_at(kind, run.patcher, process_of))
        return training

    monkeypatch.setattr(module.PreparedModel, "train", train_and_look)
    result = train(
        kind, lora={"algorithm": algorithm, "targets": targets}, save_prefix="x",
        training={"learning_rate": 1e-2}, **MODES[mode],
    )  # fmt: skip
    file = comfy.utils.load_torch_file(str(result.path))
    assert any(name.endswith(".diff") for name in file) == ("+norms" in targets)
    assert any(name.endswith(".diff_b") for name in file) == ("+biases" in targets)
    model = PATCHERS[kind].build()
    with torch.inference_mode():
        bare = outputs_at(kind, model, process_of)
        loaded, _ = comfy.sd.load_lora_for_models(model, None, file, 1.0, 0.0)
        loaded.patch_model(device_to=torch.device("cpu"))
        merged = outputs_at(kind, loaded, process_of)
        loaded.unpatch_model(torch.device("cpu"))
    assert (bare - merged).norm() > 1e-3 * bare.norm()
    # One matmul with merged weights in place of two; 1e-6 is seen.
    assert (trained[0] - merged).norm() <= 2e-5 * (bare - merged).norm() + 1e-5 * bare.norm()


def test_fp8_layers_that_multiply_in_fp8_are_trained_by_a_matmul_with_a_gradient():
    """`weight_dtype` fp8_e4m3fn_fast: their own matmul has none."""
    import comfy.ops

    kinds = [(comfy.ops.fp8_ops, comfy.ops.manual_cast)]
    if hasattr(comfy.ops, "scaled_fp8_ops"):  # until 0.3.75
        fp8 = {"override_dtype": torch.float8_e4m3fn}
        kinds.append(tuple(comfy.ops.scaled_fp8_ops(fp8_matrix_mult=fast, **fp8) for fast in (True, False)))
    original = comfy.ops.fp8_linear
    for kind in kinds:
        losses = []
        for operations in kind:
            model = PATCHERS["flux"].build(dtype=torch.float8_e4m3fn, operations=operations)
            model.model.manual_cast_dtype = torch.float32
            before = attributes(model)
            losses.append(train("flux", model, compute_dtype="fp32").loss_map["loss"])
            assert attributes(model) == before
        assert losses[0] == losses[1]
    assert comfy.ops.fp8_linear is original


def test_quantized_layers_are_trained_on_or_refused_by_name():
    """Files of ComfyUI 0.33's own formats, with scales for the inputs of some layers."""
    import comfy.ops
    from ferry_support.quantized_patchers import quantized_patcher

    if "disabled" not in inspect.signature(comfy.ops.mixed_precision_ops).parameters:
        pytest.skip("ComfyUI 0.3.75 has no QuantizedTensor of comfy_kitchen")
    with pytest.raises(RequestError, match=r"double_blocks\.0\..*\(QuantizedTensor\)"):
        train("flux", quantized_patcher("flux"), lora={"algorithm": "DoRA"}, compute_dtype="fp32")
    plain = train("flux", compute_dtype="fp32", **PLAIN).loss_map["loss"]
    # How far the losses are from those of the plain weights: 4 bits, 3 of mantissa, 8.
    for form, algorithm, tolerance in (
        ("nvfp4", "LoRA", 0.5),
        ("float8_e4m3fn", "LoKr", 0.15),
        ("int8_tensorwise", "LoHa", 0.15),
    ):
        streamed, whole = (
            train(
                "flux", quantized_patcher("flux", form), lora={"algorithm": algorithm}, compute_dtype="fp32",
                **mode,
            ).loss_map["loss"]
            for mode in (MODES["both"], PLAIN)
        )  # fmt: skip
        assert streamed == pytest.approx(whole, rel=1e-5), form
        assert streamed != plain, form
        assert streamed == pytest.approx(plain, rel=tolerance), form
