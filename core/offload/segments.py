"""Where each tensor's bytes lie, and which tensors share them.

Tensors whose bytes overlap (tied weights, views, aliased buffers) form one segment, which moves as
one piece of raw bytes; so whatever aliased before still aliases on the host and on the target.

What this module does not do: it moves nothing and knows no device but the tensors' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import OffloadError

# What cuBLAS looks at when it chooses a kernel: a weight that starts elsewhere may be multiplied by another
# one, with other rounding. So a segment starts there, as a tensor from the caching allocator does.
ALIGNMENT_BYTES = 256


def align(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Layout:
    """How one tensor lies in a run of bytes.

    Attributes:
        dtype: Element type.
        size: Shape.
        stride: Strides, in elements.
        offset_bytes: First element's distance from the start of the segment.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int

    def view(self, storage: torch.UntypedStorage, segment_offset_bytes: int = 0) -> torch.Tensor:
        """Return the tensor that this layout describes in ``storage``, without a copy.

        Args:
            storage: Bytes on any device.
            segment_offset_bytes: Where the segment starts there; a multiple of the alignment.
        """
        offset = (segment_offset_bytes + self.offset_bytes) // self.dtype.itemsize
        return view_of_storage(storage, self.dtype, offset, self.size, self.stride)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has this dtype, shape and strides."""
        return tensor.dtype == self.dtype and tensor.size() == self.size and tensor.stride() == self.stride


def view_of_storage(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Return a tensor over ``storage``; ``offset`` and ``stride`` are in elements.

    Always an ordinary tensor, also under ``torch.inference_mode``: an inference tensor could not
    be given to a parameter that autograd uses.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return view_of_storage(storage, dtype, offset, size, stride)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the tensor's first to its last element, holes included, as uint8 ``[n]``."""
    low = int(tensor.storage_offset()) * tensor.dtype.itemsize
    return view_of_storage(tensor.untyped_storage(), torch.uint8, low, (extent_bytes(tensor),), (1,))


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the tensor's first to its last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize


@dataclass(frozen=True)
class SegmentPlan:
    """One run of bytes: its length and, for each tensor in it, index and layout."""

    nbytes: int
    layouts: tuple[tuple[int, Layout], ...]


def group_overlapping(tensors: Sequence[torch.Tensor]) -> list[SegmentPlan]:
    """Group plain tensors by the bytes they share; the order follows each group's first tensor.

    Addresses decide, not storage objects: two storages over the same memory alias as well.

    Raises:
        OffloadError: If overlapping tensors cannot all be aligned at once.
    """
    spans = []
    for index, tensor in enumerate(tensors):
        low = tensor.data_ptr() if tensor.numel() else 0
        spans.append((str(tensor.device), low, low + extent_bytes(tensor), index))
    groups: list[list[tuple[str, int, int, int]]] = []
    high = 0
    for span in sorted(spans):
        same_device = bool(groups) and groups[-1][0][0] == span[0]
        if same_device and span[1] < high and span[2] > span[1]:
            groups[-1].append(span)
            high = max(high, span[2])
        else:
            groups.append([span])
            high = span[2]
    groups.sort(key=lambda group: min(span[3] for span in group))
    return [_plan_segment(group, tensors) for group in groups]


def _plan_segment(group: list[tuple[str, int, int, int]], tensors: Sequence[torch.Tensor]) -> SegmentPlan:
    lowest = min(span[1] for span in group)
    # A tensor over a file's bytes may start anywhere; the first of a group gets the full alignment. Only
    # where another one would lose its own by that (several dtypes in one memory), all keep what they had.
    sizes = [(low, tensors[index].dtype.itemsize) for _, low, _, index in group]
    keeps_all = all(low % itemsize == 0 for low, itemsize in sizes)
    is_aligned = all((low - lowest) % itemsize == 0 for low, itemsize in sizes)
    start = lowest if is_aligned or not keeps_all else lowest // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    stop = max(span[2] for span in group)
    layouts = []
    for _, low, _, index in sorted(group, key=lambda span: span[3]):
        tensor = tensors[index]
        offset = low - start
        if offset % tensor.dtype.itemsize:
            raise OffloadError(
                f"A {tensor.dtype} tensor of shape {list(tensor.size())} starts at byte {offset} of the "
                "memory it shares with others, which is no multiple of its element size. Clone it before "
                "attaching."
            )
        layout = Layout(tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), offset)
        layouts.append((index, layout))
    return SegmentPlan(nbytes=stop - start, layouts=tuple(layouts))
