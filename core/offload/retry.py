"""Out of memory: keep less on the target and repeat the same batch.

A step that runs out of target memory is undone as far as the model is concerned (gradients, buffers,
random numbers), weights that only stay for speed are given back, and it runs again. It ends in the
original error once nothing is left to give back.

What this module does not do: it cannot undo what the step does elsewhere (a data loader's position,
parameters outside the model); let the step take its batch as an argument from outside.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import OffloadError, RequestError
from ..log import get_logger
from .tuner import lower_residency
from .unobserved import unobserved

if TYPE_CHECKING:
    from .engine import Engine
    from .manager import OffloadTrainingManager
    from .module_dicts import ManagedDict

R = TypeVar("R")

_log = get_logger("offload")

# Larger buffers hold weights or tables, which forwards do not change; a copy of each would be host memory.
_SMALL_BUFFER_BYTES = 2**20
# Of what stays on the target, the share that one retry gives back.
_SHARE = 4


def retry_on_oom(
    manager: OffloadTrainingManager,
    forward_backward: Callable[[], R],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    snapshot_optimizer: bool = False,
    release: Callable[[], bool] | None = None,
) -> R:
    """Run a batch's forward and backward, and again with less on the target while it is out of memory.

    Args:
        manager: Attached to the model.
        forward_backward: One or several micro-batches: forwards, backwards and ``after_backward()``. Best
            all of a step, because gradients that are there before it have to be copied.
        optimizer: If given, its ``step()`` follows, repeated likewise.
        snapshot_optimizer: Copy parameters and optimizer state to the host before the step, so that it
            can be repeated even if it ran out of memory half way. Without it such a step ends in an
            error; one that found no memory for new state is repeated either way.

        release: Gives other memory back, before any weights are: returns whether it had some.

    Returns:
        What ``forward_backward`` returned.

    Raises:
        torch.OutOfMemoryError: If nothing is left to give back.
        OffloadError: If the step cannot be repeated exactly; it names what was changed.
        RequestError: If the optimizer steps during backwards.
    """
    engine = manager.running_engine()
    if engine.host_steps is not None and engine.host_steps.is_overlapped:
        raise RequestError(
            "retry_on_oom() was asked for with an overlapped optimizer",
            limit="Parameters are stepped during the backward, so it cannot be repeated",
            way_out="Remove the overlap, or do without retries",
        )
    state = _StepState(manager.holders, engine)
    result = _repeat(engine, forward_backward, undo=state.restore, release=release)
    if optimizer is not None:
        before = _OptimizerState(optimizer, with_copies=snapshot_optimizer)
        _repeat(engine, optimizer.step, undo=before.restore, release=release)
    return result


def _repeat(
    engine: Engine, run: Callable[[], R], *, undo: Callable[[], None], release: Callable[[], bool] | None
) -> R:
    while True:
        try:
            return run()
        except torch.OutOfMemoryError as error:
            # The frames of the failed run hold its activations.
            traceback.clear_frames(error.__traceback__)
            failure = error.with_traceback(None)
        engine.end_hold()
        undo()
        freed = _give_back(engine, release)
        if freed is None:
            raise failure
        _log.info("out of memory on %s; %s, and the batch is repeated", engine.config.target_device, freed)


def _give_back(engine: Engine, release: Callable[[], bool] | None) -> str | None:
    """Lower what stays on the target; return what was done, or None if nothing was left to do."""
    residency = engine.residency
    done = None
    if release is not None and release():
        done = "memory for speed alone was given back"
    elif residency.kept_buckets():
        freed_bytes = lower_residency(engine, max(1, residency.kept_bytes // _SHARE))
        done = f"{freed_bytes} bytes of weights that stayed are streamed from now on"
    elif residency.cache_limit_bytes:
        largest = max((bucket.nbytes for bucket in engine.store.buckets), default=0)
        halved = residency.cache_limit_bytes // 2
        residency.cache_limit_bytes = halved if halved >= largest else 0
        done = f"the room for weights ahead of their use is {residency.cache_limit_bytes} bytes from now on"
    with unobserved():
        residency.drop_cached()
        residency.pool.trim(0)
    if engine.config.target_device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return done


class _StepState:
    """What forwards and backwards change, as it was before them."""

    def __init__(self, holders: list[ManagedDict], engine: Engine) -> None:
        self._engine = engine
        self._device = engine.config.target_device
        self._gradients = [
            (tensor, None if tensor.grad is None else (tensor.grad, tensor.grad.detach().clone()))
            for _, _, tensor in _entries(holders, are_parameters=True)
            if tensor.requires_grad and tensor.is_leaf
        ]
        self._buffers = [
            (holder, name, tensor, tensor._version, _copy_of_small(tensor))
            for holder, name, tensor in _entries(holders, are_parameters=False)
        ]
        self._random = random.getstate()
        self._cpu_random = torch.get_rng_state()
        self._cuda_random = (
            torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.empty(0)
        )

    def restore(self) -> None:
        """Put it back.

        Raises:
            OffloadError: If a large buffer was changed, of which there is no copy.
        """
        for tensor, saved in self._gradients:
            tensor.grad = None
            if saved is not None:
                gradient, content = saved
                gradient.detach().copy_(content)
                tensor.grad = gradient
        for holder, name, tensor, version, content in self._buffers:
            if dict.get(holder, name) is not tensor:
                holder[name] = tensor
            if content is not None:
                with unobserved():
                    tensor.copy_(content)
            elif tensor._version != version:
                raise OffloadError(
                    f"A step that ran out of memory had changed the buffer {holder.full_name(name)} "
                    f"({tensor.numel() * tensor.dtype.itemsize} bytes), so it cannot be repeated exactly. "
                    "Lower the residency or the batch, and start again from a checkpoint."
                )
        random.setstate(self._random)
        torch.set_rng_state(self._cpu_random)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._cuda_random, self._device)


class _OptimizerState:
    """Parameters and optimizer state before a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, with_copies: bool) -> None:
        self._optimizer = optimizer
        self._with_copies = with_copies
        self._known = {id(parameter): dict(own) for parameter, own in optimizer.state.items()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [value for own in optimizer.state.values() for value in own.values()]
        tensors = parameters + [value for value in states if isinstance(value, torch.Tensor)]
        self._tensors = [
            (tensor, tensor._version, tensor.detach().to("cpu", copy=True) if with_copies else None)
            for tensor in tensors
        ]

    def restore(self) -> None:
        """Put it back.

        Raises:
            OffloadError: If something was changed, and there are no copies.
        """
        if not self._with_copies and self._may_be_changed():
            raise OffloadError(
                "optimizer.step() ran out of memory after it had changed parameters or its state, so it "
                "cannot be repeated. Start again from a checkpoint, with snapshot_optimizer=True or less on "
                "the device."
            )
        with torch.no_grad():
            for tensor, _, content in self._tensors:
                if content is not None:
                    tensor.copy_(content)
        for parameter, own in list(self._optimizer.state.items()):
            known: dict[str, Any] | None = self._known.get(id(parameter))
            if known is None:
                del self._optimizer.state[parameter]
            else:
                own.clear()
                own.update(known)
        self._tensors = [(tensor, tensor._version, content) for tensor, _, content in self._tensors]

    def _may_be_changed(self) -> bool:
        if any(tensor._version != version for tensor, version, _ in self._tensors):
            return True
        # Fused kernels change parameters without a new version; a count of steps tells.
        new = [own for parameter, own in self._optimizer.state.items() if id(parameter) not in self._known]
        if any(group.get("fused") for group in self._optimizer.param_groups):
            return any("step" not in own or bool(own["step"] != 0) for own in new)
        return any(bool(own.get("step", 0) != 0) for own in new)


def _entries(
    holders: list[ManagedDict], *, are_parameters: bool
) -> Iterator[tuple[ManagedDict, str, torch.Tensor]]:
    seen: set[int] = set()
    for holder in holders:
        if holder.is_parameters != are_parameters:
            continue
        # dict's own methods: reading through the holder would count as a use.
        for name, tensor in dict.items(holder):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield holder, name, tensor


def _copy_of_small(tensor: torch.Tensor) -> torch.Tensor | None:
    is_small = tensor.numel() * tensor.dtype.itemsize <= _SMALL_BUFFER_BYTES
    return tensor.detach().clone() if is_small and type(tensor) is torch.Tensor else None
