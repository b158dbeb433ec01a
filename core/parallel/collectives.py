"""Collectives over uneven parts, the same on gloo (CPU) and NCCL (CUDA).

Sizes are always known beforehand and never exchanged, so no call waits for the host. gloo has no
uneven all-gather and no float8, hence the padding and the byte views here.

What this module does not do: there is no backward; sampling needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import PlanError
from .exchange_timer import waiting

# torch 2.14 gave it a new name, and warns of the old one.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def all_to_all(
    send: torch.Tensor,
    send_sizes: Sequence[int],
    *,
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Send a different part of ``send`` to every rank; all ranks of ``group`` must call.

    Args:
        send: ``[sum(send_sizes)]``, contiguous, the parts in rank order.
        send_sizes: Elements for each rank; 0 is allowed.
        receive_sizes: Elements from each rank.
        group: The ranks.

    Returns:
        ``[sum(receive_sizes)]``, the parts in rank order.
    """
    receive = send.new_empty(sum(receive_sizes))
    start_all_to_all(send, send_sizes, receive=receive, receive_sizes=receive_sizes, group=group).wait()
    return receive


class Transfer:
    """A collective that may be under way.

    Args:
        work: What to wait for, or None if the current stream waits for it already.
        send: What it reads, kept until then.
        receive: What it writes, likewise.
    """

    def __init__(self, work: dist.Work | None, send: torch.Tensor, receive: torch.Tensor) -> None:
        self._work = work
        self._kept: list[torch.Tensor] = [send, receive]

    def wait(self) -> None:
        """Make the current stream wait for it (on the CPU: the caller)."""
        if self._work is not None:
            with waiting(self._kept[0].device):
                self._work.wait()
        self._work = None
        self._kept.clear()


def start_all_to_all(
    send: torch.Tensor,
    send_sizes: Sequence[int],
    *,
    receive: torch.Tensor,
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
    overlapped: bool = False,
) -> Transfer:
    """Start ``all_to_all`` into ``receive``; all ranks of ``group`` must call.

    Bytes travel, so ranks may disagree on the dtype in which they see them.

    Args:
        send: ``[sum(send_sizes)]``, contiguous, the parts in rank order; not written until the end.
        send_sizes: Elements for each rank; 0 is allowed.
        receive: ``[sum(receive_sizes)]``, contiguous, of the dtype of ``send``.
        receive_sizes: Elements from each rank.
        group: The ranks.
        overlapped: Whether work that is queued until ``wait`` may run beside it.
    """
    refuse_gradients(send)
    width = send.element_size()
    with contextlib.nullcontext() if overlapped else waiting(send.device):
        work = dist.all_to_all_single(
            receive.view(torch.uint8),
            send.view(torch.uint8),
            [width * size for size in receive_sizes],
            [width * size for size in send_sizes],
            group=group,
            async_op=overlapped,
        )
    return Transfer(work, send, receive)


def all_gather(tensor: torch.Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup) -> torch.Tensor:
    """Join the ranks' tensors along dim 0; all ranks of ``group`` must call.

    Args:
        tensor: ``[sizes[rank], ...]``; other dims equal on all ranks.
        sizes: Rows on each rank; 0 is allowed.
        group: The ranks.

    Returns:
        ``[sum(sizes), ...]`` in rank order.
    """
    refuse_gradients(tensor)
    longest = max(sizes)
    padding = longest - tensor.shape[0]
    if padding:
        tensor = torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])])
    gathered = tensor.new_empty(len(sizes) * longest, *tensor.shape[1:])
    with waiting(tensor.device):
        getattr(dist, _ALL_GATHER)(_on_wire(gathered), _on_wire(tensor.contiguous()), group=group)
    if min(sizes) == longest:
        return gathered
    return torch.cat([part[:size] for part, size in zip(gathered.split(longest), sizes, strict=True)])


def all_reduce(
    tensor: torch.Tensor, *, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Return the sum of the ranks' tensors of one shape; all ranks of ``group`` must call.

    Args:
        tensor: Overwritten by the sum if it is contiguous.
        group: The ranks.
        op: What is computed instead of the sum.
    """
    refuse_gradients(tensor)
    total = tensor.contiguous()
    with waiting(tensor.device):
        dist.all_reduce(total, op=op, group=group)
    return total


def _on_wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a byte view of it if its dtype is one that gloo cannot send (fp8, bool)."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def refuse_gradients(tensor: torch.Tensor) -> None:
    """Check that no gradient is to flow through what travels between ranks.

    Raises:
        PlanError: If one is.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise PlanError(
            "a parallel model was run with gradients on, but its collectives have no backward. "
            "Run it under torch.inference_mode() or torch.no_grad()."
        )
