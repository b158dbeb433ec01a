"""A batch evaluated in parts is the batch evaluated at once, for every model whose plan has the method."""

from __future__ import annotations

import pytest
from comfyui_ferry.core.parallel import batch_size, join_batch, split_batch
from ferry_support.parity import TOLERANCE, relative_error, run_alone
from ferry_support.tiny_cases import CASES
from ferry_support.tiny_models import is_newer_comfyui

pytestmark = pytest.mark.comfy

_WHOLE = frozenset({"transformer_options"})


def batched(name: str) -> bool:
    case = CASES[name]
    return (is_newer_comfyui() or not case.newer_only) and batch_size(case.inputs()["x"]) > 1


def test_parts_of_a_batch_are_the_batch() -> None:
    seen = {}
    for name in filter(batched, CASES):
        model, inputs = CASES[name].build(), CASES[name].inputs()
        size = batch_size(inputs["x"])
        parts = split_batch(inputs, 2, size=size, whole=_WHOLE)
        assert len(parts) == 2
        joined = join_batch([run_alone(model, part) for part in parts])
        seen[name] = relative_error(joined, run_alone(model, inputs))
    assert len(seen) > 8
    # fp32: products of other shapes add in another order.
    assert all(error <= TOLERANCE for error in seen.values()), seen
