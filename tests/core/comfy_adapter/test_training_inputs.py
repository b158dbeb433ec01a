"""LATENT and CONDITIONING inputs as samples, or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy

FLUX = PATCHERS["flux"]
NAN = float("nan")
WRONG_OPTIONS = {
    "pooled_output": ["x", noise(24), noise(2, 24), noise(1, 24) * NAN],
    "guidance": ["x", NAN, torch.tensor([NAN])],
    "reference_latents": [
        noise(1, 16, 8, 6),  # no list
        [None],
        [noise(2, 16, 8, 6)],
        [noise(1, 16, 8, 6), noise(1, 16, 1, 8, 6)],
        [noise(1, 4, 8, 6)],
        [noise(1, 16, 8, 6) * NAN],
    ],
}


@pytest.fixture(scope="module")
def model():
    return FLUX.build()


def read(model, latents, captions):
    from comfyui_ferry.core.comfy_adapter.training_inputs import read_samples

    with torch.inference_mode(False):
        return read_samples(model, latents, captions)


def test_a_batched_latent_and_a_list_give_the_same_samples(model):
    captions = [FLUX.caption(seed) for seed in range(3)]
    batch = FLUX.latent(0, batch=3)
    rows = [{"samples": row[None]} for row in batch["samples"]]
    first, second = read(model, [batch], captions), read(model, rows, captions)
    merged = read(model, [batch], [[entry for caption in captions for entry in caption]])
    for samples in (first, second, merged):
        assert [tuple(sample.latent.shape) for sample in samples] == [(1, 16, 8, 6)] * 3
        for row, sample in enumerate(samples):
            assert torch.equal(sample.latent, first[row].latent)
            assert torch.equal(sample.condition.entry[0], captions[row][0][0])


def test_latents_are_scaled_as_the_sampler_does(model):
    latent = FLUX.latent(0)
    (sample,) = read(model, [latent], [FLUX.caption()])
    assert torch.equal(sample.latent, model.model.process_latent_in(latent["samples"]))
    assert not torch.equal(sample.latent, latent["samples"])


def test_several_sizes_in_one_list(model):
    latents = [{"samples": noise(2, 16, 8, 6)}, {"samples": noise(1, 16, 4, 4)}]
    shapes = [tuple(sample.latent.shape) for sample in read(model, latents, [FLUX.caption()])]
    assert shapes == [(1, 16, 8, 6), (1, 16, 8, 6), (1, 16, 4, 4)]


def test_a_picture_is_one_frame_for_a_video_model():
    wan = PATCHERS["wan"]
    (sample,) = read(wan.build(), [{"samples": noise(1, 16, 8, 6)}], [wan.caption()])
    assert tuple(sample.latent.shape) == (1, 16, 1, 8, 6)


def test_inference_tensors_become_normal_ones(model):
    with torch.inference_mode():
        latent, caption = FLUX.latent(), FLUX.caption()
        (sample,) = read(model, [latent], [caption])
    assert latent["samples"].is_inference()
    embedding, options = sample.condition.entry
    for tensor in (sample.latent, embedding, options["pooled_output"]):
        assert not tensor.is_inference()
    assert options["guidance"] == 3.5


@pytest.mark.parametrize(
    ("latents", "captions", "message"),
    [
        ([FLUX.latent(0, 3)], [FLUX.caption(), FLUX.caption()], "3 latents and 2 captions"),
        ([FLUX.latent(0, 2)], [FLUX.caption()] * 4, "2 latents and 4 captions"),
        ([], [FLUX.caption()], "0 latents"),
        ([{"samples": torch.empty(0, 16, 8, 6)}], [FLUX.caption()], "0 latents"),
        ([FLUX.latent()], [], "0 captions"),
        ([FLUX.latent()], [[]], "0 captions"),
        ([{"samples": torch.full((1, 16, 8, 6), float("nan"))}], [FLUX.caption()], "768 NaN"),
        ([{"samples": noise(1, 4, 8, 6)}], [FLUX.caption()], "takes 16 channels"),
        ([{"samples": noise(1, 16, 2, 8, 6)}], [FLUX.caption()], "2 more dimensions"),
        ([FLUX.latent() | {"noise_mask": torch.ones(1, 8, 6)}], [FLUX.caption()], "noise mask"),
        ([{"samples": "x"}], [FLUX.caption()], "type str"),
        ([FLUX.latent(0, 2)], [[[noise(2, 7, 40), {}]]], "batch of 2 embeddings"),
        ([FLUX.latent()], [[[torch.full((1, 7, 40), float("inf")), {}]]], "caption 0 has NaN"),
        ([{"samples": torch.tensor(3.0)}], [FLUX.caption()], "type Tensor"),
        *[
            ([FLUX.latent()], [[[value, {}]]], "caption 0 has .* for an embedding")
            for value in (None, "x", noise(7, 40), noise(1, 0, 40), torch.ones(1, 7, 40, dtype=torch.long))
        ],
        *[
            ([FLUX.latent()], [[[noise(1, 7, 40), {name: value}]]], f"caption 0 has .*{name}")
            for name, values in WRONG_OPTIONS.items()
            for value in values
        ],
    ],
)
def test_data_that_do_not_fit_are_refused(model, latents, captions, message):
    with pytest.raises(RequestError, match=message):
        read(model, latents, captions)


@pytest.mark.parametrize(
    "option",
    [
        {"control": object()},
        {"gligen": ("position", object(), [])},
        {"hooks": object()},
        {"area": (4, 4, 0, 0)},
        {"mask": torch.ones(1, 8, 6)},
        {"start_percent": 0.2},
        {"end_percent": 0.8},
    ],
)
def test_what_training_could_not_honour_is_refused(model, option):
    caption = FLUX.caption()
    caption[0][1] |= option
    with pytest.raises(RequestError, match=next(iter(option))):
        read(model, [FLUX.latent()], [caption])


def test_a_full_range_of_steps_is_nothing_special(model):
    caption = FLUX.caption()
    caption[0][1] |= {"start_percent": 0.0, "end_percent": 1.0}
    assert len(read(model, [FLUX.latent()], [caption])) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": [None]}, "latent of type NoneType"),
        ({"latents": ["x"]}, "latent of type str"),
        ({"latents": [{"samples": noise(1, 16, 8, 8).to(torch.complex64)}]}, "latent of torch.complex64"),
        ({"captions": [None]}, "conditioning 0 is of type NoneType"),
        ({"captions": [[[noise(1, 7, 8)]]]}, "entry 0 is list"),
        ({"captions": [[noise(1, 7, 8)]]}, "entry 0 is Tensor"),
        ({"captions": [[[noise(1, 7, 8), None]]]}, "entry 0 is list"),
    ],
)
def test_values_of_other_types_are_refused(model, changes, message):
    from comfyui_ferry.core.comfy_adapter.training_inputs import read_samples

    given = {"latents": [FLUX.latent()], "captions": [FLUX.caption()]} | changes
    with pytest.raises(RequestError, match=message):
        read_samples(model, given["latents"], given["captions"])
