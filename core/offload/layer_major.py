"""Gradient accumulation block by block: all micro-batches pass through a block before it leaves.

Accumulating the usual way moves all weights twice for every micro-batch. Here the order of the two
loops is exchanged, so ``N`` micro-batches move the bytes of one. It needs to be told where the blocks
are, because a model's own forward has the other order:

    head(batch) -> state;  state = call(block, state) for every block;  tail(state, batch) -> loss

Each block is checkpointed for each micro-batch (``torch.utils.checkpoint``: random numbers and autocast
are those of the forward again), and its inputs are cut from the graph, so that the backward of one
block can run for all micro-batches too. Kept for the backward: every block's inputs, for every
micro-batch, besides what head and tail keep.

Gradients are summed in the order of the micro-batches, as by ordinary accumulation, by the same
operations; they differ, if at all, where a kernel is not deterministic. Modules with state that
forwards change (batch normalisation) see the forwards in another order and are the caller's concern.

What this module does not do: it moves nothing; ``hold`` of the engine keeps a block where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ..errors import RequestError

if TYPE_CHECKING:
    from .manager import OffloadTrainingManager

State = Any
Batch = Any


def call_block(block: nn.Module, state: State) -> State:
    """Return ``block(state)``; for blocks that map one tensor to the next."""
    return block(state)


@dataclass(frozen=True)
class BlockSequence:
    """A model as a head, a sequence of blocks and a tail.

    Attributes:
        head: Batch to the first block's state: any nesting of tuples, lists and dicts around tensors
            ``[B, ...]`` and other values.
        blocks: In the order in which the state passes through them.
        tail: State and batch to the loss, a scalar; already divided by the number of micro-batches if a
            mean is wanted.
        call: Runs one block: block and state to the next state, which may carry values along unchanged.
    """

    head: Callable[[Batch], State]
    blocks: Sequence[nn.Module]
    tail: Callable[[State, Batch], torch.Tensor]
    call: Callable[[nn.Module, State], State] = call_block


@dataclass(eq=False)
class _Piece:
    """The part of one micro-batch's graph between two cuts.

    Attributes:
        inputs: Leaves that stand for the outputs of the piece before, or None where no gradient flows.
        outputs: Its tensors, in the order of the flattened state.
    """

    inputs: list[torch.Tensor | None]
    outputs: list[torch.Tensor | None]


def backward_layer_major(
    manager: OffloadTrainingManager, sequence: BlockSequence, batches: Sequence[Batch]
) -> list[torch.Tensor]:
    """Run forward and backward of all micro-batches, each block for all of them at a time.

    Args:
        manager: Attached to the model; to be told ``after_backward()`` afterwards, as ever.
        sequence: The model.
        batches: The micro-batches, on the device where the model computes.

    Returns:
        The micro-batches' losses, detached; gradients are in ``grad`` as after ``loss.backward()``.

    Raises:
        RequestError: If there is no block or no micro-batch, or a loss is no scalar with a gradient.
        OffloadError: If the manager was removed.
    """
    _check(sequence, batches)
    engine = manager.running_engine()
    try:
        return _run(sequence, batches, hold=engine.hold)
    finally:
        engine.end_hold()


def _run(
    sequence: BlockSequence, batches: Sequence[Batch], *, hold: Callable[[], AbstractContextManager[None]]
) -> list[torch.Tensor]:
    with hold():
        states = [sequence.head(batch) for batch in batches]
    pieces = [[_Piece([], _tensors(state)) for state in states]]
    for block in sequence.blocks:
        row = []
        with hold():
            for index, state in enumerate(states):
                cut, inputs = _cut(state)
                states[index] = checkpoint(sequence.call, block, cut, use_reentrant=False)
                row.append(_Piece(inputs, _tensors(states[index])))
        pieces.append(row)
    losses = []
    gradients: list[list[torch.Tensor | None]] = []
    with hold():
        for state, batch in zip(states, batches, strict=True):
            cut, inputs = _cut(state)
            loss = sequence.tail(cut, batch)
            _check_loss(loss)
            loss.backward()
            losses.append(loss.detach())
            gradients.append(_gradients_of(inputs))
    states.clear()
    while pieces:
        row = pieces.pop()
        with hold():
            gradients = [_backward(piece, own) for piece, own in zip(row, gradients, strict=True)]
    return losses


def _backward(piece: _Piece, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Run the backward of one piece; return the gradients of its inputs."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(piece.outputs, gradients, strict=True)
        if output is not None and output.requires_grad and gradient is not None
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
    return _gradients_of(piece.inputs)


def _gradients_of(inputs: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.grad for tensor in inputs]


def _tensors(state: State) -> list[torch.Tensor | None]:
    return [leaf if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(state)]


def _cut(state: State) -> tuple[State, list[torch.Tensor | None]]:
    """Return the state with leaves in place of tensors that have a history, and those leaves."""
    leaves, structure = pytree.tree_flatten(state)
    inputs: list[torch.Tensor | None] = []
    stand_ins: dict[int, torch.Tensor] = {}
    for index, leaf in enumerate(leaves):
        first = isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in stand_ins
        if first:
            stand_ins[id(leaf)] = leaf.detach().requires_grad_()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaves[index] = stand_ins[id(leaf)]
        # One tensor at two places: its gradient is passed on once.
        inputs.append(stand_ins[id(leaf)] if first else None)
    return pytree.tree_unflatten(leaves, structure), inputs


def _check(sequence: BlockSequence, batches: Sequence[Batch]) -> None:
    for name, items in (("blocks", sequence.blocks), ("micro-batches", batches)):
        if not len(items):
            raise RequestError(
                f"Layer-major accumulation was asked for over no {name}",
                limit="It takes at least one",
                way_out="Pass one or more",
            )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        described = f"{list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise RequestError(
            f"The tail of a BlockSequence returned a loss of {described}",
            limit="It is a scalar tensor that depends on trainable parameters",
            way_out="Reduce it, and check that something is trainable",
        )
