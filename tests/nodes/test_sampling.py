"""Parallel Sampler: KSampler's inputs and picture."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.forked_workers import forking
from ferry_support.sampling import TOLERANCE, difference, sample, worker_processes
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]

WAN = PATCHERS["wan"]


@pytest.fixture(scope="module", autouse=True)
def forked_workers():
    with forking():
        yield


def node():
    from comfyui_ferry.nodes.sampling import ParallelSampler

    return ParallelSampler


def settings(**changes):
    values = {
        "seed": 5, "steps": 3, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
        "positive": WAN.caption(1, 11), "negative": WAN.caption(2, 5),
        "latent_image": {"samples": torch.zeros_like(WAN.latent()["samples"])},
        "gpus": 2, "cfg_degree": 2, "ulysses_degree": 1,
    }  # fmt: skip
    return values | changes


def test_it_has_every_input_of_ksampler_by_the_same_name():
    """So that replacing KSampler in a workflow keeps its links and values."""
    import nodes

    schema = node().define_schema()
    schema.validate()
    ours = [entry.id for entry in schema.inputs]
    assert set(nodes.KSampler.INPUT_TYPES()["required"]) <= set(ours)
    options = {entry.id: entry.options for entry in schema.inputs if hasattr(entry, "options")}
    assert options["sampler_name"] == nodes.KSampler.INPUT_TYPES()["required"]["sampler_name"][0]
    assert options["scheduler"] == nodes.KSampler.INPUT_TYPES()["required"]["scheduler"][0]


def test_degrees_that_do_not_fit_are_refused_by_validation():
    assert node().validate_inputs(gpus=2, cfg_degree=2, ulysses_degree=1) is True
    assert "Set gpus to 4" in node().validate_inputs(gpus=2, cfg_degree=2, ulysses_degree=2)
    assert node().validate_inputs(gpus=None, cfg_degree=2, ulysses_degree=2) is True


def test_it_returns_what_ksampler_returns():
    model = WAN.build()
    latent = node().execute(model, **settings()).args[0]
    assert difference(latent["samples"], sample(model, "wan")) <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_image": {"samples": torch.full((1, 16, 2, 8, 6), float("nan"))}}, "1536 NaN or infinite"),
        ({"positive": []}, "'positive' is empty"),
        ({"gpus": 3}, "Set gpus to 2"),
    ],
    ids=["NaN latent", "empty prompt", "degrees"],
)
def test_bad_input_is_refused_before_a_worker_starts(change, message):
    from comfyui_ferry.core.comfy_adapter import close_workers

    close_workers()
    with pytest.raises(RequestError, match=message):
        node().execute(WAN.build(), **settings(**change))
    assert worker_processes() == []
