"""Previews show what the LoRA does and leave no trace in the training."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]


class Vae:
    """Notes the latents it gets; a video VAE gives ``(B, T, H, W, 3)``."""

    def __init__(self):
        self.latents = []

    def decode(self, latent):
        self.latents.append(latent.clone())
        return torch.full((1, 2, 8, 12, 3), 0.5)


def train(kind, *, previews=None, inputs=None, **changes):
    from comfyui_ferry.core.comfy_adapter.train_lora import (
        PreviewInputs,
        PreviewSettings,
        SaveSettings,
        TrainingRequest,
        run_lora_training,
    )
    from comfyui_ferry.core.training import LoraConfig, OffloadSettings, TrainingConfig

    tiny = PATCHERS[kind]
    request = TrainingRequest(
        LoraConfig(rank=2, alpha=2.0),
        TrainingConfig(steps=4, learning_rate=2e-2, ema_decay=0.9),
        OffloadSettings(**changes),
        SaveSettings(),
        PreviewSettings(**(previews or {})),
        save_dtype="fp32",
    )
    with torch.inference_mode():
        return run_lora_training(
            tiny.build(), [tiny.latent(0, 2)], [tiny.caption(0), tiny.caption(1)], request,
            preview=PreviewInputs(**(inputs or {})),
        )  # fmt: skip


@pytest.fixture
def temp(tmp_path, monkeypatch):
    import folder_paths

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))
    return tmp_path


def test_they_show_the_progress_and_change_nothing(temp, monkeypatch):
    from comfyui_ferry.core.comfy_adapter.training_preview import Previewer
    from comfyui_ferry.core.comfy_adapter.training_session import TrainingSession
    from PIL import Image

    changes = {"optimizer_on_cpu": True}
    tiny, vae = PATCHERS["wan"], Vae()
    with torch.inference_mode():
        inputs = {"vae": vae, "positive": tiny.caption(3), "negative": tiny.caption(4)}
    shown = train("wan", previews={"every": 2, "steps": 2, "cfg": 2.0}, inputs=inputs, **changes)
    plain = train("wan", **changes)
    assert shown.loss_map == plain.loss_map
    assert all(torch.equal(shown.lora[name], value) for name, value in plain.lora.items())
    files = sorted((temp / "ferry_previews").iterdir(), key=lambda path: path.name[-12:])
    assert [path.name[-12:-4] for path in files] == ["00000002", "00000004"]
    assert Image.open(files[0]).size == (12, 8)
    first, second = vae.latents
    assert first.shape == (1, *tiny.latent_shape)
    assert torch.isfinite(first).all()
    assert not torch.allclose(first, second, rtol=1e-4)
    # Neither does a preview that cannot be written, or has no memory, end hours of training.
    (temp / "file").write_text("in the way")
    monkeypatch.setattr("folder_paths.temp_directory", str(temp / "file"))
    notes, decode = [], vae.decode
    monkeypatch.setattr(TrainingSession, "after_skip", lambda session, what: notes.append(what))
    monkeypatch.setattr(vae, "decode", lambda latent: decode(latent) if notes else out_of_memory())
    unseen = train("wan", previews={"every": 2, "steps": 1}, inputs=inputs, **changes)
    assert unseen.loss_map == plain.loss_map
    assert [note.split(":")[0] for note in notes] == ["no preview of step 2", "no preview of step 4"]
    assert notes[0].endswith("out of memory") and "file" in notes[1]
    # A cancel does not wait for the picture either.
    import comfy.model_management as management

    make = Previewer.make
    monkeypatch.setattr(
        Previewer, "make", lambda *a: (management.interrupt_current_processing(True), make(*a))
    )
    seen = len(vae.latents)
    with pytest.raises(management.InterruptProcessingException):
        train("wan", previews={"every": 1, "steps": 1}, inputs=inputs, **changes)
    assert len(vae.latents) == seen


def out_of_memory():
    raise torch.OutOfMemoryError


def test_a_preview_is_what_the_stock_sampler_gives(temp, monkeypatch):
    from comfyui_ferry.core.comfy_adapter.training_session import TrainingSession

    import nodes

    tiny, vae, loras = PATCHERS["wan"], Vae(), []
    original = TrainingSession.preview

    def preview(session):
        loras.append(session.lora())
        original(session)

    monkeypatch.setattr(TrainingSession, "preview", preview)
    train("wan", previews={"every": 4, "steps": 3}, inputs={"vae": vae})
    import comfy.sd

    model = tiny.build()
    with torch.inference_mode():
        patched, _ = comfy.sd.load_lora_for_models(model, None, loras[0], 1.0, 0.0)
        latent = {"samples": torch.zeros(1, *tiny.latent_shape)}
        monkeypatch.setattr("comfy.sample.prepare_noise", lambda samples, *rest: noise_of(samples.shape))
        sampled = nodes.common_ksampler(
            patched, 0, 3, 1.0, "euler", "simple", tiny.caption(0), tiny.caption(0), latent
        )[0]["samples"]
    # The same function through merged weights; 1e-6 is seen.
    assert (vae.latents[0] - sampled).norm() <= 1e-4 * sampled.norm()


def noise_of(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_an_expert_is_shown_on_its_own_noise():
    import types

    from comfyui_ferry.core.comfy_adapter.train_lora import PreviewInputs, PreviewSettings
    from comfyui_ferry.core.comfy_adapter.training_preview import Previewer
    from comfyui_ferry.core.training import NoiseLevels, Sample

    tiny = PATCHERS["wan"]
    model, clean = tiny.build(), torch.full((1, *tiny.latent_shape), 3.0)
    for lowest, highest in ((0.875, 1.0), (0.0, 0.875)):
        seen = []

        def denoise(x, sigma, captions, seen=seen):
            seen.append((float(sigma), x))
            return clean

        process = types.SimpleNamespace(
            model=model.model, device=torch.device("cpu"), levels=NoiseLevels(lowest=lowest, highest=highest),
            denoise=denoise,
        )  # fmt: skip
        previewer = Previewer(
            model, PreviewSettings(steps=6), PreviewInputs(), samples=[Sample(clean, None)], seed=0
        )
        previewer._sample(process)
        sigmas = [sigma for sigma, _ in seen]
        assert sigmas == sorted(sigmas, reverse=True) and len(sigmas) >= 3
        assert sigmas[0] == highest and sigmas[-1] >= lowest
        # One for little noise goes on from the picture, one for much noise starts without it.
        assert float(seen[0][1].mean()) == pytest.approx((1 - highest) * 3.0, abs=0.2)


def test_without_a_vae_they_are_rough_colours(temp):
    from PIL import Image

    train("flux", previews={"every": 4, "steps": 1})
    (file,) = (temp / "ferry_previews").iterdir()
    assert Image.open(file).size == (6, 8)


def test_what_cannot_be_shown_is_refused(monkeypatch):
    from comfyui_ferry.core.comfy_adapter import training_preview

    with pytest.raises(RequestError, match="without preview_negative"):
        train("flux", previews={"cfg": 3.0})
    good = PATCHERS["flux"].caption(3)[0]
    for prompt, message in (
        ([], "has 0 prompts"),
        ([good, good], "has 2 prompts"),
        ("x", "is of type str"),
        ([[None, good[1]]], "has a value of type NoneType for an embedding"),
        ([[good[0][..., 1:], good[1]]], "has 39 channels.*have 40 channels"),
        ([[good[0], {}]], "has 40 channels.*have 40 channels and 24 pooled"),
        ([[good[0], good[1] | {"mask": torch.ones(1, 8, 6)}]], "carries a mask"),
    ):
        for name in ("positive", "negative"):
            with pytest.raises(RequestError, match=f"^preview_{name} {message}"):
                train("flux", inputs={name: prompt})
    vae = Vae()
    vae.latent_channels = 4
    with pytest.raises(RequestError, match=r"preview_vae for latents of 4 channels.*makes latents of 16"):
        train("flux", inputs={"vae": vae})
    monkeypatch.setattr(training_preview, "_rgb_factors", lambda model: None)
    with pytest.raises(RequestError, match="without preview_vae"):
        train("flux", previews={"every": 1})
