"""A ComfyUI model as a diffusion process: noise, loss space, and captions that stay with their latents."""

from __future__ import annotations

import contextlib

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS, TRAINABLE

pytestmark = pytest.mark.comfy

POSITIONS = torch.tensor([0.03, 0.4, 0.9])


@contextlib.contextmanager
def process_of(kind):
    from comfyui_ferry.core.comfy_adapter.trainable_model import borrowed_model
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess

    model = PATCHERS[kind].build()
    with borrowed_model(model, dtype=torch.float32, keep_on_host=True) as patcher:
        yield ComfyProcess(patcher, torch.device("cpu"), seed=0)


def samples_of(kind, process, count, tokens=lambda index: 7):
    from comfyui_ferry.core.comfy_adapter.training_inputs import read_samples

    tiny = PATCHERS[kind]
    latents = [tiny.latent(index) for index in range(count)]
    captions = [tiny.caption(index, tokens(index)) for index in range(count)]
    return read_samples(process.patcher, latents, captions)


class Recorder:
    """Keeps the network's own output of each call."""

    def __init__(self, network):
        self.outputs = []
        network.register_forward_hook(lambda module, args, output: self.outputs.append(output.detach()))


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("flux", lambda clean, noise: noise - clean),
        ("wan", lambda clean, noise: noise - clean),
        ("sd3", lambda clean, noise: noise - clean),
        ("sdxl", lambda clean, noise: noise),
    ],
)
def test_the_loss_is_that_of_the_networks_output(kind, target):
    from comfyui_ferry.core.training import LOSSES, sample_losses

    with process_of(kind) as process, torch.no_grad():
        sample = samples_of(kind, process, 1)[0]
        random = noise(*sample.latent.shape, seed=9)
        recorder = Recorder(process.model.diffusion_model)
        for position in POSITIONS:
            loss = sample_losses(
                process, sample.latent, [sample.condition], noise=random,
                positions=position.view(1), loss=LOSSES["MSE"],
            )  # fmt: skip
            expected = (recorder.outputs[-1] - target(sample.latent, random)).square().mean()
            # The output is recovered from the clean estimate: rounding grows with 1 / sigma.
            torch.testing.assert_close(loss[0], expected, rtol=1e-3, atol=1e-5)


def test_v_prediction_learns_v():
    import comfy.model_sampling
    from comfyui_ferry.core.training import LOSSES, sample_losses

    class VSampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):
        pass

    with process_of("sdxl") as process, torch.no_grad():
        process.model.model_sampling = VSampling(process.model.model_config)
        sample = samples_of("sdxl", process, 1)[0]
        random = noise(*sample.latent.shape, seed=9)
        recorder = Recorder(process.model.diffusion_model)
        loss = sample_losses(
            process, sample.latent, [sample.condition], noise=random, positions=POSITIONS[1:2],
            loss=LOSSES["MSE"],
        )  # fmt: skip
        sigma = process.sigmas(POSITIONS[1:2])
        alpha = (1 / (1 + sigma**2)) ** 0.5
        v = alpha * random - (sigma * alpha) * sample.latent
        expected = (recorder.outputs[-1] - v).square().mean()
        torch.testing.assert_close(loss[0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_a_batch_computes_each_latent_with_its_own_caption(kind):
    with process_of(kind) as process, torch.no_grad():
        samples = samples_of(kind, process, 3)
        clean = torch.cat([sample.latent for sample in samples])
        sigma = process.sigmas(POSITIONS)
        noisy = process.add_noise(clean, noise(*clean.shape, seed=4), sigma)
        captions = [sample.condition for sample in samples]
        together = process.denoise(noisy, sigma, captions)
        for row in range(3):
            alone = process.denoise(noisy[row : row + 1], sigma[row : row + 1], captions[row : row + 1])
            # Matrix products of another batch size may add in another order.
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)
        swapped = process.denoise(noisy, sigma, [captions[1], captions[0], captions[2]])
        assert not torch.allclose(swapped[:2], together[:2], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["flux", "qwen", "wan", "sdxl"])
def test_captions_of_different_lengths_are_not_padded(kind):
    with process_of(kind) as process, torch.no_grad():
        samples = samples_of(kind, process, 3, tokens=lambda index: 6 if index == 1 else 12)
        clean = torch.cat([sample.latent for sample in samples])
        sigma = process.sigmas(POSITIONS)
        noisy = process.add_noise(clean, noise(*clean.shape, seed=4), sigma)
        captions = [sample.condition for sample in samples]
        recorder = Recorder(process.model.diffusion_model)
        together = process.denoise(noisy, sigma, captions)
        assert sorted(len(output) for output in recorder.outputs) == [1, 2]
        for row in range(3):
            alone = process.denoise(noisy[row : row + 1], sigma[row : row + 1], captions[row : row + 1])
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)


def test_a_model_without_noise_is_refused():
    import comfy.model_sampling
    from comfyui_ferry.core.comfy_adapter.training import check_noise_model

    class ImageToImage(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.IMG_TO_IMG):
        pass

    model = PATCHERS["sdxl"].build()
    check_noise_model(model)
    model.add_object_patch("model_sampling", ImageToImage())
    with pytest.raises(RequestError, match="no noise to learn"):
        check_noise_model(model)


def test_noise_levels_follow_shift_distribution_and_range():
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess
    from comfyui_ferry.core.training import NoiseLevels

    with process_of("wan") as plain:

        def sigmas(positions, **settings):
            process = ComfyProcess(plain.patcher, plain.device, seed=0, levels=NoiseLevels(**settings))
            return process.sigmas(torch.tensor(positions))

        # The model's own shift is 8, or 5: whatever it samples with.
        own = float(plain.model.model_sampling.shift)
        assert float(sigmas([0.5])) == pytest.approx(own / (1 + own))
        assert float(sigmas([0.5], shift=3.0)) == pytest.approx(0.75)
        ends = [0.0, 0.5, 1.0]
        high = sigmas(ends, sampling="logit_normal", shift=5.0, lowest=0.875)
        low = sigmas(ends, sampling="logit_normal", shift=5.0, highest=0.875)
        assert float(high[0]) == pytest.approx(0.875) and float(high[2]) == 1.0
        assert float(low[2]) == pytest.approx(0.875) and float(low[0]) == 0.0
        # The two experts share out the whole distribution: quantiles below and above the boundary.
        whole = sigmas([value / 1000 for value in range(1000)], sampling="logit_normal", shift=5.0)
        share = float((whole < 0.875).float().mean())
        assert float(sigmas([share / 2], sampling="logit_normal", shift=5.0)) == pytest.approx(
            float(low[1]), abs=2e-3
        )


def test_min_snr_weighs_the_noise_loss_of_sdxl():
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess, check_noise_levels
    from comfyui_ferry.core.training import NoiseLevels

    with process_of("sdxl") as plain:
        levels = NoiseLevels(weighting="min_snr")
        check_noise_levels(plain.patcher, levels)
        weighted = ComfyProcess(plain.patcher, plain.device, seed=0, levels=levels)
        sigma = torch.tensor([0.1, 5**-0.5, 1.0, 4.0])
        snr = sigma**-2
        # min(SNR, 5) / SNR, arXiv:2303.09556.
        torch.testing.assert_close(weighted.loss_weight(sigma), snr.clamp(max=5) / snr)
        assert torch.equal(plain.loss_weight(sigma), torch.ones(4))
        for wrong in (NoiseLevels(shift=3.0), NoiseLevels(lowest=0.5)):
            with pytest.raises(RequestError, match="Only flow models"):
                check_noise_levels(plain.patcher, wrong)
    with process_of("wan") as flow:
        with pytest.raises(RequestError, match="velocity loss"):
            check_noise_levels(flow.patcher, levels)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_a_text_encoder_of_another_width_is_refused_by_both_widths(kind):
    """The embedding and the pooled one, before anything is computed of them."""
    from comfyui_ferry.core.comfy_adapter.text_widths import text_widths
    from comfyui_ferry.core.comfy_adapter.training_inputs import Caption, read_samples

    with process_of(kind) as process, torch.no_grad():
        sample = samples_of(kind, process, 1)[0].read()
        embedding, options = sample.condition.entry
        widths = text_widths(process.model.diffusion_model)
        noisy = noise(*sample.latent.shape)
        process.groups(noisy, [sample.condition])
        wrong = {"c_crossattn": [torch.cat([embedding, embedding], dim=-1), options]}
        if "y" in widths:
            pooled = options["pooled_output"]
            wrong["y"] = [embedding, options | {"pooled_output": torch.cat([pooled, pooled], dim=-1)}]
        assert "c_crossattn" in widths
        for name, entry in wrong.items():
            with pytest.raises(RequestError, match="channels was given") as refused:
                process.groups(noisy, [Caption(entry, sample.condition.latent)])
            assert f"takes {widths[name].channels} (" in str(refused.value)
        with pytest.raises(RequestError, match="caption 0 has"):
            latents = [PATCHERS[kind].latent(index) for index in range(2)]
            read_samples(process.patcher, latents, [[[embedding, options]], [wrong["c_crossattn"]]])


def test_what_only_the_network_finds_out_is_refused_too():
    """By shapes and its own error, once; a shape that was computed before fails as it does."""
    from comfyui_ferry.core.comfy_adapter.training_inputs import Caption

    with process_of("qwen") as process, torch.no_grad():
        sample = samples_of("qwen", process, 1)[0].read()
        embedding, options = sample.condition.entry
        noisy, sigma = noise(*sample.latent.shape), torch.tensor([0.5])
        deep = Caption([embedding[:, None], options], sample.latent)
        with pytest.raises(RequestError, match=r"\(1, 1, 7, 40\)\}\. QwenImage cannot compute"):
            process.denoise(noisy, sigma, [deep])
        process.denoise(noisy, sigma, [sample.condition])

        def fail(error):
            def forward(*args, **kwargs):
                raise error

            process.model.diffusion_model.forward = forward

        fail(torch.OutOfMemoryError("full"))  # the trainer keeps less on the GPU then
        with pytest.raises(torch.OutOfMemoryError):
            process.denoise(noisy, sigma, [deep])
        fail(RuntimeError("a lost GPU"))
        with pytest.raises(RuntimeError, match=r"^a lost GPU"):
            process.denoise(noisy, sigma, [sample.condition])
        del process.model.diffusion_model.forward


@pytest.mark.parametrize("kind", ["qwen", "flux", "sd3", "sdxl"])
def test_reference_latents_that_the_model_does_not_look_at_are_refused(kind):
    from comfyui_ferry.core.comfy_adapter.training_inputs import Caption

    with process_of(kind) as process:
        sample = samples_of(kind, process, 1)[0].read()
        embedding, options = sample.condition.entry
        edit = Caption([embedding, options | {"reference_latents": [sample.latent]}], sample.latent)
        noisy = noise(*sample.latent.shape)
        with (
            contextlib.nullcontext()
            if kind in ("qwen", "flux")
            else pytest.raises(RequestError, match="look at them")
        ):
            process.groups(noisy, [edit, edit])
