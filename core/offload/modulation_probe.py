"""What a coming call of a model will give its modulation layers, found by running it as far as those.

What this module does not do: it computes no layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Captured(BaseException):
    """Ends a call once the input of its modulation is known; models may catch ``Exception``."""

    def __init__(self, argument: Tensor) -> None:
        super().__init__()
        self.argument = argument


class ModulationProbe:
    """Runs calls as far as their first modulation layer.

    Args:
        device: The target.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = threading.local()

    def meet(self, argument: Tensor) -> None:
        """Note what a modulation layer is given; ends the call if this thread runs one for that alone."""
        if getattr(self._thread, "is_running", False):
            raise _Captured(argument.detach().clone())

    def run(self, call: Callable[[], Any]) -> Tensor | None:
        """Return what the call's first modulation layer is given, None if it ends without one.

        The random state is as it was afterwards.
        """
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            self._thread.is_running = True
            try:
                call()
            except _Captured as captured:
                return captured.argument
            finally:
                self._thread.is_running = False
        return None
