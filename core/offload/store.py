"""Where every managed tensor lives: buckets over the host arena, or the resident set.

What this module does not do: it decides no residency over time; ``residency`` and ``engine`` do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ..errors import RequestError
from .buckets import Bucket, Segment
from .checks import check_tensors
from .config import OffloadConfig
from .gradients import HostGradients
from .hooks import Unit
from .module_dicts import ManagedDict
from .pinned_arena import HostRegion, PinnedArena
from .pinning import HostPinning
from .residents import ResidentSet
from .segments import extent_bytes, group_overlapping, raw_bytes
from .shared_masters import SharedMasters
from .tensors import ManagedTensor, PlainTensor, SubstitutedTensor
from .transfer import Transfer


class Store:
    """Take tensors in, find them, give them back.

    Attributes:
        units: ``id(module)`` to the unit that holds the module's own tensors.
        buckets: Everything that is streamed.
        residents: Everything that stays on the target.
    """

    def __init__(self, config: OffloadConfig, transfer: Transfer, gradients: HostGradients) -> None:
        self._config = config
        self._gradients = gradients
        self._arenas: list[PinnedArena] = []
        self._transfer = transfer
        self.pinning = HostPinning() if config.target_device.type == "cuda" else None
        self.shared_masters: SharedMasters | None = None
        self._by_id: dict[int, ManagedTensor] = {}
        self.units: dict[int, Unit] = {}
        self.buckets: list[Bucket] = []
        self.residents = ResidentSet(transfer)

    @property
    def pinned_bytes(self) -> int:
        """Host memory registered with CUDA."""
        return sum(arena.pinned_bytes for arena in self._arenas)

    @property
    def host_bytes(self) -> int:
        """Host memory of masters and host gradients."""
        return sum(arena.allocated_bytes for arena in self._arenas)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of all masters."""
        return sum(segment.nbytes for bucket in self.buckets for segment in bucket.segments)

    def find(self, tensor: torch.Tensor) -> ManagedTensor | None:
        """Return the streamed tensor that manages this very object."""
        managed = self._by_id.get(id(tensor))
        return managed if managed is not None and managed.tensor is tensor else None

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a host tensor lies in the arena."""
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return False
        return any(arena.contains(tensor.data_ptr()) for arena in self._arenas)

    def add(self, tensors: Sequence[ManagedTensor]) -> None:
        """Take tensors under management; every entry's module must have a unit.

        Raises:
            RequestError: If one cannot be managed; nothing has moved then.
        """
        check_tensors(tensors, self._config)
        segments = _segments_of(tensors)
        resident = self._resident_tensors(segments)
        streamed = [s for s in segments if not any(id(tensor) in resident for tensor in s.tensors)]
        self._check_residents([t for s in segments for t in s.tensors if id(t) in resident])
        buckets = self._make_buckets(streamed)
        self._fill(buckets)
        for segment in segments:
            if segment.bucket is None:
                self.residents.add(segment)
        self._watch_gradients([tensor for bucket in buckets for tensor in bucket.tensors])

    def add_entry(self, managed: ManagedTensor, holder: ManagedDict, name: str) -> None:
        """Make a streamed tensor available to the module of one of its entries."""
        holder.managed[name] = managed
        unit = self.units[id(holder.module)]
        if managed.bucket not in unit.buckets:
            unit.buckets.append(managed.bucket)

    def replace(self, old: ManagedTensor, new: PlainTensor, content: torch.Tensor) -> None:
        """Give ``new`` the place of ``old``, which nobody uses any more."""
        new.generation = old.version() + 1
        new.places = old.places
        segment, bucket = old.places[0][0], old.bucket
        segment.tensors[:] = [new]
        bucket.tensors = [new if tensor is old else tensor for tensor in bucket.tensors]
        old.host_views[0].copy_(content)
        new.attach()
        del self._by_id[old.key]
        self._register(new)

    def withdraw(self, managed: ManagedTensor) -> None:
        """Take a streamed tensor out of its bucket; its bytes stay there unused."""
        for segment, _ in managed.places:
            segment.tensors.remove(managed)
        managed.bucket.tensors.remove(managed)
        self._by_id.pop(managed.key, None)
        for entry in managed.entries:
            entry.tensors.managed.pop(entry.name, None)  # pyright: ignore[reportAttributeAccessIssue]

    def restore(self) -> None:
        """Give every tensor memory of its own device again."""
        for bucket in self.buckets:
            for tensor in bucket.tensors:
                if tensor.host_views:
                    tensor.restore()
        self.residents.restore()

    def unpin(self) -> None:
        """Unregister the host memory."""
        for arena in self._arenas:
            arena.unpin()

    def _resident_tensors(self, segments: list[Segment]) -> set[int]:
        if self._config.optimizer_on_host:
            return set()
        # Whatever shares memory with a resident tensor is resident; a wrapper spreads that further.
        resident: set[int] = set()
        grew = True
        while grew:
            before = len(resident)
            for segment in segments:
                if any(tensor.is_trainable or id(tensor) in resident for tensor in segment.tensors):
                    resident |= {id(tensor) for tensor in segment.tensors}
            grew = len(resident) > before
        return resident

    def _check_residents(self, tensors: list[ManagedTensor]) -> None:
        target = self._config.target_device
        for tensor in tensors:
            if isinstance(tensor, SubstitutedTensor) and any(
                leaf.device != target for leaf in tensor.leaves()
            ):
                raise RequestError(
                    f"Offloading was asked for {tensor.path}, a {type(tensor.tensor).__name__} that shares "
                    "memory with a trainable parameter",
                    limit=f"It would have to stay on {target}, and its device is fixed when it is made",
                    way_out="Give it memory of its own, or move it to the target before attaching",
                )

    def _make_buckets(self, segments: list[Segment]) -> list[Bucket]:
        """One bucket for each unit, and one for each cluster that several units use.

        With shared masters, what of a unit is the process's own has one besides.
        """
        by_users: dict[tuple[int, ...], list[list[Segment]]] = {}
        for cluster in _clusters(segments):
            modules = [entry.module for s in cluster for t in s.tensors for entry in t.entries]
            users = sorted({id(self.units[id(module)]) for module in modules})
            by_users.setdefault(tuple(users), []).append(cluster)
        units = {id(unit): unit for unit in self.units.values()}
        buckets = []
        for users, clusters in by_users.items():
            groups = clusters
            if len(users) == 1:
                parts = [clusters] if self.shared_masters is None else _constant_and_own(clusters)
                groups = [list(itertools.chain(*part)) for part in parts]
            for group in groups:
                is_unit = len(users) == 1 and group is groups[0]
                name = units[users[0]].path if is_unit else group[0].tensors[0].path
                bucket = Bucket(name, group)
                buckets.append(bucket)
                for user in users:
                    units[user].buckets.append(bucket)
        return buckets

    def _fill(self, buckets: list[Bucket]) -> None:
        if self.pinning is not None:
            self._transfer.stage_through(self.pinning)  # first, while there is something to pin
        shared, self.shared_masters = self.shared_masters, None  # for what is there from the start
        if shared is None:
            self._place(buckets, None)
        else:
            common = [bucket for bucket in buckets if bucket.is_constant()]
            shared.begin([(bucket.name, bucket.nbytes) for bucket in common])
            self._place([bucket for bucket in buckets if not bucket.is_constant()], None)
            self._place(common, shared)
            shared.finish()
        if not any(bucket.is_staged for bucket in self.buckets):
            self._transfer.stop_staging()

    def _place(self, buckets: list[Bucket], shared: SharedMasters | None) -> None:
        arena = self._new_arena([bucket.nbytes for bucket in buckets], shared)
        for bucket in buckets:
            bucket.place(arena.allocate(bucket.nbytes))
            self.buckets.append(bucket)
            for tensor in bucket.tensors:
                if shared is None or not shared.is_filled:
                    _copy_in(tensor)
                tensor.attach()
                self._register(tensor)
        arena.seal()

    def _register(self, tensor: ManagedTensor) -> None:
        self._by_id[tensor.key] = tensor
        for entry in tensor.entries:
            entry.tensors.managed[entry.name] = tensor  # pyright: ignore[reportAttributeAccessIssue]

    def _watch_gradients(self, tensors: list[ManagedTensor]) -> None:
        trainable = [tensor for tensor in tensors if tensor.is_trainable and isinstance(tensor, PlainTensor)]
        sizes = [tensor.tensor.numel() * tensor.tensor.dtype.itemsize for tensor in trainable]
        if not trainable:
            return
        self._gradients.new_region = self._new_region
        arena = self._new_arena(sizes)
        for tensor, size in zip(trainable, sizes, strict=True):
            self._gradients.watch(tensor, arena.allocate(size))
        arena.seal()

    def _new_region(self, nbytes: int) -> HostRegion:
        arena = self._new_arena([nbytes])
        region = arena.allocate(nbytes)
        arena.seal()
        return region

    def _new_arena(self, sizes: list[int], shared: SharedMasters | None = None) -> PinnedArena:
        reserve = None if shared is None else shared.reserve
        arena = PinnedArena(sizes, pin=self.pinning or False, reserve=reserve)
        self._arenas.append(arena)
        return arena


def _copy_in(tensor: ManagedTensor) -> None:
    for leaf, (segment, layout) in zip(tensor.leaves(), tensor.places, strict=True):
        start = layout.offset_bytes
        segment.host[start : start + extent_bytes(leaf)].copy_(raw_bytes(leaf))


def _segments_of(tensors: Sequence[ManagedTensor]) -> list[Segment]:
    leaves = [(tensor, leaf) for tensor in tensors for leaf in tensor.leaves()]
    places: dict[int, tuple] = {}
    segments = []
    for plan in group_overlapping([leaf for _, leaf in leaves]):
        users = list({id(leaves[i][0]): leaves[i][0] for i, _ in plan.layouts}.values())
        segment = Segment(plan.nbytes, users)
        segments.append(segment)
        places.update({index: (segment, layout) for index, layout in plan.layouts})
    for index, (tensor, _) in enumerate(leaves):
        tensor.places.append(places[index])
    return segments


def _constant_and_own(clusters: list[list[Segment]]) -> list[list[list[Segment]]]:
    """Part clusters that several processes may share from the others."""
    constant = [cluster for cluster in clusters if all(segment.is_constant() for segment in cluster)]
    own = [cluster for cluster in clusters if not all(segment.is_constant() for segment in cluster)]
    return [part for part in (constant, own) if part]


def _clusters(segments: list[Segment]) -> list[list[Segment]]:
    """Group segments that must move together because one wrapper has bytes in each of them."""
    clusters: list[list[Segment]] = []
    of_tensor: dict[int, list[Segment]] = {}
    for segment in segments:
        wrappers = [tensor for tensor in segment.tensors if isinstance(tensor, SubstitutedTensor)]
        merged = [segment]
        for other in {id(c): c for t in wrappers if (c := of_tensor.get(id(t))) is not None}.values():
            clusters.remove(other)
            merged = [*other, *merged]
        clusters.append(merged)
        for member in merged:
            for tensor in member.tensors:
                of_tensor[id(tensor)] = merged
    return clusters
