"""A MODEL's own weights, moved into memory that the workers share, so that the host holds them once.

The model's parameters stay the objects they are; only their data moves, one tensor after the other, so
that nothing is ever there twice but the tensor under way. Weights that are still mapped from a
safetensors file go from the file into the shared memory. Those of a MODEL that streams lie in memory that
can be shared already, and stay there. What the model computes, saves or hands on is the same as before;
``give_back`` puts its weights into ordinary memory again.

What this module does not do: it does not touch weights that lie on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..workers import SharedArena, SharedFile, UnchangedFilePages
from .model_export import named_tensors
from .shared_regions import find_region


class HostWeights:
    """The shared copy of one diffusion model's parameters and buffers.

    Holds no reference to the model, so it may be kept by whoever outlives it.

    Args:
        module: The diffusion model; its weights are plain dense tensors. Those that lie on the CPU and
            are contiguous become views of the shared memory.
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = named_tensors(module)
        self._borrowed = _borrow(tensors)
        for name in self._borrowed:
            del tensors[name]
        self._arena = SharedArena.reserve(tensors, tied=True)
        pages = UnchangedFilePages()
        for name in list(tensors):
            # Taken out, so that its old memory is free once the model has let go of it.
            tensor = tensors.pop(name)
            if not self._is_home(name, tensor):
                self._arena.write(name, tensor)
                # A mapped file's pages would stay as long as any tensor of the file does.
                pages.drop(tensor)
                self._move(name, tensor)

    def handles(self) -> list[dict[str, Any]]:
        """Return what a worker needs to open the weights, for each piece of shared memory."""
        handles = [self._arena.handle()] if self._arena.size_bytes else []
        tables: dict[int, dict[str, Any]] = {}
        for name, place in self._borrowed.items():
            table = tables.setdefault(id(place.file), {"file": place.file, "tensors": {}})
            table["tensors"][name] = [place.offset, *place.form]
        return [*handles, *tables.values()]

    def refresh(self, module: nn.Module) -> bool | None:
        """Take in what happened to the model's weights since.

        ComfyUI gives a weight new memory whenever it brings the model back from its own GPU. Equal ones
        move back into the shared memory.

        Returns:
            False: the shared copy is as it was. True: some values were changed in the model, and now
            here too; workers must load them again. None: the model has other weights altogether.
        """
        tensors = named_tensors(module)
        mine = self._arena.tensors
        if _shapes(tensors) != _shapes(mine) | {name: one.form for name, one in self._borrowed.items()}:
            return None
        for name, place in self._borrowed.items():
            if find_region(tensors.pop(name)) != (place.file, place.offset):
                return None
        changed = False
        for name in list(tensors):
            tensor = tensors.pop(name)
            if self._is_home(name, tensor):
                continue
            if not _same_bits(tensor, mine[name]):
                self._arena.write(name, tensor)
                changed = True
            self._move(name, tensor)
        return changed

    def give_back(self, module: nn.Module) -> None:
        """Put the model's weights into ordinary memory again and let go of the shared memory."""
        copies: dict[int, torch.Tensor] = {}  # by address: tied weights stay tied
        for name, tensor in named_tensors(module).items():
            if name in self._borrowed or not self._is_home(name, tensor):
                continue
            mine = self._arena.tensors[name]
            if mine.data_ptr() not in copies:
                with torch.inference_mode(tensor.is_inference()):
                    copies[mine.data_ptr()] = mine.clone()
                self._arena.discard(name)
            tensor.data = copies[mine.data_ptr()]
        self._arena.close()
        self._borrowed.clear()

    def _is_home(self, name: str, tensor: torch.Tensor) -> bool:
        mine = self._arena.tensors[name]
        return tensor.data_ptr() == mine.data_ptr() and tensor.device == mine.device and tensor.numel() > 0

    def _move(self, name: str, tensor: torch.Tensor) -> None:
        # Another layout could not be given back as it was; such a tensor stays where it is, too.
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
            return
        tensor.data = self._arena.tensor(name, inference=tensor.is_inference())


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies that was in shared memory already."""

    file: SharedFile
    offset: int
    form: tuple[str, list[int]]


def _borrow(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Place]:
    found = {name: (find_region(tensor), tensor) for name, tensor in tensors.items()}
    return {
        name: _Place(*region, _form(tensor)) for name, (region, tensor) in found.items() if region is not None
    }


def _form(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: _form(tensor) for name, tensor in tensors.items()}


def _same_bits(tensor: torch.Tensor, mine: torch.Tensor) -> bool:
    there = tensor.detach().cpu().contiguous()
    return torch.equal(there.reshape(-1).view(torch.uint8), mine.reshape(-1).view(torch.uint8))
