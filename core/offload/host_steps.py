"""The optimizer's step where trainable parameters live on the host: one kernel, and when it runs.

What this module does not do: ``fused_steps`` chooses the kernel, ``overlapped_steps`` the moment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import RequestError
from .fused_steps import FusedSteps
from .gradients import HostGradients
from .overlapped_steps import Finish, OverlappedSteps, check_overlap
from .tensors import ManagedTensor
from .transfer import Transfer
from .update_queue import UpdateQueue


def check_host_steps(steps: HostSteps | None) -> HostSteps:
    """Return ``steps`` if parameters are stepped on the host.

    Raises:
        RequestError: If they are not.
    """
    if steps is None:
        raise RequestError(
            "overlap_optimizer() was asked for parameters that stay on the target",
            limit="It steps parameters whose home is the host",
            way_out="Attach with enable_optimizer_cpu_offload=True",
        )
    return steps


class HostSteps:
    """What is attached to optimizers for as long as a manager is attached to their parameters.

    Args:
        gradients: The gradients of these parameters.
        transfer: Moves the parameters.
        updates: Steps that are done after ``optimizer.step()``.
        find: Returns what manages a parameter whose home is the host, None for any other.
    """

    def __init__(
        self,
        gradients: HostGradients,
        transfer: Transfer,
        updates: UpdateQueue,
        *,
        find: Callable[[torch.Tensor], ManagedTensor | None],
    ) -> None:
        self._gradients = gradients
        self._transfer = transfer
        self._updates = updates
        self._find = find
        self._fused = FusedSteps(find, before_change=updates.finish_all)
        self._overlapped: OverlappedSteps | None = None

    def overlap(
        self, optimizer: torch.optim.Optimizer, *, accumulation_steps: int, finish: Finish
    ) -> OverlappedSteps:
        """Step ``optimizer`` during backwards; an earlier overlap ends.

        Raises:
            RequestError: If it cannot be overlapped; the earlier overlap stays then.
        """
        check_overlap(optimizer, accumulation_steps=accumulation_steps, finish=finish)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if all(self._find(parameter) is None for parameter in parameters):
            raise RequestError(
                f"overlap_optimizer() was asked for a {type(optimizer).__name__} of other parameters",
                limit="None of them is a parameter of this manager's model whose home is the host",
                way_out="Pass the optimizer that was made of model.parameters()",
            )
        if self._overlapped is not None:
            self._overlapped.remove()
        self._overlapped = OverlappedSteps(
            optimizer,
            self._gradients,
            transfer=self._transfer,
            updates=self._updates,
            accumulation_steps=accumulation_steps,
            finish=finish,
        )
        return self._overlapped

    @property
    def is_overlapped(self) -> bool:
        """Whether parameters are stepped during backwards."""
        return self._overlapped is not None and self._overlapped.is_on

    def settle(self) -> None:
        """Undo what a step that raised left behind."""
        self._fused.switch_back()

    def remove(self) -> None:
        """Let optimizers step as torch has it."""
        if self._overlapped is not None:
            self._overlapped.remove()
        self._fused.remove()
