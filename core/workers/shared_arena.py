"""One host copy of a set of named tensors for all processes of the machine.

The parent lays the tensors out in a memfd and writes them one by one, so the most it ever holds
twice is one tensor. Workers map the same memory. They read it only: what one process writes, all
see.

What this module does not do: it neither pins memory nor moves anything to a GPU.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RequestError
from .decoding import dtype_named
from .protocol import write_tensor
from .shared_memory import SharedFile, align


class SharedArena:
    """Named tensors in shared memory, owned by the process that made them.

    Use ``create``, or ``reserve`` and then ``write`` where the tensors are not in memory yet.
    """

    def __init__(self) -> None:
        self._file: SharedFile | None = None
        self._table: dict[str, list[Any]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._mappings: list[tuple[mmap.mmap, int]] = []

    @classmethod
    def create(cls, tensors: Mapping[str, torch.Tensor]) -> SharedArena:
        """Return an arena with a copy of ``tensors`` (any device; dense).

        Raises:
            RequestError: If a tensor is not dense or is a subclass.
        """
        arena = cls()
        arena.add(tensors)
        return arena

    @classmethod
    def reserve(cls, tensors: Mapping[str, torch.Tensor], *, tied: bool = False) -> SharedArena:
        """Return an arena of zeros with the names, shapes and dtypes of ``tensors`` (meta will do).

        Every name gets memory of its own; with ``tied``, names of the same memory get one place.
        """
        arena = cls()
        arena._reserve(tensors, shares=tied)
        return arena

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena, alignment included."""
        return 0 if self._file is None else self._file.size_bytes

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors in shared memory, by name; they stay valid after ``close``."""
        return dict(self._tensors)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Append a copy of ``tensors``. One that occurs under two names (tied weights) is stored once.

        Workers see them after they have opened a new ``handle``.

        Raises:
            RequestError: If a name is taken, or a tensor is not dense or is a subclass.
        """
        tensors = dict(tensors)  # Held, so that one address means one tensor while it is laid out.
        self._reserve(tensors, shares=True)
        written: set[int] = set()
        for name, tensor in tensors.items():
            if self._table[name][0] not in written:
                self.write(name, tensor)
                written.add(self._table[name][0])

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Overwrite one tensor's values in place; every process that opened the arena sees them.

        No call that reads the tensor may be in flight.

        Raises:
            RequestError: If the name is unknown, or shape or dtype differ.
        """
        target = self._tensors.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            have = "no such tensor" if target is None else f"{target.dtype} {list(target.shape)}"
            raise RequestError(
                f"writing {name!r} as {tensor.dtype} {list(tensor.shape)} was asked",
                limit=f"The arena holds {have} under this name",
                way_out="Write the same shape and dtype, or add the tensor under a new name",
            )
        if self._file is not None:
            self._file.version += 1
        if tensor.numel():
            write_tensor(target.reshape(-1).view(torch.uint8), 0, tensor)

    def tensor(self, name: str, *, inference: bool = False) -> torch.Tensor:
        """Return one tensor in shared memory, as an inference tensor if asked.

        A parameter's data can only be replaced by a tensor of the same kind as it is itself.
        """
        offset, dtype_name, shape = self._table[name]
        if not inference or not self._tensors[name].numel():
            return self._tensors[name]
        mapping, start = self._mapping_of(name)
        with torch.inference_mode():
            count = self._tensors[name].nbytes
            raw = torch.frombuffer(mapping, dtype=torch.uint8, count=count, offset=offset - start)
            return raw.view(dtype_named(dtype_name)).view(shape)

    def discard(self, name: str) -> None:
        """Give the memory of one tensor back to the system now; it reads as zeros from then on.

        Only whole pages go. For who lets go of a large arena tensor by tensor.
        """
        mapping, start = self._mapping_of(name)
        offset = self._table[name][0] - start
        first = align(offset, mmap.PAGESIZE)
        last = (offset + self._tensors[name].nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            mapping.madvise(mmap.MADV_REMOVE, first, last - first)

    def _mapping_of(self, name: str) -> tuple[mmap.mmap, int]:
        offset = self._table[name][0]
        return next(
            (mapping, start) for mapping, start in self._mappings if start <= offset < start + len(mapping)
        )

    def handle(self) -> dict[str, Any]:
        """Return what a worker needs to open the arena; part of a call's payload.

        Raises:
            RequestError: If the arena is closed or empty.
        """
        if self._file is None:
            raise RequestError(
                "the handle of an arena without memory was asked",
                limit="It is closed, or nothing was added",
                way_out="Create an arena with at least one tensor",
            )
        return {"file": self._file, "tensors": {name: list(entry) for name, entry in self._table.items()}}

    def close(self) -> None:
        """Let go of the memory; the system frees it once no process maps it. May be called again."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._table.clear()
        self._tensors.clear()
        self._mappings.clear()

    def _reserve(self, tensors: Mapping[str, torch.Tensor], *, shares: bool) -> None:
        start = align(self.size_bytes, mmap.PAGESIZE)  # a mapping begins at a page
        entries, end = self._lay_out(tensors, start, shares=shares)
        if not entries:
            return
        if self._file is None:
            self._file = SharedFile.create("arena", end)
        else:
            self._file.extend(end)
        mapping, view = self._file.map_memory(offset_bytes=start)
        self._mappings.append((mapping, start))
        self._table |= entries
        self._tensors |= _tensors_at(view, entries, start)

    def _lay_out(
        self, tensors: Mapping[str, torch.Tensor], offset: int, *, shares: bool
    ) -> tuple[dict[str, list[Any]], int]:
        entries: dict[str, list[Any]] = {}
        places: dict[tuple, int] = {}
        for name, tensor in tensors.items():
            self._check(name, tensor)
            identity = _identity(tensor) if shares else None
            if identity is None or identity not in places:
                place, offset = offset, offset + align(max(1, tensor.numel() * tensor.element_size()))
                if identity is not None:
                    places[identity] = place
            else:
                place = places[identity]
            entries[name] = [place, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        return entries, offset

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._table:
            raise RequestError(
                f"adding {name!r} was asked",
                limit="The arena already holds a tensor of this name",
                way_out="Overwrite it with write, or choose another name",
            )
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.layout != torch.strided or tensor.is_quantized:
            raise RequestError(
                f"sharing {name!r}, a {type(tensor).__name__} of layout {tensor.layout}, was asked",
                limit="The arena holds plain dense tensors",
                way_out="Share the plain tensors it is made of",
            )


def open_arena(handle: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Map an arena in this process; nothing is copied.

    Args:
        handle: What ``SharedArena.handle`` returned, as received in a message.

    Returns:
        CPU tensors by name that share the parent's memory, to be read only. The memory stays mapped
        as long as one of them lives.
    """
    file: SharedFile = handle["file"]
    return _tensors_at(file.map(writable=True), handle["tensors"], 0)


def _tensors_at(view: torch.Tensor, entries: Mapping[str, list[Any]], start: int) -> dict[str, torch.Tensor]:
    tensors = {}
    with torch.inference_mode(False):
        for name, (offset, dtype_name, shape) in entries.items():
            dtype = dtype_named(dtype_name)
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            raw = view[offset - start : offset - start + num_bytes]
            tensors[name] = raw.view(dtype).view(shape)
    return tensors


def _identity(tensor: torch.Tensor) -> tuple | None:
    """Return what two names of the same memory have in common, None if the tensor has no memory."""
    if tensor.is_meta or tensor.numel() == 0:
        return None
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
