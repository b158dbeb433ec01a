"""What the caller asked of the offload engine, checked once, before anything moves.

What this module does not do: it never looks at the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import RequestError

MB = 2**20


@dataclass(frozen=True)
class OffloadConfig:
    """One checked request.

    Attributes:
        target_device: Where forward and backward run; ``cpu``, or ``cuda`` with its index.
        optimizer_on_host: Trainable parameters live on the host too, and their gradients leave for it.
        split_threshold_bytes: A module of at most this many bytes moves as a whole; None: leaf modules.
        recompute_cache_bytes: Limit for weights kept between recompute and backward; None: from the model.
    """

    target_device: torch.device
    optimizer_on_host: bool
    split_threshold_bytes: int | None
    recompute_cache_bytes: int | None

    @staticmethod
    def from_request(
        target_device: torch.device | str,
        optimizer_on_host: bool,
        *,
        split_threshold_mb: float | None,
        recompute_cache_mb: float | None,
    ) -> OffloadConfig:
        """Check what was asked and give it its units.

        Args:
            target_device: ``cpu`` or a CUDA device.
            optimizer_on_host: Whether trainable parameters are offloaded as well.
            split_threshold_mb: Threshold in MB (2**20 bytes), positive, or None.
            recompute_cache_mb: Limit in MB (2**20 bytes), zero or more, or None.

        Raises:
            RequestError: If the device is of another kind or absent, or a size is out of range.
        """
        if not isinstance(optimizer_on_host, bool):
            raise RequestError(
                f"enable_optimizer_cpu_offload={optimizer_on_host!r}",
                limit="It is True or False",
                way_out="Pass one of them",
            )
        return OffloadConfig(
            target_device=_check_device(target_device),
            optimizer_on_host=optimizer_on_host,
            split_threshold_bytes=_check_size(
                "cpu_offload_split_threshold", split_threshold_mb, zero_allowed=False
            ),
            recompute_cache_bytes=_check_size("recompute_cache_mb", recompute_cache_mb, zero_allowed=True),
        )


def _check_device(asked: torch.device | str) -> torch.device:
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise RequestError(
            f"target_device={asked!r} is no torch device",
            limit=str(error).splitlines()[0],
            way_out="Pass 'cuda', 'cuda:0' or 'cpu'",
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise RequestError(
            f"target_device={asked!r} was asked for offloading",
            limit="Only CUDA devices and 'cpu' are supported",
            way_out="Pass 'cuda' or 'cpu'",
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        raise RequestError(
            f"target_device={asked!r} was asked for offloading",
            limit=f"This process sees {count} CUDA device(s)",
            way_out="Pass a device that exists, or 'cpu'",
        )
    return torch.device("cuda", index)


def _check_size(name: str, asked_mb: float | None, *, zero_allowed: bool) -> int | None:
    if asked_mb is None:
        return None
    number = isinstance(asked_mb, (int, float)) and not isinstance(asked_mb, bool)
    if not number or not math.isfinite(asked_mb) or asked_mb < 0 or (asked_mb == 0 and not zero_allowed):
        raise RequestError(
            f"{name}={asked_mb!r}",
            limit=f"It is a size in MB (2**20 bytes), {'zero or more' if zero_allowed else 'above zero'}",
            way_out="Pass a number such as 64, or None",
        )
    return int(asked_mb * MB)
