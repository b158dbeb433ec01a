"""Edit models: a picture is learned from the one before the edit, through folder, cache and training."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training.dataset import FolderOptions, load_training_folder, read_pixels
from ferry_support.tiny_clip_vae import tiny_clip, tiny_vae
from ferry_support.tiny_patchers import PATCHERS
from PIL import Image

pytestmark = [
    pytest.mark.comfy,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("output"),
]

QWEN = PATCHERS["qwen"]
CAPTION = "make it so"


@pytest.fixture
def pairs(tmp_path):
    """Two pictures with one caption, told apart only by the pictures that they are made of."""
    for folder, colours in {"before": (30, 220), "after": (250, 10)}.items():
        (tmp_path / folder).mkdir()
        for name, colour in zip("ab", colours, strict=True):
            Image.new("RGB", (64, 64), (colour, colour // 2, 9)).save(tmp_path / folder / f"{name}.png")
            (tmp_path / folder / f"{name}.txt").write_text(CAPTION)
    options = FolderOptions(resolution_px=64, step_px=16, caption_dropout=0.1, control_folder="before")
    return load_training_folder(tmp_path, "after", options)


def seeing_clip():
    """A text encoder whose tokenizer takes pictures, as Qwen2.5-VL's does."""
    clip = tiny_clip(width=40)
    kind = type(clip.tokenizer)

    class Tokenizer(kind):
        def tokenize_with_weights(
            self, text, return_word_ids=False, llama_template=None, images=(), **options
        ):
            text = text if llama_template is None else llama_template.format(text)
            seen = " ".join(f"{float(image.mean()):.3f}" for image in images)
            return super().tokenize_with_weights(f"{text} {seen}".strip(), **options)

    clip.tokenizer = Tokenizer()
    return clip


def cache(training_set, clip, **options):
    from comfyui_ferry.core.comfy_adapter import cache_training_set

    with torch.inference_mode():
        return cache_training_set(training_set, clip, tiny_vae(is_video=True), **options)


def samples(data, model=None):
    from comfyui_ferry.core.comfy_adapter.cached_samples import read_examples

    return [source.read() for source in read_examples(model or QWEN.build(), [], [], data)]


def test_samples_are_what_the_stock_nodes_make_of_the_pair(pairs):
    import comfy_extras.nodes_qwen as stock

    clip = seeing_clip()
    for choice, node, name in (
        ("auto", stock.TextEncodeQwenImageEditPlus, "image1"),
        ("Qwen-Image-Edit", stock.TextEncodeQwenImageEdit, "image"),
    ):
        found = samples(cache(pairs, clip, control_prompt=choice).cache)
        for sample, item in zip(found, pairs.items, strict=True):
            with torch.inference_mode():
                for caption, text in ((sample.condition, CAPTION), (sample.unconditional, "")):
                    pixels = read_pixels(item.control)
                    cond, _ = node.execute(clip, text, **{name: pixels}).args[0][0]
                    assert torch.equal(caption.entry[0], cond)
                    (reference,) = caption.entry[1]["reference_latents"]
                    assert torch.equal(reference, tiny_vae(is_video=True).encode(pixels))
    first, second = found
    assert not torch.equal(first.condition.entry[0], second.condition.entry[0])


def test_a_changed_control_picture_is_encoded_again_and_another_data_set(pairs):
    clip = seeing_clip()
    first = cache(pairs, clip)
    # Two pictures and two control pictures; each caption, and no caption, with each control picture.
    assert (first.num_encoded, first.num_found) == (8, 0)
    assert cache(pairs, clip).num_encoded == 0
    item = pairs.items[0]
    Image.new("RGB", (64, 64), (1, 2, 3)).save(item.control.path)
    again = load_training_folder(
        item.path.parents[1], "after",
        FolderOptions(resolution_px=64, step_px=16, caption_dropout=0.1, control_folder="before"),
    )  # fmt: skip
    second = cache(again, clip)
    assert second.num_encoded == 3
    assert second.cache.digest != first.cache.digest


def test_a_text_encoder_without_eyes_gets_the_caption_alone(pairs):
    found = samples(cache(pairs, tiny_clip(width=40)).cache)
    assert torch.equal(found[0].condition.entry[0], found[1].condition.entry[0])
    assert not torch.equal(*(sample.condition.entry[1]["reference_latents"][0] for sample in found))
    with pytest.raises(RequestError, match="takes no pictures"):
        cache(pairs, tiny_clip(width=40), control_prompt="Qwen-Image-Edit")
    with pytest.raises(RequestError, match="Known are"):
        cache(pairs, tiny_clip(width=40), control_prompt="x")


def test_training_and_previews_see_the_picture_before_the_edit(pairs, tmp_path, monkeypatch):
    import folder_paths
    from comfyui_ferry.core.comfy_adapter import TrainingRequest, run_lora_training
    from comfyui_ferry.core.comfy_adapter.train_lora import PreviewSettings
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess
    from comfyui_ferry.core.training import LoraConfig, OffloadSettings, TrainingConfig
    from ferry_support.tiny_models import noise

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    data = cache(pairs, tiny_clip(width=40)).cache
    model = QWEN.build()
    seen = []
    original = ComfyProcess.denoise

    def denoise(process, noisy, sigma, conditions):
        seen.append([caption.entry[1].get("reference_latents") for caption in conditions])
        return original(process, noisy, sigma, conditions)

    monkeypatch.setattr(ComfyProcess, "denoise", denoise)
    request = TrainingRequest(
        LoraConfig(8, 8.0), TrainingConfig(24, 1e-2, batch_size=2), OffloadSettings(enabled=False),
        previews=PreviewSettings(every=24, steps=2), gradient_checkpointing=False,
    )  # fmt: skip
    with torch.inference_mode():
        losses = run_lora_training(model, [], [], request, data=data).loss_map["loss"]
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    assert len(list((tmp_path / "temp").rglob("*.png"))) == 1
    assert all(references for row in seen for references in row)
    # The network tells them apart: the same noise with the other picture is another prediction.
    first, second = samples(data, model)
    process, sigma = ComfyProcess(model, torch.device("cpu"), seed=0), torch.tensor([0.9])
    with torch.no_grad():
        noisy = noise(*first.latent.shape, seed=9)
        one, two = (original(process, noisy, sigma, [sample.condition]) for sample in (first, second))
    assert (one - two).norm() > 1e-2 * (one - noisy).norm()
