"""Shard, attend and gather by hand, against one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.parallel import ParallelDims, attend, gather, shard
from ferry_support.parity import TOLERANCE, layouts_of, relative_error, sequence_group, world_sequence
from ferry_support.ranks import run_ranks
from ferry_support.tiny_models import noise
from torch.nn import functional as F


def forward(
    x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor, dims: ParallelDims | None
) -> torch.Tensor:
    """A model that drops tokens by what it sees, so no plan can say where it is cut."""
    group = None if dims is None else sequence_group(dims)
    for _ in range(2):
        kept = x[:, x.mean((0, 2)) > -0.5]
        length, text = kept.shape[1], memory.shape[1]
        joint = torch.cat((memory, kept), 1)
        if group is not None:
            joint = torch.cat((shard(memory, group=group), shard(kept, group=group)), 1)
        q, k, v = (joint.unflatten(-1, (3, 4)).transpose(1, 2) * factor for factor in (1.0, 0.7, 1.3))
        rows = mask[: text + length, : text + length]
        if group is None:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=rows, scale=0.4)
        else:
            mixed = attend(q, k, v, lengths=(text, length), group=group, mask=rows, scale=0.4)
        mixed = mixed.transpose(1, 2).flatten(2)
        if group is None:
            x = kept + mixed[:, text:]
        else:
            own = mixed[:, shard(memory, group=group).shape[1] :]
            x = gather(shard(kept, group=group) + own, length, group=group)
    return x


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_with_dynamic_cuts_equals_one_rank(world_size: int) -> None:
    """With four ranks one has none of the three text tokens; an empty part of a tensor is one, too."""
    x, memory, mask = noise(2, 13, 12), noise(2, 3, 12), noise(16, 16)
    expected = forward(x, memory, mask, None)
    assert expected.shape[1] < x.shape[1]

    def body() -> float:
        with torch.inference_mode():
            outputs = [forward(x, memory, mask, dims) for dims in layouts_of(world_size)]
        return max(relative_error(output, expected) for output in outputs)

    # fp32: the same sums in another order.
    assert max(run_ranks(body, world_size)) <= TOLERANCE


def test_shard_and_gather_are_inverse_in_any_dim() -> None:
    whole = noise(2, 5, 2)

    def body() -> None:
        group, rank = world_sequence(), dist.get_rank()
        for dim, sizes in ((1, [2, 2, 1]), (2, [1, 1, 0]), (-2, [2, 2, 1])):
            part = shard(whole, dim, group=group)
            assert part.shape[dim] == sizes[rank]
            assert torch.equal(gather(part, whole.shape[dim], dim, group=group), whole)

    run_ranks(body, 3)


def test_gradients_are_refused_instead_of_lost() -> None:
    """By every method, on the rank that has no token as well, so that none waits for another."""

    def body() -> list[str]:
        seen = []
        whole = noise(1, 1, 6).requires_grad_()
        for dims in layouts_of(2):
            group = sequence_group(dims)
            part = shard(whole, group=group)
            q = part.unflatten(-1, (3, 2)).transpose(1, 2)
            for fails in (
                lambda q=q, group=group: attend(q, q, q, lengths=(1,), group=group),
                lambda part=part, group=group: gather(part, 1, group=group),
            ):
                with pytest.raises(PlanError) as caught:
                    fails()
                seen.append(str(caught.value))
        return seen

    for seen in run_ranks(body, 2):
        assert len(seen) == 4 and all("no backward" in message for message in seen)


def test_parts_that_do_not_fit_are_refused() -> None:
    def body() -> None:
        group = world_sequence()
        with pytest.raises(PlanError, match=r"a part of 4 rows .* this rank has 5 of the 5"):
            gather(noise(1, 4, 2), 5, group=group)
        q = noise(1, 3, 4, 8)
        with pytest.raises(PlanError, match=r"4 tokens were given, but this rank has 7 of \(2, 5\)"):
            attend(q, q, q, lengths=(2, 5), group=group)
        with pytest.raises(PlanError, match="does not fit a sequence of 4 tokens"):
            attend(q, q, q, lengths=(4,), group=group, mask=torch.ones(3, 3))

    run_ranks(body, 1)
