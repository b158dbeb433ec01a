"""The optimizer's step where trainable parameters live on the host: one kernel, and when it runs.

What this module does not do: ``fused_steps`` chooses the kernel, ``overlapped_steps`` the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import OffloadError, RequestError
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
        if not self._steps_any_of(each for group in optimizer.param_groups for each in group["params"]):
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

    def _steps_any_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        found = (self._find(parameter) for parameter in parameters)
        return any(managed is not None and managed.is_trainable for managed in found)

    @property
    def is_overlapped(self) -> bool:
        """Whether parameters are stepped during backwards."""
        return self._overlapped is not None and self._overlapped.is_on

    def settle(self) -> None:
        """Undo what a step that raised left behind.

        Raises:
            OffloadError: If a forward begins inside a DistributedDataParallel that reduces these gradients.
        """
        self._fused.switch_back()
        reducer = DistributedDataParallel._active_ddp_module
        if reducer is not None and reducer.training and self._steps_any_of(reducer.parameters()):
            raise OffloadError(
                "A model whose gradients go to the host was called by DistributedDataParallel, which would "
                "find none of them to reduce. Call the model itself and all-reduce its gradients after "
                "after_backward(), or use enable_optimizer_cpu_offload=False."
            )

    def remove(self) -> None:
        """Let optimizers step as torch has it."""
        if self._overlapped is not None:
            self._overlapped.remove()
        self._fused.remove()
