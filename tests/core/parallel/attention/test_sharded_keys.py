"""Whole queries over sharded keys, against attention over all keys."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel.attention.local import parse_call
from comfyui_ferry.core.parallel.attention.sharded_keys import sharded_keys_attention
from ferry_support.parity import relative_error, world_group
from ferry_support.ranks import run_ranks
from ferry_support.tiny_models import noise
from ferry_support.toy_model import attention


def test_it_equals_attention_over_all_keys_the_same_on_every_rank() -> None:
    q, k, v = noise(2, 3, 4, 8), noise(2, 3, 9, 8, seed=1), noise(2, 3, 9, 8, seed=2)
    expected = attention(q, k, v, 3, skip_reshape=True)

    def body() -> list[torch.Tensor]:
        outputs = []
        for sizes in ([3, 3, 3], [1, 8, 0], [0, 0, 9]):
            mine = [tensor.split(sizes, 2)[dist.get_rank()] for tensor in (k, v)]
            call = parse_call(attention, (q, *mine), 3, (), {"skip_reshape": True})
            outputs.append(sharded_keys_attention(call, group=world_group()))
        return outputs

    ranks = run_ranks(body, 3)
    for outputs in ranks:
        for output, first in zip(outputs, ranks[0], strict=True):
            assert torch.equal(output, first)
            # fp32: three partial sums instead of one.
            assert relative_error(output, expected) <= 1e-6


def test_a_mask_is_refused() -> None:
    q = noise(1, 3, 4, 8)
    call = parse_call(attention, (q, q, q), 3, (torch.ones(4, 4),), {"skip_reshape": True})
    with pytest.raises(PlanError, match="mask"):
        sharded_keys_attention(call, group=None)  # type: ignore[arg-type]
