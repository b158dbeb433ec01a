"""The optimizer's own step on some masters only, in another thread and with the values of its moment.

What this module does not do: it decides neither when nor in which order; ``overlapped_steps`` and
``update_queue`` do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from ..errors import OffloadError
from .buckets import Bucket
from .fused_steps import FUSED_OPTIMIZERS, suits_fused_kernel
from .gradients import Arriving
from .tensors import PlainTensor
from .transfer import Transfer


@dataclass(eq=False)
class Progress:
    """One parameter in the present round, which ends with ``step()``.

    Attributes:
        tensor: The parameter.
        arriving: Its latest gradient.
        num_gradients: How many it got in this round.
        gradient: Their sum on the host.
        gradient_version: Version of the sum when it was complete.
        parameter_version: Version of the parameter when its step was decided.
        hyperparameters: Those of its group when its first gradient came.
        is_stepped: Whether its step is done or decided.
    """

    tensor: PlainTensor
    arriving: Arriving
    num_gradients: int = 0
    gradient: torch.Tensor | None = None
    gradient_version: int = 0
    parameter_version: int = 0
    hyperparameters: dict[str, Any] | None = None
    is_stepped: bool = False

    def note_gradient(self) -> None:
        """Record the sum as it is now, complete."""
        self.gradient = self.arriving.total
        self.gradient_version = 0 if self.gradient is None else self.gradient._version

    def is_changed(self) -> bool:
        """Return whether the parameter has another gradient than the one that came."""
        gradient = self.tensor.tensor.grad
        version = 0 if gradient is None else gradient._version
        return gradient is not self.gradient or version != self.gradient_version

    def decide(self) -> None:
        """Note that the step is certain now."""
        self.is_stepped = True
        self.parameter_version = self.tensor.tensor._version


class MasterStep:
    """One step of the parameters of one bucket.

    Hyperparameters are those of the moment when it is made: a schedule may change them before it runs.

    Args:
        optimizer: Whose class and state are used.
        bucket: Where the masters are.
        members: The parameters.
        group_of: Each parameter's group, by the parameter's ``id``.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        bucket: Bucket,
        members: list[Progress],
        group_of: dict[int, dict[str, Any]],
    ) -> None:
        self.bucket = bucket
        self.members = members
        self._optimizer = optimizer
        self._double = object.__new__(type(optimizer))
        self._double.__dict__.update(optimizer.__dict__)
        self._groups: dict[int, tuple[dict[str, Any], list[Progress]]] = {}
        for member in members:
            group = group_of[id(member.tensor.tensor)]
            if id(group) not in self._groups:
                own = {name: _copied(value) for name, value in group.items() if name != "params"}
                self._groups[id(group)] = own, []
            self._groups[id(group)][1].append(member)

    def has_arrived(self) -> bool:
        """Return whether ``run`` need not wait for a gradient."""
        arrivals = [member.arriving.arrival for member in self.members]
        return all(arrival is None or arrival.is_over() for arrival in arrivals)

    def run(self, transfer: Transfer) -> None:
        """Change the masters, once the gradients are there and no copy reads them."""
        for member in self.members:
            if member.arriving.arrival is not None:
                member.arriving.arrival.wait()
        with self.bucket.host_lock:
            if self.bucket.slot is not None:
                transfer.finish(self.bucket.slot.lease)
            try:
                self._change_masters()
            finally:
                for member in self.members:
                    member.tensor.generation += 1

    def check_untouched(self) -> None:
        """Check that nobody wrote what this step read and wrote, since it was decided.

        Raises:
            OffloadError: If somebody did; the numbers depend on which came first.
        """
        for member in self.members:
            is_same = member.gradient is None or member.gradient._version == member.gradient_version
            if is_same and member.tensor.tensor._version == member.parameter_version:
                continue
            raise OffloadError(
                f"{'The parameter' if is_same else 'The gradient of'} {member.tensor.path} was written after "
                "optimizer.step() had returned and before its update, which was still queued "
                '(finish="next use"), was settled. Call settle() of what overlap_optimizer() returned before '
                "writing parameters or gradients, and start again from a checkpoint."
            )

    def _change_masters(self) -> None:
        """Run the optimizer's own step on parameters that stand for the masters."""
        optimizer, double = self._optimizer, self._double
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        parameter_of: dict[torch.Tensor, torch.Tensor] = {}
        double.param_groups = []
        for group, members in self._groups.values():
            stand_ins = []
            for member in members:
                stand_in = nn.Parameter(member.tensor.host_views[0].detach())
                stand_in.grad = member.gradient
                state[stand_in] = optimizer.state.get(member.tensor.tensor, {})
                parameter_of[stand_in] = member.tensor.tensor
                stand_ins.append(stand_in)
            double.param_groups.append({**group, "params": stand_ins})
        for group in double.param_groups:
            if type(optimizer) in FUSED_OPTIMIZERS and suits_fused_kernel(group, group["params"], state):
                group["fused"] = True
        double.state = state
        # Without the class's wrapper, which would call everybody's step hooks for every bucket.
        type(optimizer).step.__wrapped__(double)  # pyright: ignore[reportFunctionMemberAccess]
        optimizer.state.update({parameter_of[stand_in]: own for stand_in, own in state.items() if own})


def groups_of(optimizer: optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return each parameter's group as it is now, by the parameter's ``id``."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def hyperparameters_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return what tells whether the group's values are still the same."""
    own = {name: value for name, value in group.items() if name != "params"}
    return {
        name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
        for name, value in own.items()
    }


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return tuple(map(_copied, value)) if isinstance(value, tuple) else value
