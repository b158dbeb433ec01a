"""Whatever changes a result changes the digest, and nothing else does."""

from __future__ import annotations

import numpy
import pytest
import torch
from comfyui_ferry.core.training.dataset import content_digest, tensors_digest


def scale_by(factor):
    return lambda value: value * factor


DIFFERENT = [
    None, 0, 0.0, False, "", b"", [], {}, "a", b"a", [1, 2], [[1], 2], [1, [2]], {"a": 1}, {"a": 2}, {"b": 1},
    torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.float16), torch.zeros(0), torch.ones(2),
    scale_by(2), scale_by(3), lambda value: value + 2, {1, 2}, {1, 3}, torch.float16, torch.float32,
]  # fmt: skip


def test_different_values_have_different_digests():
    assert len({content_digest(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_equal_values_have_one_digest():
    strided = torch.arange(12.0).view(3, 4).t()
    assert content_digest(strided) == content_digest(strided.contiguous())
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})
    assert content_digest((1, "x")) == content_digest([1, "x"])
    assert content_digest(numpy.int64(3)) == content_digest(3)
    with torch.inference_mode():
        assert content_digest(torch.ones(2)) == content_digest(DIFFERENT[20])


def test_one_bit_of_one_weight_counts():
    weights = {f"layer.{index}": torch.zeros(1000, dtype=torch.bfloat16) for index in range(5)}
    before = tensors_digest(weights)
    assert tensors_digest(dict(reversed(weights.items()))) == before
    weights["layer.3"][999] = 1e-30
    assert tensors_digest(weights) != before


def test_an_object_that_could_hold_anything_is_refused():
    with pytest.raises(TypeError, match=r"builtins\.object"):
        content_digest([1, {"a": object()}])
