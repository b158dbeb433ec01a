from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel.attention.local import parse_call
from ferry_support.tiny_models import noise
from ferry_support.toy_model import attention


def test_both_layouts_become_one() -> None:
    flat = tuple(noise(2, 5, 12, seed=seed) for seed in range(3))
    split = tuple(tensor.unflatten(-1, (3, 4)).transpose(1, 2) for tensor in flat)
    one = parse_call(attention, flat, 3, (), {})
    other = parse_call(attention, split, 3, (), {"skip_reshape": True})
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).shape == (2, 3, 5, 4)
    mixed = parse_call(attention, (*flat[:2], flat[2].unflatten(-1, (3, 4))), 3, (), {})
    assert torch.equal(mixed.v, one.v)
    expected = attention(*flat, 3)
    assert torch.equal(one.run(one.q, one.k, one.v, None), expected)
    assert torch.equal(one.as_asked(expected), expected)


def test_positional_arguments_keep_their_meaning() -> None:
    tensors = tuple(noise(1, 3, 5, 4) for _ in range(3))
    mask = noise(5, 5)
    call = parse_call(attention, tensors, 3, (mask, "fp32", True, True), {"scale": 0.5})
    assert call.mask is mask
    assert call.options == {"attn_precision": "fp32", "scale": 0.5}
    output = noise(1, 5, 12)
    assert torch.equal(call.as_asked(output), output.view(1, 5, 3, 4).transpose(1, 2))


@pytest.mark.parametrize("odd", [noise(1, 1, 5, 4), noise(1, 3, 5, 8), noise(1, 3, 5, 4).bfloat16()])
def test_tensors_that_do_not_agree_are_refused(odd: torch.Tensor) -> None:
    q = noise(1, 3, 5, 4)
    with pytest.raises(PlanError, match="must agree"):
        parse_call(attention, (q, odd, odd), 3, (), {"skip_reshape": True})
