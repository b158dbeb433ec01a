"""Degrees of the parallel methods and the ranks' places on one device mesh.

Axes, outermost first: ``cfg`` (which conditioning), ``batch`` (which samples of the batch), ``tp`` (which
slice of each weight), ``ring`` and ``ulysses`` (which part of the token sequence). Ranks of one sequence
group are neighbours, so the axes with the most traffic stay on the fastest links.

What this module does not do: it starts no process and no process group; ``build_mesh`` uses the one
that the worker already has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import RequestError

_AXES = ("cfg", "batch", "tp", "ring", "ulysses")
_INPUT_NAMES = {"tp": "tensor_parallel_degree"}


def input_name(axis: str) -> str:
    """Return what users call the degree of an axis, for messages."""
    return _INPUT_NAMES.get(axis, f"{axis}_degree")


@dataclass(frozen=True)
class ParallelDims:
    """How many ways each parallel method divides the work.

    Args:
        cfg: Groups of ranks that evaluate different conditionings at the same time.
        batch: Groups of ranks that evaluate different samples of a batch at the same time.
        tp: Tensor parallel degree.
        ring: Ring attention degree (arXiv:2310.01889).
        ulysses: DeepSpeed-Ulysses degree (arXiv:2309.14509).
    """

    cfg: int = 1
    batch: int = field(default=1, kw_only=True)
    tp: int = 1
    ring: int = 1
    ulysses: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all degrees."""
        return math.prod(self.degrees.values())

    @property
    def sequence_size(self) -> int:
        """Number of ranks that share one token sequence."""
        return self.ring * self.ulysses

    def sample_ranks(self, branch: int) -> list[list[int]]:
        """Return the ranks of one conditioning branch: for each part of the batch those that share it."""
        size = self.tp * self.sequence_size
        first = branch * self.batch * size
        return [list(range(first + i * size, first + (i + 1) * size)) for i in range(self.batch)]

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by axis name, outermost axis first."""
        return {axis: getattr(self, axis) for axis in _AXES}

    @property
    def text(self) -> str:
        """The methods in use, for people: ``"cfg 2 x ulysses 2"``; empty for one rank."""
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1)

    def validate(self, *, num_gpus: int) -> None:
        """Check the degrees against each other and the number of GPUs.

        Raises:
            RequestError: Naming the degree, the limit and what would fit.
        """
        if num_gpus < 1:
            raise RequestError(
                f"gpus={num_gpus} was asked",
                limit="Each rank needs a GPU of its own",
                way_out="Set gpus to 1 or more",
            )
        for axis, degree in self.degrees.items():
            if degree < 1:
                raise RequestError(
                    f"{input_name(axis)}={degree} was asked",
                    limit="A degree counts ranks; 1 means that the method is not used",
                    way_out=f"Set {input_name(axis)} to a number from 1 to {num_gpus}",
                )
        if self.world_size != num_gpus:
            product = " x ".join(f"{axis} {self.degrees[axis]}" for axis in _AXES)
            raise RequestError(
                f"{num_gpus} GPUs with degrees {product} = {self.world_size} were asked",
                limit="The product of the degrees must equal the number of GPUs",
                way_out=f"Set gpus to {self.world_size}, or change a degree",
            )


@dataclass(frozen=True)
class SequenceGroup:
    """The process groups of the ranks that share one sequence.

    Rank ``i`` of ``whole`` is rank ``i // U`` of its ring and rank ``i % U`` of its Ulysses group of
    ``U`` ranks. At least one of ``ring`` and ``ulysses`` is there.

    Args:
        whole: All of them.
        ring: Those that pass keys and values round, or None if the ring degree is 1.
        ulysses: Those that trade tokens for heads, or None if the Ulysses degree is 1.
    """

    whole: dist.ProcessGroup
    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None


@dataclass(frozen=True)
class RankLayout:
    """Where this rank stands on the mesh.

    Args:
        cfg_branch: Index of the conditioning branch that this rank works for.
        sequence_group: The ranks that share this rank's sequence, or None if the rank has the whole
            sequence to itself.
        tensor_group: The ranks that hold the other slices of this rank's weights, or None if the rank has
            them whole.
    """

    cfg_branch: int
    sequence_group: SequenceGroup | None
    tensor_group: dist.ProcessGroup | None = None

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of its conditioning branch; all of them get the same output."""
        groups = (self.tensor_group, self.sequence_group and self.sequence_group.whole)
        return all(dist.get_rank(group) == 0 for group in groups if group is not None)


def build_mesh(dims: ParallelDims) -> RankLayout:
    """Lay the ranks of the default process group out on the mesh; collective over all of them.

    Raises:
        RequestError: If the degrees do not fit the number of ranks.
    """
    dims.validate(num_gpus=dist.get_world_size())
    device_type = "cuda" if dist.get_backend() == dist.Backend.NCCL else "cpu"
    mesh = init_device_mesh(device_type, tuple(dims.degrees.values()), mesh_dim_names=_AXES)
    return RankLayout(
        cfg_branch=mesh.get_local_rank("cfg"),
        sequence_group=_sequence_group(mesh, dims),
        tensor_group=mesh.get_group("tp") if dims.tp > 1 else None,
    )


def _sequence_group(mesh: DeviceMesh, dims: ParallelDims) -> SequenceGroup | None:
    ring = mesh.get_group("ring") if dims.ring > 1 else None
    ulysses = mesh.get_group("ulysses") if dims.ulysses > 1 else None
    whole = ring or ulysses
    if ring is not None and ulysses is not None:
        rank_lists = mesh.mesh.reshape(-1, dims.sequence_size).tolist()
        joined, _ = dist.new_subgroups_by_enumeration(rank_lists)
        assert isinstance(joined, dist.ProcessGroup)  # every rank is in one of the lists
        whole = joined
    return None if whole is None else SequenceGroup(whole, ring, ulysses)
