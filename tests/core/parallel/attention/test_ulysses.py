from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.parallel.attention import ulysses
from comfyui_ferry.core.parallel.attention.local import parse_call
from comfyui_ferry.core.parallel.attention.ulysses import ulysses_attention
from comfyui_ferry.core.parallel.sequence import split_sizes
from ferry_support.parity import relative_error, world_group
from ferry_support.ranks import run_ranks
from ferry_support.tiny_models import noise
from ferry_support.toy_model import attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _attend(
    tensors: Tensors, masks: list, sizes: tuple[int, ...], num_groups: int | None = None
) -> tuple[list[torch.Tensor], list[Any]]:
    """Return this rank's output for each mask, and what its backend was called with."""
    seen: list[Any] = []

    def backend(q, k, v, heads, **options):
        seen.append((heads, tuple(q.shape), sorted(options)))
        return attention(q, k, v, heads, **options)

    local = tuple(tensor.split(sizes, 2)[dist.get_rank()] for tensor in tensors)
    call = parse_call(backend, local, tensors[0].shape[1], (), {"skip_reshape": True, "scale": None})
    outputs = [
        ulysses_attention(call, token_sizes=sizes, mask=mask, group=world_group(), num_groups=num_groups)
        for mask in masks
    ]
    assert all(output.is_contiguous() for output in outputs)
    return outputs, seen


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("sizes", [(5, 4), (4, 0, 5), (3, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_equals_attention_over_the_whole(heads: int, sizes: tuple[int, ...], batch: int) -> None:
    tensors = (
        noise(batch, heads, 9, 4),
        noise(batch, heads, 9, 4, seed=1),
        noise(batch, heads, 9, 4, seed=2),
    )
    masks = [None, noise(9, 9), noise(batch, 1, 9), noise(batch, heads, 9, 9)]
    results = run_ranks(_attend, len(sizes), tensors, masks, sizes)
    for index, mask in enumerate(masks):
        expected = attention(*tensors, heads, mask, skip_reshape=True)
        output = torch.cat([outputs[index] for outputs, _ in results], dim=1)
        # fp32; only the order of sums over keys may differ.
        assert relative_error(output, expected) <= 1e-6
    for size, (_, seen) in zip(split_sizes(heads, len(sizes)), results, strict=True):
        # A rank without heads calls no backend, yet takes part in both exchanges.
        expected_call = (size, (batch, size, 9, 4), ["mask", "scale", "skip_reshape"])
        assert seen == ([expected_call] * len(masks) if size else [])


@pytest.mark.parametrize("heads", [5, 6])
@pytest.mark.parametrize("sizes", [(5, 4), (4, 0, 5)], ids=str)
def test_heads_travel_in_groups(heads: int, sizes: tuple[int, ...]) -> None:
    """Uneven groups, more groups than a rank has heads, masks by head; and a dtype that is sent widened."""
    tensors = tuple(noise(2, heads, 9, 4, seed=seed).bfloat16() for seed in range(3))
    mask = noise(2, heads, 9, 9).bfloat16()
    whole = run_ranks(_attend, len(sizes), tensors, [mask], sizes, 1)
    for num_groups in (2, 3):
        results = run_ranks(_attend, len(sizes), tensors, [mask], sizes, num_groups)
        for (outputs, seen), (expected, once) in zip(results, whole, strict=True):
            # A head is computed alone, so in groups it is the same, bit for bit.
            assert torch.equal(outputs[0], expected[0])
            assert sum(count for count, *_ in seen) == sum(count for count, *_ in once)
            assert len(seen) == min(num_groups, once[0][0])
    expected = attention(*(tensor.float() for tensor in tensors), heads, mask.float(), skip_reshape=True)
    output = torch.cat([outputs[0] for outputs, _ in whole], dim=1)
    assert relative_error(output.float(), expected) <= 0.02  # bf16


def test_large_messages_are_sent_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = (noise(1, 6, 9, 4), noise(1, 6, 9, 4, seed=1), noise(1, 6, 9, 4, seed=2))
    monkeypatch.setattr(ulysses, "GROUP_BYTES", 3 * 3 * 4 * 4 * 2)
    assert run_ranks(_count_collectives, 2, tensors) == [["all_to_all_single"] * 4] * 2


def _count_collectives(tensors: Tensors) -> list[str]:
    called: list[str] = []

    def counting(name):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            called.append(name)
            return original(*args, **kwargs)

        return call

    known = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_reduce", "broadcast")
    names = [name for name in known if hasattr(dist, name)]
    originals = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, counting(name))
    try:
        _attend(tensors, [None], (5, 4))
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return called


def test_q_k_v_travel_in_one_collective_and_sizes_are_never_exchanged() -> None:
    tensors = (noise(1, 3, 9, 4), noise(1, 3, 9, 4), noise(1, 3, 9, 4))
    assert run_ranks(_count_collectives, 2, tensors) == [["all_to_all_single"] * 2] * 2
