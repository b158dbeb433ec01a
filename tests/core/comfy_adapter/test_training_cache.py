"""Data is encoded once, found again by its content, and trained on as if it had never been on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_ferry.core.errors import RequestError, TrainingError
from comfyui_ferry.core.training.dataset import FolderOptions, join_sets, load_training_folder, read_pixels
from ferry_support.tiny_patchers import PATCHERS
from PIL import Image

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300)]

FLUX = PATCHERS["flux"]


@pytest.fixture(autouse=True)
def output(tmp_path, monkeypatch):
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))
    return tmp_path / "output"


@pytest.fixture
def root(tmp_path):
    """Two square pictures and a wide one, each with its own caption."""
    folder = tmp_path / "input" / "cats"
    folder.mkdir(parents=True)
    for name, size, colour in (("a", (32, 32), 40), ("b", (32, 32), 120), ("c", (64, 16), 200)):
        Image.new("RGB", size, (colour, 255 - colour, 9)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"caption of {name}")
    return folder.parent


def load(root, **options):
    return load_training_folder(root, "cats", FolderOptions(resolution_px=32, step_px=16, **options))


def encoders(**options):
    from ferry_support.tiny_clip_vae import tiny_clip, tiny_vae

    return tiny_clip(width=40, pooled=24), tiny_vae(**options)


def encoded(clip, vae):
    return len(clip.cond_stage_model.encoded), len(vae.first_stage_model.encoded)


def cache(training_set, clip, vae):
    from comfyui_ferry.core.comfy_adapter import cache_training_set

    with torch.inference_mode():
        return cache_training_set(training_set, clip, vae)


def test_a_second_run_encodes_nothing_also_with_other_objects(root, output):
    clip, vae = encoders()
    first = cache(load(root), clip, vae)
    assert (first.num_encoded, first.num_found) == (6, 0)
    assert encoded(clip, vae) == (3, 3)
    clip, vae = encoders()
    second = cache(load(root), clip, vae)
    assert (second.num_encoded, second.num_found) == (0, 6)
    assert encoded(clip, vae) == (0, 0)
    assert second.cache == first.cache
    assert second.cache.digest == first.cache.digest
    assert len(list(output.rglob("*.safetensors"))) == 6


def test_only_what_changed_is_encoded_again(root):
    clip, vae = encoders()
    first = cache(load(root), clip, vae)
    (root / "cats" / "a.txt").write_text("another caption")
    second = cache(load(root), clip, vae)
    assert second.num_encoded == 1
    assert second.cache.digest != first.cache.digest
    Image.new("RGB", (32, 32), (1, 2, 3)).save(root / "cats" / "a.png")
    assert cache(load(root), clip, vae).num_encoded == 1
    # A mirrored copy is three latents and no caption; dropping captions is one empty caption.
    assert cache(load(root, mirror=True), clip, vae).num_encoded == 3
    assert cache(load(root, caption_dropout=0.1), clip, vae).num_encoded == 1
    assert encoded(clip, vae) == (5, 7)


def test_other_weights_and_patches_are_other_encoders(root):
    clip, vae = encoders()
    cache(load(root), clip, vae)
    with torch.inference_mode():
        patched = clip.clone()
        patched.add_patches({"embedding.weight": ("diff", (torch.ones(997, 40),))}, 0.5)
        assert cache(load(root), patched, vae).num_encoded == 3
        stronger = clip.clone()
        stronger.add_patches({"embedding.weight": ("diff", (torch.ones(997, 40),))}, 0.6)
        assert cache(load(root), stronger, vae).num_encoded == 3
        again = clip.clone()
        again.add_patches({"embedding.weight": ("diff", (torch.ones(997, 40),))}, 0.5)
        # Also while another patch is merged into the shared weights.
        stronger.load_model()
        assert cache(load(root), again, vae).num_encoded == 0
        vae.first_stage_model.conv.weight[0, 0, 0, 0] += 1e-6
        assert cache(load(root), clip, vae).num_encoded == 3


def test_a_run_that_was_stopped_goes_on_where_it_was(root, monkeypatch):
    import comfy.model_management as management

    clip, vae = encoders()
    real = type(vae).encode
    with monkeypatch.context() as patch:

        def stop_at_the_second(self, pixels):
            if vae.first_stage_model.encoded:
                management.interrupt_current_processing(True)
                management.throw_exception_if_processing_interrupted()
            return real(self, pixels)

        patch.setattr(type(vae), "encode", stop_at_the_second)
        with pytest.raises(management.InterruptProcessingException):
            cache(load(root), clip, vae)
    assert encoded(clip, vae) == (3, 1)
    result = cache(load(root), clip, vae)
    assert (result.num_encoded, result.num_found) == (2, 4)
    assert encoded(clip, vae) == (3, 3)


def test_broken_files_are_found_and_made_again(root, output):
    clip, vae = encoders()
    result = cache(load(root), clip, vae)
    item = result.cache.items[1]
    path = result.cache.files.path(item.latent_key)
    whole = path.read_bytes()
    tensors = result.cache.files.read(item.latent_key).tensors
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    result.cache.files.path(item.caption_key).unlink()
    with pytest.raises(TrainingError, match=r"cats/b.png cannot be used.*Run Cache Training Data again"):
        samples(result.cache)[1].read()
    assert cache(load(root), clip, vae).num_encoded == 2
    assert torch.equal(result.cache.files.read(item.latent_key).tensors["latent"], tensors["latent"])


def test_the_encoders_leave_memory(root):
    import comfy.model_management as management

    clip, vae = encoders()
    during = []
    real = type(vae).encode

    def look(self, pixels):
        latent = real(self, pixels)
        during.append([loaded.model for loaded in management.current_loaded_models])
        return latent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(vae), "encode", look)
        cache(load(root), clip, vae)
    assert [[model is vae.patcher for model in models] for models in during] == [[True]] * 3
    assert management.current_loaded_models == []


def samples(data, kind="flux"):
    from comfyui_ferry.core.comfy_adapter.cached_samples import read_examples

    return read_examples(PATCHERS[kind].build(), [], [], data)


def test_samples_are_what_the_stock_nodes_encode(root):
    clip, vae = encoders()
    training_set = join_sets(load(root), load(root, repeats=2, caption_dropout=0.5))
    found = samples(cache(training_set, clip, vae).cache)
    assert len(found) == 3 + 6
    assert [source.shape for source in found[:3]] == [(1, 16, 4, 4), (1, 16, 4, 4), (1, 16, 2, 8)]
    model = FLUX.build()
    items = [item for item in training_set.items for _ in range(item.repeats)]
    for source, item in zip(found, items, strict=True):
        sample = source.read()
        with torch.inference_mode():
            expected = model.model.process_latent_in(vae.encode(read_pixels(item)))
            cond, options = clip.encode_from_tokens_scheduled(clip.tokenize(item.caption))[0]
        assert torch.equal(sample.latent, expected)
        assert torch.equal(sample.condition.entry[0], cond)
        assert torch.equal(sample.condition.entry[1]["pooled_output"], options["pooled_output"])
        assert sample.condition.latent is sample.latent
    dropped = found[-1].read()
    assert dropped.dropout == 0.5
    assert dropped.unconditional.entry[0].shape[1] == 1  # the empty caption is the start token alone


def test_two_buckets_are_trained_in_batches_of_one(root, monkeypatch):
    from comfyui_ferry.core.comfy_adapter import TrainingRequest, run_lora_training
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess
    from comfyui_ferry.core.training import LoraConfig, OffloadSettings, TrainingConfig

    clip, vae = encoders()
    data = cache(load(root, repeats=2), clip, vae).cache
    batches = []
    real = ComfyProcess.denoise

    def look(self, noisy, sigma, conditions):
        batches.append((tuple(noisy.shape), [float(caption.entry[0].sum()) for caption in conditions]))
        return real(self, noisy, sigma, conditions)

    monkeypatch.setattr(ComfyProcess, "denoise", look)
    request = TrainingRequest(
        LoraConfig(2, 2.0), TrainingConfig(6, 1e-3, batch_size=2), OffloadSettings(), save_dtype="fp32"
    )
    with torch.inference_mode():
        result = run_lora_training(FLUX.build(), [], [], request, data=data)
    assert all(torch.isfinite(torch.tensor(result.loss_map["loss"])))
    training = batches[-6:]  # before them, the self-check calls the model too
    assert {shape for shape, _ in training} == {(2, 16, 4, 4), (2, 16, 2, 8)}
    sums = [float(source.read().condition.entry[0].sum()) for source in samples(data)]
    own = {(2, 16, 4, 4): set(sums[:4]), (2, 16, 2, 8): set(sums[4:])}
    assert all(set(seen) <= own[shape] for shape, seen in training)


def test_what_does_not_fit_is_refused_before_anything_is_encoded(root, output):
    from comfyui_ferry.core.comfy_adapter.cached_samples import read_examples

    clip, vae = encoders()
    odd = load_training_folder(root, "cats", FolderOptions(resolution_px=36, step_px=12, max_upscale=9.0))
    with pytest.raises(RequestError, match=r"brought to 36x36.*multiples of 8"):
        cache(odd, clip, vae)
    for empty in ((None, vae), (clip, None)):  # as a checkpoint without text encoder or VAE gives them
        with pytest.raises(RequestError, match="is empty"):
            cache(load(root), *empty)
    assert encoded(clip, vae) == (0, 0)
    assert not output.exists()
    with pytest.raises(RequestError, match="together with latents"):
        read_examples(FLUX.build(), [FLUX.latent()], [], cache(load(root), clip, vae).cache)
    _, wrong = encoders(channels=4)
    with pytest.raises(RequestError, match="takes 16 channels"):
        samples(cache(load(root), clip, wrong).cache)


def film(root):
    """Put a video of ten frames, from black to grey, beside the pictures."""
    av = pytest.importorskip("av")
    with av.open(str(root / "cats" / "d.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for index in range(10):
            frame = torch.full((32, 32, 3), 12 * index, dtype=torch.uint8).numpy()
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())
    (root / "cats" / "d.txt").write_text("a video")


def test_a_video_is_one_latent_of_several_frames(root):
    film(root)
    clip, vae = encoders(is_video=True)
    found = cache(load(root, video_frames=9, video_rate_hz=8.0), clip, vae).cache
    assert [item.shape for item in found.items][2:] == [(1, 16, 1, 2, 8), (1, 16, 3, 4, 4)]
    assert [source.shape for source in samples(found, "wan")] == [item.shape for item in found.items]
    with pytest.raises(RequestError, match=r"video_frames=8.*Set video_frames to 5"):
        cache(load(root, video_frames=8, video_rate_hz=8.0), clip, vae)
    with pytest.raises(RequestError, match="encodes single pictures only"):
        cache(load(root, video_frames=9, video_rate_hz=8.0), *encoders())


def test_a_video_of_a_picture_starts_from_its_first_frame(root):
    """Wan I2V sees what the stock node gives it, and is not trained without."""
    import comfy_extras.nodes_wan as stock
    from comfyui_ferry.core.comfy_adapter import cache_training_set
    from comfyui_ferry.core.comfy_adapter.cached_samples import read_examples
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess

    film(root)
    clip, vae = encoders(is_video=True)
    everything = load(root, video_frames=9, video_rate_hz=8.0, caption_dropout=0.5)
    with pytest.raises(RequestError, match=r"start_image='first frame' was asked with cats/a.png"):
        cache_training_set(everything, clip, vae, start_image="first frame")
    videos = replace(everything, items=everything.items[-1:])
    model = PATCHERS["wan"].build(in_dim=36)
    with torch.inference_mode():
        plain, started = (
            cache_training_set(videos, clip, vae, start_image=start).cache
            for start in ("none", "first frame")
        )
        pixels = read_pixels(videos.items[0])
        positive = clip.encode_from_tokens_scheduled(clip.tokenize("a video"))
        expected = stock.WanImageToVideo.execute(
            positive, positive, vae, 32, 32, 9, 1, start_image=pixels[:1]
        ).args[0][0][1]
    with pytest.raises(RequestError, match=r"cats/d.mp4 has no start picture.*'first frame'"):
        read_examples(model, [], [], plain)
    assert plain.digest != started.digest
    (source,) = read_examples(model, [], [], started)
    sample = source.read()
    for caption in (sample.condition, sample.unconditional):
        for name in ("concat_latent_image", "concat_mask"):
            torch.testing.assert_close(caption.entry[1][name], expected[name], rtol=0, atol=0)
    process = ComfyProcess(model, torch.device("cpu"), seed=0)
    (group,) = process.groups(sample.latent, [sample.condition])
    assert group.conds[0]["c_concat"].cond.shape[1] == 20 and bool(group.conds[0]["c_concat"].cond.any())
    model.model.diffusion_model.img_emb = torch.nn.Identity()  # Wan 2.1's
    with pytest.raises(RequestError, match="no CLIP vision output"):
        read_examples(model, [], [], started)
