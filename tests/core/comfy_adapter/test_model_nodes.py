"""Every node of ComfyUI that changes a MODEL: as on one GPU, before or behind Parallel Model, or refused.

All of them, with their default inputs, and what came of each:

    .venv/bin/python -m pytest -s -m slow tests/core/comfy_adapter/test_model_nodes.py
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.sampling import CFG_2, TOLERANCE, ULYSSES_2, difference, parallel, sample
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(500)]

# Each of another kind: wrappers, sampling, guidance, options that travel, patches that cannot.
QUICK = {
    "nodes_easycache": "EasyCacheNode",
    "nodes_model_advanced": "ModelSamplingFlux",
    "nodes_rope": "ScaleROPE",
    "nodes_hypertile": "HyperTile",
    "nodes_slg": "SkipLayerGuidanceDiTSimple",
}
_PLAIN = {"INT": 1, "FLOAT": 1.0, "STRING": "", "BOOLEAN": False}


def default_inputs(cls: Any) -> dict[str, Any] | None:
    """Return a node's inputs but the MODEL, which is under `""`; None if it takes or makes other things."""
    if tuple(getattr(cls, "RETURN_TYPES", ()))[:1] != ("MODEL",):
        return None
    values: dict[str, Any] = {}
    for name, (kind, *rest) in cls.INPUT_TYPES().get("required", {}).items():
        options = rest[0] if rest and isinstance(rest[0], dict) else {}
        if kind == "MODEL" and "" not in values:
            values[""] = name
        elif isinstance(kind, list) or kind == "COMBO":
            choices = kind if isinstance(kind, list) else options.get("options")
            values[name] = options.get("default", choices[0] if choices else None)
        elif "default" in options or kind in _PLAIN:
            values[name] = options.get("default", _PLAIN.get(kind))
        else:
            return None
    return values if "" in values else None


def apply(cls: Any, model: Any, values: dict[str, Any]) -> Any:
    arguments = {name or values[""]: model if not name else value for name, value in values.items()}
    with torch.inference_mode():
        if hasattr(cls, "define_schema"):
            return cls.execute(**arguments).result[0]
        return getattr(cls(), cls.FUNCTION)(**arguments)[0]


def outcome(make: Callable[[], Any]) -> torch.Tensor | str:
    try:
        return sample(make(), "flux", steps=2)
    except RequestError as error:
        return f"refused: {error}"


def check(name: str, cls: Any, model: Any, all_degrees: Sequence[dict[str, int]]) -> bool:
    """Try one node; False if it is of another kind."""
    values = default_inputs(cls)
    if values is None:
        return False
    try:
        expected = sample(apply(cls, model, values), "flux", steps=2)
    except Exception as error:  # a node for other models, or one that needs a file
        print(f"{name}: not on one GPU either ({type(error).__name__})")
        return True
    for degrees in all_degrees:
        for found in (
            outcome(lambda degrees=degrees: parallel(apply(cls, model, values), degrees)),
            outcome(lambda degrees=degrees: apply(cls, parallel(model, degrees), values)),
        ):
            if isinstance(found, str):
                assert "Remove that node" in found or "Remove the node" in found, f"{name}: {found}"
            else:
                assert difference(found, expected) <= TOLERANCE, name
            print(f"{name}: {found[:90] if isinstance(found, str) else 'as on one GPU'}")
    return True


def test_some_nodes_of_each_kind(one_thread):
    model = PATCHERS["flux"].build()
    for module, name in QUICK.items():
        cls = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
        assert check(name, cls, model, [CFG_2])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_node(one_thread):
    import nodes

    asyncio.run(nodes.init_builtin_extra_nodes())
    model = PATCHERS["flux"].build()
    found = [
        name
        for name, cls in sorted(nodes.NODE_CLASS_MAPPINGS.items())
        if not name.startswith("Ferry") and check(name, cls, model, [ULYSSES_2, CFG_2])
    ]
    assert len(found) > 20
