from __future__ import annotations

import torch
from comfyui_ferry.core.offload.wrappers import take_apart
from ferry_support.offload_cases import Int8Weight
from torch import nn


def test_a_wrapper_is_taken_apart_and_rebuilt_around_others():
    wrapper = Int8Weight(torch.ones(2, 2, dtype=torch.int8), torch.full((2, 1), 0.5))
    leaves, rebuild = take_apart(nn.Parameter(wrapper, requires_grad=False))
    assert [leaf.dtype for leaf in leaves] == [torch.int8, torch.float32]
    made = rebuild([leaves[0] * 3, leaves[1]])
    assert type(made) is Int8Weight
    assert torch.equal(made.values * made.scale, torch.full((2, 2), 1.5))


def test_a_plain_tensor_is_its_own_only_part():
    tensor = torch.ones(2)
    leaves, rebuild = take_apart(tensor)
    assert leaves == [tensor] and rebuild([leaves[0]]) is tensor
