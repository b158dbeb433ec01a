from __future__ import annotations

import torch
from comfyui_ferry.core.offload.tensors import (
    PlainTensor,
    SubstitutedTensor,
    make_managed,
    set_data,
    set_data_and_gradient,
)
from ferry_support.offload_cases import Int8Weight, TaggedParameter
from torch import nn


def wrapper() -> Int8Weight:
    return Int8Weight(torch.ones(2, 2, dtype=torch.int8), torch.full((2, 1), 0.5))


def test_which_tensors_keep_their_identity():
    with torch.inference_mode():
        inference = torch.ones(1)
    assert type(make_managed(nn.Parameter(torch.ones(1)), [])) is PlainTensor
    assert type(make_managed(TaggedParameter(torch.ones(1)), [])) is PlainTensor
    assert type(make_managed(wrapper(), [])) is SubstitutedTensor
    assert type(make_managed(inference, [])) is SubstitutedTensor


def test_rebinding_keeps_identity_version_and_graph():
    parameter = nn.Parameter(torch.ones(3))
    y = (parameter * 2).sum()
    version, other = parameter._version, torch.zeros(3)
    set_data(parameter, other)
    assert parameter.data_ptr() == other.data_ptr() and parameter._version == version
    y.backward()
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))
    set_data_and_gradient(parameter, torch.ones(3))
    assert parameter.grad is not None


def test_an_inference_tensor_is_rebound_and_stays_one():
    with torch.inference_mode():
        tensor = torch.ones(3)
    other = torch.arange(3.0)
    set_data(tensor, other)
    assert tensor.is_inference() and tensor.data_ptr() == other.data_ptr()
