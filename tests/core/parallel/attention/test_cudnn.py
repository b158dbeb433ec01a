from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.parallel.attention import cudnn
from ferry_support.parity import relative_error
from ferry_support.tiny_models import noise
from ferry_support.toy_model import attention
from torch.nn import functional as F


def plain(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **_):
    output = attention(q, k, v, heads, mask, skip_reshape)
    return output.unflatten(-1, (heads, -1)).transpose(1, 2) if skip_output_reshape else output


class FakeTensor(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Put a kernel in the place of cuDNN's; returns the scales that it was called with."""
    calls: list[float | None] = []

    def run(q, k, v, *, scale):
        calls.append(scale)
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    monkeypatch.setattr(cudnn, "_run", run)
    monkeypatch.setattr(cudnn, "takes", lambda *tensors: tensors[0].shape[-1] % 8 == 0)
    return calls


def inputs(head_dim: int = 8) -> tuple[torch.Tensor, ...]:
    return tuple(noise(2, 3, 5, head_dim, seed=seed).as_subclass(FakeTensor) for seed in range(3))


@pytest.mark.parametrize("skip_reshape", [True, False])
@pytest.mark.parametrize("skip_output_reshape", [True, False])
def test_every_layout_that_callers_use(kernel, skip_reshape: bool, skip_output_reshape: bool) -> None:
    tensors = inputs()
    given = tensors if skip_reshape else tuple(tensor.transpose(1, 2).flatten(2) for tensor in tensors)
    options = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    output = cudnn.prefer_cudnn(plain)(*given, 3, **options)
    assert torch.equal(output, plain(*given, 3, **options))
    assert kernel == [None]


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (inputs(), {"mask": noise(5, 5)}),
        (inputs(), {"enable_gqa": True}),
        (inputs(head_dim=4), {}),
        (tuple(noise(2, 3, 5, 8) for _ in range(3)), {}),
    ],
)
def test_what_it_does_not_take_goes_to_the_function(kernel, tensors: Any, options: dict) -> None:
    output = cudnn.prefer_cudnn(plain)(*tensors, 3, skip_reshape=True, **options)
    assert torch.equal(output, plain(*tensors, 3, skip_reshape=True, **options))
    assert kernel == []


def test_only_plain_functions_are_changed(kernel) -> None:
    def sage(*args, **kwargs):
        return plain(*args, **kwargs)

    seen = []

    def override(function, *args, **kwargs):
        seen.append(function)
        return function(*args, **kwargs)

    for chosen in (cudnn.with_cudnn(override, {plain}), cudnn.with_cudnn(None, {plain})):
        for function in (plain, sage):
            chosen(function, *inputs(), 3, skip_reshape=True, scale=0.5)
    assert seen == [cudnn.prefer_cudnn(plain), sage]
    assert kernel == [0.5, 0.5]


@pytest.mark.gpu
def test_the_kernel_itself() -> None:
    q, k, v = (noise(2, 3, 257, 64, seed=seed).cuda().bfloat16() for seed in range(3))
    if not cudnn.takes(q, k, v):
        pytest.skip("no Hopper GPU, or no cuDNN")
    # As Ulysses hands them over: tokens first in memory.
    q, k, v = (tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for tensor in (q, k, v))
    output = cudnn.prefer_cudnn(plain)(q, k, v, 3, skip_reshape=True)
    assert output.is_contiguous() or output.transpose(0, 1).is_contiguous()
    expected = plain(q.float(), k.float(), v.float(), 3, skip_reshape=True)
    assert relative_error(output.float(), expected) <= 0.02  # bf16
    assert relative_error(output.float(), plain(q, k, v, 3, skip_reshape=True).float()) <= 0.02
