"""Which cluster a pool is asked to run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

ROOT_VARIABLE = "COMFYUI_FERRY_ROOT"


@dataclass(frozen=True)
class ClusterSpec:
    """The cluster that a pool's ranks run on.

    Attributes:
        address: ``host:port`` of the head, or ``auto`` for the cluster that this machine is a node of.
        path_variables: By folder of ``import_paths``: the environment variable with which a node says where
            its own lies; without it, at the same place as here.
        same_files: By a name for messages: a folder of ``import_paths`` and a file in it that must be the
            same everywhere, for example one that holds the version.
    """

    address: str
    path_variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    same_files: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
