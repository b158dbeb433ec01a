"""Keep what checkpointed blocks need for the backward on the host, instead of on the device.

A checkpointed model keeps one hidden state for each block: for long sequences (video, large pictures) more
than its weights in flight. They leave on the direction of the link that streamed weights do not use, and come
back one block ahead of their use, in front of the weights of that block.

What this module does not do: it decides neither which tensors nor when; ``block_checkpointing`` does.

Idea: activation offloading as in Unsloth's gradient checkpointing, written anew.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

# Smaller ones are not worth a transfer.
LEAST_BYTES = 2**20


class _Buffer:
    """Host memory, and the last use of it that may still be running."""

    def __init__(self, like: Tensor) -> None:
        pinned = like.device.type == "cuda"
        self.tensor = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
        self.free: torch.Event | None = None


class HostInput:
    """A tensor that was sent to the host; its buffer is free again when this object is gone."""

    def __init__(self, owner: HostInputs, tensor: Tensor, buffer: _Buffer) -> None:
        self.device = tensor.device
        self.buffer = buffer
        self._owner = weakref.ref(owner)
        self._arriving: tuple[Tensor, torch.Event | None] | None = None

    def start_fetch(self, stream: torch.cuda.Stream | None) -> None:
        """Begin to copy it back."""
        if self._arriving is not None:
            return
        if stream is None:
            self._arriving = self.buffer.tensor.clone(), None
            return
        # On the stream that reads it later, so that its memory returns to that stream.
        tensor = torch.empty_like(self.buffer.tensor, device=self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            tensor.copy_(self.buffer.tensor, non_blocking=True)
        tensor.record_stream(stream)
        self.buffer.free = stream.record_event()
        self._arriving = tensor, self.buffer.free

    def take(self) -> Tensor:
        """Return it, readable on the current stream."""
        assert self._arriving is not None
        (tensor, event), self._arriving = self._arriving, None
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        return tensor

    def __del__(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.give_back(self.buffer)


class HostInputs:
    """The inputs of one model's blocks on the host, in the order in which they were sent."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[_Buffer]] = {}
        self._sent: list[weakref.ref[SentInputs]] = []
        self._stream: torch.cuda.Stream | None = None

    @staticmethod
    def is_worth_it(tensor: Tensor) -> bool:
        """Return whether a tensor is of a kind and size to be sent."""
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_contiguous()
        return is_plain and tensor.numel() * tensor.dtype.itemsize >= LEAST_BYTES

    def send(self, tensors: dict[int, Tensor]) -> SentInputs:
        """Copy one block's inputs to the host, by their index; the caller may let go of them."""
        handles = {}
        for index, tensor in tensors.items():
            if tensor.device.type == "cuda" and self._stream is None:
                self._stream = torch.cuda.Stream(tensor.device)
            waiting = self._free.get((tensor.shape, tensor.dtype))
            buffer = waiting.pop() if waiting else _Buffer(tensor)
            if buffer.free is not None:
                torch.cuda.current_stream(tensor.device).wait_event(buffer.free)
                buffer.free = None
            # On the current stream: whoever writes to the tensor later does so after the copy.
            buffer.tensor.copy_(tensor.detach(), non_blocking=True)
            handles[index] = HostInput(self, tensor, buffer)
        sent = SentInputs(handles)
        self._sent = [other for other in self._sent if other() is not None]
        self._sent.append(weakref.ref(sent))
        return sent

    def fetch(self, sent: SentInputs) -> dict[int, Tensor]:
        """Return a block's inputs, and begin to bring those in that were sent before them."""
        living = [other for other in (reference() for reference in self._sent) if other is not None]
        place = next((index for index, other in enumerate(living) if other is sent), 0)
        for needed in (sent, *living[max(0, place - 1) : place]):
            for handle in needed.handles.values():
                handle.start_fetch(self._stream)
        return {index: handle.take() for index, handle in sent.handles.items()}

    def give_back(self, buffer: _Buffer) -> None:
        """Take a buffer that nobody needs any more."""
        key = buffer.tensor.shape, buffer.tensor.dtype
        self._free.setdefault(key, []).append(buffer)


class SentInputs:
    """What one call of a block has sent."""

    def __init__(self, handles: dict[int, HostInput]) -> None:
        self.handles = handles
