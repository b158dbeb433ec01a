"""Parallel Model among ComfyUI's own nodes: what the server accepts, and what the node passes on."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from comfyui_ferry.core.errors import RequestError
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]

FITS = {"gpus": 4, "cfg_degree": 2, "ulysses_degree": 2}


def node():
    from comfyui_ferry.nodes.parallel import ParallelModel

    return ParallelModel


@pytest.fixture
def validate(monkeypatch):
    """Validate a prompt's node as ComfyUI's server does; returns (valid, all messages)."""
    import execution
    from comfy_api.latest import io

    import nodes

    class Source(io.ComfyNode):
        @classmethod
        def define_schema(cls):
            outputs = [io.Model.Output(), io.Int.Output(), io.String.Output()]
            return io.Schema(node_id="Source", category="", outputs=outputs)

        @classmethod
        def execute(cls):
            return io.NodeOutput(None, 2, "auto")

    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "FerryParallelModel", node())
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "Source", Source)

    def run(**inputs):
        prompt = {
            "1": {"class_type": "Source", "inputs": {}},
            "2": {"class_type": "FerryParallelModel", "inputs": {"model": ["1", 0]} | inputs},
        }
        arguments = {"prompt_id": "p", "prompt": prompt, "item": "2", "validated": {}}
        known = inspect.signature(execution.validate_inputs).parameters
        call = execution.validate_inputs(
            **{name: value for name, value in arguments.items() if name in known}
        )
        valid, errors, _ = asyncio.run(call)
        return valid, " ".join(f"{error['message']} {error['details']}" for error in errors)

    return run


def test_schema():
    schema = node().define_schema()
    schema.validate()
    # Last and optional: workflows and prompts saved before they existed do not bring them.
    optional = ["ring_degree", "tensor_parallel_degree", "ray_address", "acceleration", "batch_degree"]
    assert [entry.id for entry in schema.inputs] == ["model", *FITS, *optional]
    assert all(entry.optional for entry in schema.inputs[-5:])
    assert all(entry.tooltip for entry in schema.inputs)
    assert node().GET_SCHEMA().node_id == "FerryParallelModel"


@pytest.mark.parametrize(
    "values",
    [
        FITS,
        FITS | {"gpus": "4"},
        FITS | {"gpus": ["1", 1]},
        {"gpus": 1, "cfg_degree": 1, "ulysses_degree": 1},
        FITS | {"gpus": 8, "ring_degree": 2},
        FITS | {"gpus": 8, "ring_degree": ["1", 1]},
        FITS | {"gpus": 8, "tensor_parallel_degree": 2, "acceleration": "torch.compile"},
        FITS | {"gpus": 8, "batch_degree": 2},
        FITS | {"gpus": 8, "ring_degree": 1, "tensor_parallel_degree": ["1", 1]},
        FITS | {"ray_address": ""},
        # More than this machine has; a cluster is asked once the prompt runs.
        {"gpus": 64, "cfg_degree": 2, "ulysses_degree": 32, "ray_address": "10.0.0.1:6379"},
        {"gpus": 64, "cfg_degree": 2, "ulysses_degree": 32, "ray_address": "auto"},
        {"gpus": 64, "cfg_degree": 2, "ulysses_degree": 32, "ray_address": ["1", 2]},
    ],
)
def test_what_fits_is_accepted(validate, values):
    """A number as text, as the browser may send it, and a linked value, which is not known yet."""
    assert validate(**values) == (True, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 0}, "gpus=0 was asked. There are"),
        ({"gpus": -2}, "gpus=-2 was asked. There are"),
        ({"gpus": 100000}, "Set gpus to a number from 1 to"),
        ({"cfg_degree": 0}, "cfg_degree=0 was asked"),
        ({"ulysses_degree": -1}, "ulysses_degree=-1 was asked"),
        ({"ulysses_degree": 3}, "Set gpus to 6, or change a degree"),
        ({"tensor_parallel_degree": 2}, "Set gpus to 8, or change a degree"),
        ({"tensor_parallel_degree": 0}, "tensor_parallel_degree=0 was asked"),
        ({"batch_degree": 0}, "batch_degree=0 was asked"),
        ({"gpus": "many"}, "many"),
        ({"acceleration": "fast"}, "acceleration='fast' was asked"),
        ({"acceleration": "cuda graphs"}, "need CUDA GPUs"),
        ({"gpus": None}, "gpus"),
        ({"ray_address": "ray://10.0.0.1:10001"}, "host:port as"),
        ({"ray_address": "auto", "gpus": 7}, "Set gpus to 4"),
        ({"gpus": True, "cfg_degree": 3}, "Set gpus to 6, or change a degree"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_the_server(validate, change, message):
    valid, text = validate(**FITS | change)
    assert not valid
    assert message in text


@pytest.mark.parametrize("value", ["2", None, 2.0, True])
def test_a_linked_value_that_is_no_whole_number_is_refused_when_it_arrives(value):
    with pytest.raises(RequestError, match=r"gpus=.*whole number.*connect an INT"):
        node().execute(PATCHERS["wan"].build(), gpus=value, cfg_degree=1, ulysses_degree=2)


def test_execute_returns_another_model_and_leaves_the_input_as_it_was():
    model = PATCHERS["wan"].build()
    result = node().execute(model, gpus=2, cfg_degree=1, ulysses_degree=2).args[0]
    assert result is not model
    assert result.model is model.model
    assert not model.attachments
    assert not model.injections
    assert "_forward" not in model.model.diffusion_model.__dict__
