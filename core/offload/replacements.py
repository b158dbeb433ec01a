"""Tensors that the model's user, or the model itself, puts in the place of managed ones.

* An entry assigned between forwards (``load_state_dict(assign=True)``, ``module.weight = new``) is
  taken under management before the next forward; in the old one's place if nobody holds that any
  more, else in a bucket of its own.
* A buffer assigned by a running forward stays the model's: it is on the target, where the next
  forward needs it. It is counted in the resident set.
* ``parameter.data = other`` is found before the next use and copied into the master; with another
  dtype or shape it gets a bucket of its own.

What this module does not do: it does not see writes through ``.data``; see ``tensors``.
"""

from __future__ import annotations

import weakref

import torch

from ..errors import OffloadError
from .buckets import Bucket
from .module_dicts import ManagedDict
from .residency import Residency
from .store import Store
from .tensors import Entry, ManagedTensor, PlainTensor, make_managed


class Replacements:
    """Note assignments and take the new tensors in at a moment when nothing uses the old ones."""

    def __init__(self, store: Store, residency: Residency) -> None:
        self._store = store
        self._residency = residency
        self._residents = store.residents
        self._target = residency.transfer.device
        self._pending: dict[tuple[int, str], ManagedDict] = {}
        self._vacated: dict[tuple[int, str], ManagedTensor] = {}

    def note(
        self, holder: ManagedDict, name: str, *, before: torch.Tensor | None, is_inside_forward: bool
    ) -> None:
        """Record that an entry holds another tensor than ``before`` now, or none."""
        key = (id(holder), name)
        self._pending.pop(key, None)
        original_device = self._residents.forget_entry(holder, name, before)
        old = holder.managed.pop(name, None)
        if old is not None:
            original_device = old.original_device
            old.entries = [e for e in old.entries if not (e.tensors is holder and e.name == name)]
            if not old.entries:
                self._vacated[key] = old
        value = dict.get(holder, name)
        if value is not None:
            self._note_value(key, holder, value, original_device, is_inside_forward)
        self._residency.resident_set_bytes = self._residents.nbytes

    def _note_value(
        self,
        key: tuple[int, str],
        holder: ManagedDict,
        value: torch.Tensor,
        original_device: torch.device | None,
        is_inside_forward: bool,
    ) -> None:
        on_target = value.device == self._target
        if self._residents.holds(value):
            self._residents.add_entry(_entry(holder, key[1]), value)
        elif on_target and not holder.is_parameters and (is_inside_forward or self._target.type != "cpu"):
            self._residents.add_loose(holder, key[1], original_device or torch.device("cpu"))
        else:
            self._pending[key] = holder

    def settle(self) -> None:
        """Take every pending tensor under management.

        Raises:
            OffloadError: If one is a view of a managed tensor.
            RequestError: If one cannot be managed.
        """
        while self._pending:
            key, holder = self._pending.popitem()
            self._take_in(holder, key[1], self._vacated.pop(key, None))
        self._vacated.clear()
        self._residency.resident_set_bytes = self._residents.nbytes

    def repair(self, bucket: Bucket) -> None:
        """Take in what was put into the bucket's tensors by ``tensor.data = other``."""
        for tensor in list(bucket.tensors):
            if tensor.is_intact():
                continue
            assert isinstance(tensor, PlainTensor)
            if tensor.places[0][1].fits(tensor.tensor):
                tensor.take_in(tensor.tensor.detach())
            else:
                self._check_free(tensor.tensor, tensor.path)
                self._store.withdraw(tensor)
                self._store.add([make_managed(tensor.tensor, tensor.entries)])

    def _take_in(self, holder: ManagedDict, name: str, old: ManagedTensor | None) -> None:
        value = dict.get(holder, name)
        if value is None:
            return
        entry = _entry(holder, name)
        known = self._store.find(value)
        if known is not None:
            known.entries.append(entry)
            self._store.add_entry(known, holder, name)
            return
        self._check_free(value, entry.path)
        new = make_managed(value, [entry])
        if old is not None and _may_succeed(old, new) and _is_unused(old):
            assert isinstance(new, PlainTensor)
            self._store.replace(old, new, value.detach())
        else:
            self._store.add([new])

    def _check_free(self, tensor: torch.Tensor, path: str) -> None:
        if self._store.owns_memory_of(tensor):
            raise OffloadError(
                f"{path} was replaced by a view of a managed tensor, which cannot keep aliasing it "
                "while both move. Assign a clone, or attach a new OffloadTrainingManager."
            )


def _entry(holder: ManagedDict, name: str) -> Entry:
    return Entry(holder.module, holder, name, holder.full_name(name), holder.is_parameters)


def _may_succeed(old: ManagedTensor, new: ManagedTensor) -> bool:
    """Return whether the new tensor could live where the old one did."""
    if not isinstance(old, PlainTensor) or not isinstance(new, PlainTensor):
        return False
    segment, layout = old.places[0]
    alone = segment.tensors == [old] and old.bucket.pins == 0
    return alone and layout.fits(new.tensor) and not old.is_trainable and not new.is_trainable


def _is_unused(old: ManagedTensor) -> bool:
    """Return whether the engine is the last to hold the old tensor object."""
    reference = weakref.ref(old.tensor)
    version = old.version()
    old.tensor = torch.empty(0, device="cpu")
    survivor = reference()
    if survivor is not None:
        old.tensor = survivor
        return False
    old.generation = version
    return True
