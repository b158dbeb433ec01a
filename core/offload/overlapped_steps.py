"""An optimizer's step on the host, done piece by piece while the backward goes on.

The moment the last gradient of a bucket is on the host, a worker thread steps that bucket's parameters
with the caller's own optimizer: its class, hyperparameters and state. ``optimizer.step()`` then finds
most of its work done and steps the rest. This is another contract than PyTorch's usual one, so it is
asked for explicitly:

* parameters change during ``backward()``, so nothing that needs all gradients first (clipping by the
  total norm, a gradient scaler, skipping a step) can come between;
* ``step()`` follows every ``accumulation_steps`` backwards, each of which brings a parameter at most
  one gradient;
* hyperparameters are set before the backward, not between it and ``step()``.

The first step after attaching is an ordinary one in which these are checked, so a loop that does not
keep them is refused before anything was stepped early; later ones are checked as well. A change made
through ``gradient.data`` leaves no trace and is not found.

What this module does not do: it computes no update; the optimizer's own ``step`` does.
Idea: PyTorch ``torch/distributed/optim/apply_optimizer_in_backward.py``, with one optimizer kept whole.
"""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from ..errors import OffloadError, RequestError
from .buckets import Bucket
from .fused_steps import FUSED_OPTIMIZERS, suits_fused_kernel
from .gradients import Arriving, HostGradients
from .tensors import PlainTensor
from .transfer import Transfer

# Each parameter's update needs its own gradient and state only; no value of the group is changed.
_SEPARABLE = tuple(
    getattr(optim, name)
    for name in "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
)


@dataclass(eq=False)
class _Progress:
    """One parameter in the present round, which ends with ``step()``."""

    tensor: PlainTensor
    arriving: Arriving
    num_gradients: int = 0
    gradient: torch.Tensor | None = None
    gradient_version: int = 0
    hyperparameters: dict[str, Any] | None = None
    is_stepped: bool = False

    def note_gradient(self) -> None:
        """Record the sum as it is now, complete."""
        self.gradient = self.arriving.total
        self.gradient_version = 0 if self.gradient is None else self.gradient._version

    def is_changed(self) -> bool:
        gradient = self.tensor.tensor.grad
        version = 0 if gradient is None else gradient._version
        return gradient is not self.gradient or version != self.gradient_version


class OverlappedSteps:
    """Step one optimizer's streamed parameters during backwards.

    Args:
        optimizer: One of torch's own, of a kind that treats every parameter by itself.
        gradients: Tells of gradients that go home, and has the worker.
        transfer: Makes sure that no copy still reads what is about to change.
        accumulation_steps: How many backwards there are before each ``step()``.

    Raises:
        RequestError: If the optimizer or the number is not one that this works with.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        gradients: HostGradients,
        *,
        transfer: Transfer,
        accumulation_steps: int,
    ) -> None:
        _check(optimizer, accumulation_steps)
        self._optimizer = optimizer
        self._gradients = gradients
        self._transfer = transfer
        self._accumulation_steps = accumulation_steps
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._progress: dict[int, _Progress] = {}
        self._is_first_round = True
        self._has_instance_step = "step" in optimizer.__dict__
        self._inner_step: Callable[..., Any] = optimizer.step
        self._own_step = _make_step(self)
        optimizer.__dict__["step"] = types.MethodType(self._own_step, optimizer)
        gradients.observer = self.gradient_sent

    @property
    def is_on(self) -> bool:
        """Whether gradients lead to steps; False once removed."""
        return self._gradients.observer == self.gradient_sent

    @property
    def num_stepped(self) -> int:
        """Parameters that were stepped so far in the present round."""
        return sum(progress.is_stepped for progress in self._progress.values())

    def gradient_sent(self, arriving: Arriving) -> None:
        """Note a gradient on its way; step its bucket after the last one of it.

        Raises:
            OffloadError: If the parameter was already stepped.
        """
        parameter = arriving.tensor.tensor
        if id(parameter) not in self._group_of:
            return
        progress = self._progress.setdefault(id(parameter), _Progress(arriving.tensor, arriving))
        progress.arriving = arriving
        progress.num_gradients += 1
        if progress.is_stepped:
            raise OffloadError(
                f"A gradient of {arriving.tensor.path} came after its overlapped step and before "
                "optimizer.step(). Call step() after every "
                f"{self._accumulation_steps} backward(s), as accumulation_steps says, or remove the overlap."
            )
        progress.hyperparameters = progress.hyperparameters or _hyperparameters(self._group_of[id(parameter)])
        self._gradients.worker.submit(progress.note_gradient)
        if not self._is_first_round:
            self._step_if_complete(arriving.tensor.bucket)

    def finish(self) -> Any:
        """Do what ``optimizer.step()`` still has to do.

        Raises:
            RequestError: In the first round, if the training loop is of a kind that cannot be overlapped.
            OffloadError: If that happens later.
        """
        self._check_round()
        stepped = {key for key, progress in self._progress.items() if progress.is_stepped}
        groups = [(group, group["params"]) for group in self._optimizer.param_groups]
        try:
            for group, parameters in groups:
                group["params"] = [p for p in parameters if id(p) not in stepped]
            return self._inner_step()
        finally:
            for group, parameters in groups:
                group["params"] = parameters
            self._progress.clear()
            self._is_first_round = False

    def remove(self) -> None:
        """Let the optimizer step by itself again."""
        if self.is_on:
            self._gradients.observer = None
        step = self._optimizer.__dict__.get("step")
        if getattr(step, "__func__", None) is not self._own_step:
            return  # wrapped by other code since, which our step lets through
        if self._has_instance_step:
            self._optimizer.__dict__["step"] = self._inner_step
        else:
            del self._optimizer.__dict__["step"]

    def _step_if_complete(self, bucket: Bucket) -> None:
        trainable = [id(tensor.tensor) for tensor in bucket.tensors if tensor.is_trainable]
        members = [self._progress.get(key) for key in trainable if key in self._group_of]
        ready = [m for m in members if m is not None and m.num_gradients == self._accumulation_steps]
        if len(ready) < len(members) or any(m.arriving.later or m.is_stepped for m in ready):
            return
        for progress in ready:
            progress.is_stepped = True
        self._gradients.worker.submit(lambda: self._step_bucket(bucket, ready))

    def _step_bucket(self, bucket: Bucket, members: list[_Progress]) -> None:
        for progress in members:
            if progress.arriving.arrival is not None:
                progress.arriving.arrival.wait()
            progress.note_gradient()
        with bucket.host_lock:
            if bucket.slot is not None:
                self._transfer.finish(bucket.slot.lease)
            try:
                self._step_masters(members)
            finally:
                for progress in members:
                    progress.tensor.generation += 1

    def _step_masters(self, members: list[_Progress]) -> None:
        """Run the optimizer's own step on parameters that stand for the masters."""
        optimizer = self._optimizer
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        parameter_of: dict[torch.Tensor, torch.Tensor] = {}
        groups: dict[int, dict[str, Any]] = {}
        for progress in members:
            stand_in = nn.Parameter(progress.tensor.host_views[0].detach())
            stand_in.grad = progress.gradient
            state[stand_in] = optimizer.state.get(progress.tensor.tensor, {})
            parameter_of[stand_in] = progress.tensor.tensor
            group = self._group_of[id(progress.tensor.tensor)]
            groups.setdefault(id(group), {**group, "params": []})["params"].append(stand_in)
        for group in groups.values():
            if type(optimizer) in FUSED_OPTIMIZERS and suits_fused_kernel(group, group["params"], state):
                group["fused"] = True
        double = object.__new__(type(optimizer))
        double.__dict__.update(optimizer.__dict__)
        double.param_groups = list(groups.values())
        double.state = state
        # Without the class's wrapper, which would call everybody's step hooks for every bucket.
        type(optimizer).step.__wrapped__(double)  # pyright: ignore[reportFunctionMemberAccess]
        optimizer.state.update({parameter_of[stand_in]: own for stand_in, own in state.items() if own})

    def _check_round(self) -> None:
        if getattr(self._optimizer, "grad_scale", None) is not None:
            self._refuse("the optimizer was given a grad_scale", "Gradients are stepped before it is known")
        for progress in self._progress.values():
            path = progress.tensor.path
            if progress.num_gradients > self._accumulation_steps:
                self._refuse(
                    f"{path} received {progress.num_gradients} gradients before step()",
                    f"It may receive accumulation_steps={self._accumulation_steps}",
                )
            if not progress.arriving.later and progress.is_changed():
                self._refuse(
                    f"the gradient of {path} was changed between backward() and step()",
                    "Its parameter is stepped as soon as the gradient arrives, before clipping or unscaling",
                )
            if progress.hyperparameters != _hyperparameters(self._group_of[id(progress.tensor.tensor)]):
                self._refuse(
                    "hyperparameters were changed between backward() and step()",
                    "Parameters are stepped with those that hold during the backward",
                )

    def _refuse(self, what: str, limit: str) -> None:
        way_out = "Use the optimizer without overlap_optimizer() in this loop"
        if self._is_first_round:
            raise RequestError(
                f"overlap_optimizer() was asked for a loop in which {what}", limit=limit, way_out=way_out
            )
        raise OffloadError(
            f"In an overlapped step {what}. {limit}, so some parameters have been stepped already. {way_out}."
        )


def _make_step(owner: OverlappedSteps) -> Callable[..., Any]:
    # Weak: the optimizer must not keep the manager's memory alive.
    reference = weakref.ref(owner)
    inner = owner._inner_step

    def step(optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        steps = reference()
        if steps is None or not steps.is_on:
            return inner(closure)
        if closure is not None:
            raise RequestError(
                "step() was called with a closure on an overlapped optimizer",
                limit="Parameters are stepped during the backward, which the closure would run again",
                way_out="Call the backward yourself, then step()",
            )
        return steps.finish()

    return step


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in group.items() if name != "params"}
    return {name: id(value) if isinstance(value, torch.Tensor) else value for name, value in own.items()}


def _check(optimizer: optim.Optimizer, accumulation_steps: int) -> None:
    if type(optimizer) not in _SEPARABLE:
        raise RequestError(
            f"overlap_optimizer() was asked for a {type(optimizer).__name__}",
            limit="Only these are known to treat every parameter by itself: "
            + ", ".join(kind.__name__ for kind in _SEPARABLE),
            way_out="Use one of them, or call its step() without overlap",
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise RequestError(
            "overlap_optimizer() was asked for an optimizer with step hooks",
            limit="A hook before the step would come after most of it",
            way_out="Remove the hooks, or do without overlap",
        )
    if (
        isinstance(accumulation_steps, bool)
        or not isinstance(accumulation_steps, int)
        or accumulation_steps < 1
    ):
        raise RequestError(
            f"accumulation_steps={accumulation_steps!r}",
            limit="It is the number of backwards before each step, 1 or more",
            way_out="Pass 1 if step() follows every backward",
        )
