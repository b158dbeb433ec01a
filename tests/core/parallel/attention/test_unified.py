"""Ring, and Ulysses x Ring, against attention over the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel import ParallelDims, build_mesh
from comfyui_ferry.core.parallel.attention import ring
from comfyui_ferry.core.parallel.attention.local import parse_call
from comfyui_ferry.core.parallel.attention.unified import sequence_attention
from ferry_support.parity import relative_error
from ferry_support.ranks import run_ranks
from ferry_support.tiny_models import noise
from ferry_support.toy_model import attention

TOKENS = 9
SIZES = {
    2: [(5, 4), (9, 0), (0, 9)],
    3: [(3, 3, 3), (4, 0, 5), (0, 8, 1)],
    4: [(3, 2, 2, 2), (0, 4, 0, 5), (9, 0, 0, 0), (0, 0, 5, 4)],
}
DEGREES = [
    ParallelDims(ring=2),
    ParallelDims(ring=3),
    ParallelDims(ring=4),
    ParallelDims(ring=2, ulysses=2),
    ParallelDims(cfg=2, ring=2),
]


def tensors_of(heads: int, batch: int) -> tuple[torch.Tensor, ...]:
    return tuple(noise(batch, heads, TOKENS, 8, seed=seed) for seed in range(3))


def masks_of(heads: int, batch: int) -> dict[str, torch.Tensor | None]:
    return {
        "none": None,
        "full": noise(TOKENS, TOKENS),
        "bool": noise(TOKENS, TOKENS) > -0.5,
        "keys": noise(batch, 1, TOKENS) > -0.5,
        "for each head": noise(batch, heads, TOKENS, TOKENS),
        # One process' backend reads True as 1, so the ring must.
        "added": noise(batch, 1, TOKENS) > -0.5,
    }


def _errors(dims: ParallelDims) -> list[tuple[Any, float]]:
    """Return this rank's error of every combination; all of them on one set of processes."""
    group = build_mesh(dims).sequence_group
    assert group is not None
    rank, errors = dist.get_rank(group.whole), []
    for heads in (1, 3, 4):
        for batch in (1, 2):
            tensors, masks = tensors_of(heads, batch), masks_of(heads, batch)
            for sizes in SIZES[dims.sequence_size]:
                local = tuple(tensor.split(sizes, 2)[rank] for tensor in tensors)
                call = parse_call(_only_asked, local, heads, (), {"skip_reshape": True, "scale": 0.3})
                for name, mask in masks.items():
                    if name == "added":
                        call = replace(call, function=_adds_bools)
                    output = sequence_attention(call, token_sizes=sizes, mask=mask, group=group)
                    assert output.is_contiguous()
                    assert output.shape == (batch, sizes[rank], heads * 8)
                    read = mask.float() if mask is not None and name == "added" else mask
                    expected = _whole(tensors, read).split(sizes, 1)[rank]
                    if expected.numel():
                        errors.append(((heads, batch, sizes, name), relative_error(output, expected)))
    return errors


def _only_asked(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    assert q.shape[2] == 2, "the ring has kernels of its own; it only asks what a bool mask means"
    return attention(q, *args, **kwargs)


def _adds_bools(*args: Any, mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return _only_asked(*args, mask=mask.float(), **kwargs)


def _whole(tensors: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> torch.Tensor:
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]
    output = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=0.3)
    return output.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dims", DEGREES, ids=str)
def test_equals_attention_over_the_whole(dims: ParallelDims) -> None:
    """Empty chunks, one head on four ranks, every kind of mask."""
    results = run_ranks(_errors, dims.world_size, dims)
    assert sum(map(len, results)) > 0
    for errors in results:
        for case, error in errors:
            # fp32; only the order of sums over keys differs.
            assert error <= 3e-6, (case, error)


def _bf16_error(dims: ParallelDims) -> float:
    group = build_mesh(dims).sequence_group
    assert group is not None
    tensors = tuple(tensor.bfloat16() for tensor in tensors_of(3, 2))
    sizes = SIZES[dims.sequence_size][0]
    rank = dist.get_rank(group.whole)
    local = tuple(tensor.split(sizes, 2)[rank] for tensor in tensors)
    call = parse_call(_only_asked, local, 3, (), {"skip_reshape": True, "scale": 0.3})
    output = sequence_attention(call, token_sizes=sizes, mask=None, group=group)
    expected = _whole(tuple(tensor.float() for tensor in tensors), None).split(sizes, 1)[rank]
    return relative_error(output.float(), expected)


def test_bf16_travels_and_is_merged_in_fp32() -> None:
    # Two roundings of 2 ** -8 at most: of each part, and of the result.
    assert max(run_ranks(_bf16_error, 4, ParallelDims(ring=2, ulysses=2))) <= 2**-7


def _events() -> list[str]:
    events: list[str] = []
    send, attend = dist.batch_isend_irecv, ring.attend_part

    def sending(operations):
        events.append("post")
        return send(operations)

    def attending(*args, **kwargs):
        events.append("attend")
        return attend(*args, **kwargs)

    dist.batch_isend_irecv, ring.attend_part = sending, attending
    group = build_mesh(ParallelDims(ring=3)).sequence_group
    assert group is not None
    q, k, v = (tensor.split(3, 2)[dist.get_rank()] for tensor in tensors_of(2, 1))
    ring.ring_attention(q, k, v, chunk_sizes=(3, 3, 3), mask=None, scale=None, group=group.whole)
    return events


def test_the_next_chunk_is_under_way_while_one_is_attended_to() -> None:
    assert run_ranks(_events, 3) == [["post", "attend", "post", "attend", "attend"]] * 3


def _refusal() -> str:
    group = build_mesh(ParallelDims(ring=2)).sequence_group
    assert group is not None
    q = noise(1, 2, 3, 4)
    call = parse_call(attention, (q, q, q), 2, (), {"skip_reshape": True, "dropout": 0.1})
    with pytest.raises(PlanError) as caught:
        sequence_attention(call, token_sizes=(3, 3), mask=None, group=group)
    return str(caught.value)


def test_options_that_the_ring_cannot_honour_are_refused() -> None:
    assert all("['dropout']" in message for message in run_ranks(_refusal, 2))
