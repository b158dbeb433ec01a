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

With ``finish="next use"`` the worker need not be done when ``step()`` returns: it goes on beside the next
forward, in which each bucket waits for its own step only. The numbers are the same. What reads or writes
parameters, gradients or the optimizer's state meanwhile waits too, where it can be seen:

* forwards, and the next backward;
* the model's entries, read or assigned: ``module.weight``, ``parameters()``, ``state_dict``,
  ``load_state_dict``, ``zero_grad``, copying and pickling the model;
* the optimizer's ``state_dict``, ``load_state_dict`` and ``zero_grad(set_to_none=False)``, and the
  ``step()`` of any other optimizer of ``torch.optim`` over these parameters;
* removing the overlap or the manager.

Learning rates may be changed as soon as ``step()`` has returned, and gradients set to None. What cannot be
seen is a tensor that the caller kept (a list of parameters, ``optimizer.param_groups``, a ``grad``) and
``optimizer.state``: call ``settle()`` before reading such parameters and states, or writing any of them. A
write in place without it is found and refused, unless it goes through ``.data``. What the worker meets is
raised by the next of these waits.

What this module does not do: it computes no update; the optimizer's own ``step`` does.
Idea: PyTorch ``torch/distributed/optim/apply_optimizer_in_backward.py``, with one optimizer kept whole.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import optim

from ..errors import OffloadError, RequestError
from .buckets import Bucket
from .gradients import Arriving, HostGradients
from .master_steps import MasterStep, Progress, groups_of, hyperparameters_of
from .optimizer_calls import OptimizerCalls
from .transfer import Transfer
from .update_queue import UpdateQueue

Finish = Literal["step", "next use"]

# Each parameter's update needs its own gradient and state only; no value of the group is changed.
_SEPARABLE = tuple(
    getattr(optim, name)
    for name in "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
)


class OverlappedSteps:
    """Step one optimizer's streamed parameters during backwards.

    Args:
        optimizer: One of torch's own, of a kind that treats every parameter by itself.
        gradients: Tells of gradients that go home, and has the worker.
        transfer: Makes sure that no copy still reads what is about to change.
        updates: Does what may be done after ``step()``.
        accumulation_steps: How many backwards there are before each ``step()``.
        finish: When the worker is done: at the end of the backward, or when a part is used next.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        gradients: HostGradients,
        *,
        transfer: Transfer,
        updates: UpdateQueue,
        accumulation_steps: int,
        finish: Finish,
    ) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._transfer = transfer
        self._updates = updates
        self._accumulation_steps = accumulation_steps
        self._finish: Finish = finish
        self._group_of = groups_of(optimizer)
        self._progress: dict[int, Progress] = {}
        self._is_first_round = True
        self._calls = OptimizerCalls(optimizer, self)
        gradients.observer = self.gradient_sent

    @property
    def is_on(self) -> bool:
        """Whether gradients lead to steps; False once removed."""
        return self._gradients.observer == self.gradient_sent

    @property
    def num_stepped(self) -> int:
        """Parameters whose step was done, or is certain, so far in the present round."""
        return sum(progress.is_stepped for progress in self._progress.values())

    def settle(self) -> None:
        """Wait until every parameter and state is what ``optimizer.step()`` makes of it.

        Raises:
            BaseException: What a step in the background raised.
            OffloadError: If something was written that it reads or writes.
        """
        self._updates.finish_all()

    def gradient_sent(self, arriving: Arriving) -> None:
        """Note a gradient on its way; step its bucket after the last one of it.

        Raises:
            OffloadError: If the parameter was already stepped.
        """
        if not self._progress:
            self._group_of = groups_of(self._optimizer)  # load_state_dict makes them anew
        parameter = arriving.tensor.tensor
        if id(parameter) not in self._group_of:
            return
        progress = self._progress.setdefault(id(parameter), Progress(arriving.tensor, arriving))
        progress.arriving = arriving
        progress.num_gradients += 1
        if progress.is_stepped:
            raise OffloadError(
                f"A gradient of {arriving.tensor.path} came after its overlapped step and before "
                "optimizer.step(). Call step() after every "
                f"{self._accumulation_steps} backward(s), as accumulation_steps says, or remove the overlap."
            )
        if progress.hyperparameters is None:
            progress.hyperparameters = hyperparameters_of(self._group_of[id(parameter)])
        if arriving.has_additions:
            self._gradients.worker.submit(progress.note_gradient)
        else:
            progress.note_gradient()
        if not self._is_first_round:
            self._step_if_complete(arriving.tensor.bucket)

    def end_round(self) -> Any:
        """Do what ``optimizer.step()`` still has to do.

        Raises:
            RequestError: In the first round, if the training loop is of a kind that cannot be overlapped.
            OffloadError: If that happens later.
        """
        self._check_round()
        stepped = {key for key, progress in self._progress.items() if progress.is_stepped}
        groups = [(group, group["params"]) for group in self._optimizer.param_groups]
        if any(p.grad is not None and id(p) not in stepped for _, own in groups for p in own):
            self.settle()  # the state would be written by two threads
        try:
            for group, parameters in groups:
                group["params"] = [p for p in parameters if id(p) not in stepped]
            return self._calls.inner_step()
        finally:
            for group, parameters in groups:
                group["params"] = parameters
            self._progress.clear()
            self._is_first_round = False

    def remove(self) -> None:
        """Let the optimizer step by itself again.

        Raises:
            BaseException: What a step in the background raised; the overlap is removed all the same.
        """
        if self.is_on:
            self._gradients.observer = None
        self._calls.remove()
        self.settle()

    def _step_if_complete(self, bucket: Bucket) -> None:
        trainable = [id(tensor.tensor) for tensor in bucket.tensors if tensor.is_trainable]
        members = [self._progress.get(key) for key in trainable if key in self._group_of]
        ready = [m for m in members if m is not None and m.num_gradients == self._accumulation_steps]
        if len(ready) < len(members) or any(m.arriving.later or m.is_stepped for m in ready):
            return
        for progress in ready:
            progress.decide()
        step = MasterStep(self._optimizer, bucket, ready, self._group_of)
        if self._finish == "next use":
            self._updates.add(step)
        else:
            self._gradients.worker.submit(lambda: step.run(self._transfer))

    def _check_round(self) -> None:
        if getattr(self._optimizer, "grad_scale", None) is not None:
            self._refuse("the optimizer was given a grad_scale", "Gradients are stepped before it is known")
        group_of = groups_of(self._optimizer)
        for key, progress in self._progress.items():
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
            if key not in group_of or progress.hyperparameters != hyperparameters_of(group_of[key]):
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


def check_overlap(optimizer: optim.Optimizer, *, accumulation_steps: int, finish: str) -> None:
    """Check what is asked for.

    Raises:
        RequestError: If the optimizer, the number or the moment is not one that this works with.
    """
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
    if finish not in ("step", "next use"):
        raise RequestError(
            f"finish={finish!r}",
            limit='Steps are done by "step", or by the "next use" of what they change',
            way_out="Pass one of the two",
        )
