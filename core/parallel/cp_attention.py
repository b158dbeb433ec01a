"""The attention of a model that runs by a ``_cp_plan`` dictionary: caught, and sent over the ranks.

The dictionary does not say what an attention call is over, so the ranks tell each other how many queries and
keys they have. Keys that every rank has whole are then met once for each rank, which softmax does not change.
Keys of which a part is whole and a part is cut would be; they are told by their values and refused.

Shapes: ``B`` batch, ``H`` heads, ``Q`` queries and ``K`` keys of this rank, ``D`` head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import PlanError
from .attention.local import AttentionCall
from .attention.unified import sequence_attention
from .collectives import all_gather

if TYPE_CHECKING:
    from .cp_plan import CpPlanHandle

# What the same tokens may differ by on two ranks, beside others: kernels for other lengths round otherwise.
_SAME = 1e-2
_RESHAPES = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


class CaughtAttention(TorchFunctionMode):
    """Sends ``scaled_dot_product_attention`` over what is split through the group.

    On a rank without rows it also says what -1 means in a shape with a 0, which PyTorch cannot.
    """

    def __init__(self, handle: CpPlanHandle) -> None:
        super().__init__()
        self.handle = handle

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention and self.handle.split_open:
            return attend(self.handle, *args, **(kwargs or {}))
        if func in _RESHAPES and args[0].numel() == 0:
            args = _without_unknown(args)
        return func(*args, **(kwargs or {}))


def _without_unknown(args: tuple) -> tuple:
    """Return the arguments of a reshape of nothing with the -1 known: the other sizes keep their product."""
    tensor, *shape = args
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    if 0 not in sizes or -1 not in sizes:
        return args
    given = math.prod(size for size in tensor.shape if size)
    known = math.prod(size for size in sizes if size > 0)
    return tensor, tuple(given // known if size == -1 else size for size in sizes)


def attend(
    handle: CpPlanHandle,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend to the keys of all ranks; same arguments and result as the function that it stands for.

    Raises:
        PlanError: If the call is causal or has dropout, its mask is not one of keys, or some of its keys are
            whole and some cut.
    """
    if is_causal or dropout_p:
        raise PlanError("causal attention or dropout in a model that runs by a _cp_plan is not supported")
    queries, keys = handle.exchange(query, query.shape[2], key.shape[2])
    if handle.is_new:
        _check_keys(handle, key, keys)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    group = handle.group.whole
    if attn_mask is not None:
        if attn_mask.shape[-2] != 1 or attn_mask.shape[-1] != key.shape[2]:
            raise PlanError(
                f"a mask of shape {tuple(attn_mask.shape)} is not one of this rank's {key.shape[2]} keys"
            )
        attn_mask = all_gather(attn_mask.movedim(-1, 0), keys, group=group).movedim(0, -1)
    if queries == keys and query.shape[1] == key.shape[1]:
        call = AttentionCall(_plain_backend, query, key, value, None, True, options)
        return call.as_asked(
            sequence_attention(call, token_sizes=queries, mask=attn_mask, group=handle.group)
        )
    key, value = (
        all_gather(tensor.movedim(2, 0), keys, group=group).movedim(0, 2) for tensor in (key, value)
    )
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)


def _plain_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    *,
    mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    del options["skip_reshape"]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).transpose(1, 2).flatten(2)


def _check_keys(handle: CpPlanHandle, key: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Check that keys are either cut over the ranks or the same on all; collective.

    A run of keys at the begin or end that is the same on all ranks, and without which their number is that of
    something that was cut, is a whole part of them.

    Raises:
        PlanError: If not.
    """
    prints = all_gather(key.movedim(2, 0).float().sum((1, 2)), sizes, group=handle.group.whole)
    by_rank = prints.split(list(sizes))
    limit = _SAME * prints.abs().max() if prints.numel() else 0.0
    shared = min(sizes)

    def run_of_same(parts: Iterable[torch.Tensor]) -> int:
        first, *others = (part[:shared] for part in parts)
        same = torch.ones(shared, dtype=torch.bool, device=key.device)
        for other in others:
            same &= ((other - first).abs() <= limit).all(1)
        length = int(same.long().cumprod(0).sum())
        # Tokens that are all alike (a text of zeros) are alike on all ranks when they are cut as well.
        is_one_token = bool(((first[:length] - first[:1]).abs() <= limit).all())
        return 0 if is_one_token and length < max(sizes) else length

    same = max(run_of_same(by_rank), run_of_same(part.flip(0) for part in by_rank))
    if same == max(sizes):
        return
    sums = handle.cut_lengths()
    total, num_ranks = sum(sizes), len(sizes)
    if total not in sums or any(total - num_ranks * whole in sums for whole in range(1, same + 1)):
        raise PlanError(
            f"an attention call has {sizes} keys on the ranks, of which a part seems whole on every rank and "
            f"the rest cut; the _cp_plan cut {sorted(set(handle.lengths))} tokens. Let it cut all of a joint "
            "sequence, or call shard() and gather() in the model"
        )
