"""Registering host memory with CUDA, as far as the limits go.

A budget, or the system (the container's memory, the driver), may allow less than was asked for. Then
what comes first is pinned, the rest stays pageable and is copied through small pinned buffers
(``staging``), and ``report`` says so. Any other failure raises.

What this module does not do: it owns no memory and copies nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from typing_extensions import override

from ..errors import OffloadError
from ..log import get_logger

_log = get_logger("offload")

_GB = 10**9
# cudaHostRegisterPortable: pinned for every CUDA context of the process.
_REGISTER_PORTABLE = 1
# cudaErrorMemoryAllocation and cudaErrorOperatingSystem: what a limit looks like.
_LIMIT_CODES = (2, 304)


class Registrar(Protocol):
    """What pins memory; tests have one of their own."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin memory and return a CUDA error code, 0 for success."""
        ...

    def unregister(self, address: int) -> int:
        """Unpin what was registered at ``address`` and return a CUDA error code."""
        ...

    def message(self, code: int) -> str:
        """Return CUDA's words for an error code."""
        ...


class CudaRegistrar(Registrar):
    """``cudaHostRegister``."""

    @override
    def register(self, address: int, nbytes: int) -> int:
        code = int(_runtime().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
        if code:
            _forget_last_error()
        return code

    @override
    def unregister(self, address: int) -> int:
        return int(_runtime().cudaHostUnregister(address))

    @override
    def message(self, code: int) -> str:
        return str(_runtime().cudaGetErrorString(_runtime().cudaError(code)))


class HostPinning:
    """Pins memory, counts it, and notes where it had to stop.

    Args:
        budget_bytes: The most to pin; None: as much as the system allows.
        registrar: What pins.
    """

    def __init__(self, *, budget_bytes: int | None = None, registrar: Registrar | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.registrar = registrar or CudaRegistrar()
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self._limit = ""

    @property
    def report(self) -> str:
        """How much is pinned, and why not more, in one line."""
        line = f"{self.pinned_bytes / _GB:.2f} GB of host memory are pinned"
        if not self.pageable_bytes:
            return line
        return f"{line}, {self.pageable_bytes / _GB:.2f} GB are not and stream more slowly: {self._limit}"

    def pin(self, address: int, nbytes: int) -> bool:
        """Pin memory; return False if a limit was reached, now or before.

        Raises:
            OffloadError: If it fails for another reason than a limit.
        """
        if not self._limit and self.budget_bytes is not None:
            if self.pinned_bytes + nbytes > self.budget_bytes:
                self._limit = f"the budget for pinned memory is {self.budget_bytes / _GB:.2f} GB"
        if not self._limit:
            code = self.registrar.register(address, nbytes)
            if code == 0:
                self.pinned_bytes += nbytes
                return True
            reason = self.registrar.message(code)
            if code not in _LIMIT_CODES:
                raise OffloadError(
                    f"Pinning {nbytes} bytes of host memory failed: {reason} (CUDA error {code}). "
                    "This is no limit that could be kept to."
                )
            self._limit = (
                f"the system refused to pin another {nbytes / _GB:.2f} GB ({reason}); raise the "
                "container's memory limit or 'ulimit -l', or free host memory"
            )
            _log.warning("%s", self._limit)
        self.pageable_bytes += nbytes
        return False

    def unpin(self, address: int, nbytes: int) -> None:
        """Unpin what ``pin`` pinned.

        Raises:
            OffloadError: If CUDA refuses.
        """
        code = self.registrar.unregister(address)
        self.pinned_bytes -= nbytes
        if code:
            raise OffloadError(f"Unpinning host memory failed: {self.registrar.message(code)}")


def _forget_last_error() -> None:
    # CUDA keeps the code of a failed call until somebody asks; the next kernel would be blamed for it.
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as error:
        _log.debug("after a refused registration: %s", error)


def _runtime() -> Any:
    return torch.cuda.cudart()
