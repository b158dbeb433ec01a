"""What an offloaded training may take of the target's and of the host's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import RequestError
from .planner import GB

# Of the memory that is free, the share that a plan may take: the allocator splits and rounds.
_USABLE_SHARE = 0.95


@dataclass(frozen=True)
class OffloadBudget:
    """What an offloaded training may take.

    Attributes:
        vram_gb: Target memory for everything, in GB (10**9 bytes); ``auto``: what is free.
        ram_gb: Host memory for the masters, in GB; None: no limit.
        pin_gb: Host memory that may be pinned, in GB; None: no limit.
    """

    vram_gb: float | Literal["auto"] = "auto"
    ram_gb: float | None = None
    pin_gb: float | None = None

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            RequestError: If one is none.
        """
        if self.vram_gb != "auto":
            _check("vram_gb", self.vram_gb)
        for name in ("ram_gb", "pin_gb"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name))

    @property
    def ram_bytes(self) -> int | None:
        """Host memory for the masters."""
        return None if self.ram_gb is None else int(self.ram_gb * GB)

    @property
    def pin_bytes(self) -> int | None:
        """Host memory that may be pinned."""
        return None if self.pin_gb is None else int(self.pin_gb * GB)

    def vram_bytes(self, device: torch.device) -> int | None:
        """Return the target memory for everything, None for no limit (the CPU, without one)."""
        if self.vram_gb != "auto":
            return int(float(self.vram_gb) * GB)
        if device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        return allocated + int(_USABLE_SHARE * (free + torch.cuda.memory_reserved(device) - allocated))

    def check_host(self, host_bytes: int) -> None:
        """Check that the masters fit.

        Raises:
            RequestError: If they do not.
        """
        if self.ram_bytes is not None and host_bytes > self.ram_bytes:
            raise RequestError(
                f"ram_gb={self.ram_gb} was asked for offloading",
                limit=f"The weights take {host_bytes / GB:.2f} GB of host memory",
                way_out="Raise the budget, or load the model in a smaller dtype (fp8)",
            )


def _check(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value >= 0):  # pyright: ignore
        raise RequestError(
            f"{name}={value!r}",
            limit="It is a size in GB (10**9 bytes), zero or more",
            way_out="Pass a number such as 12",
        )
