"""The engine at run time: what forwards, reads, saved tensors and backwards do to residency.

Forwards nest, so each thread has a stack of scopes; a running backward has one scope of its own,
for what is read outside any forward (a recompute that reads a parameter directly). A scope pins
what it uses until it ends.

Outside all of these the model's tensors are their host masters, and reading one moves nothing: so
optimizers, ``state_dict`` and initialisers work as on any model on the CPU.
``torch.compile`` of blocks compiles what lies between managed layers: its graph breaks at these methods.

What this module does not do: it neither attaches nor removes; ``manager`` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.variable import Variable

from .buckets import Bucket, Segment
from .checks import check_recordable, check_trainable
from .config import OffloadConfig
from .gradients import HostGradients
from .holding import Holding
from .hooks import Scope, TaskEnd, Unit, tensors_in
from .host_steps import HostSteps
from .module_dicts import ManagedDict
from .prefetch import LookAhead
from .replacements import Replacements
from .residency import Residency
from .saved_tensors import SavedTensorHooks
from .step_timer import IdleTimer, StepTimer, watch
from .store import Store
from .transfer import make_transfer
from .unobserved import exclusive, uncompiled
from .update_queue import UpdateQueue

if TYPE_CHECKING:
    from .manager import OffloadTrainingManager

NO_TASK = -1


class Engine:
    """Run-time state of one managed model; it lives as long as the model or a graph needs it."""

    def __init__(self, config: OffloadConfig, *, manager: OffloadTrainingManager) -> None:
        self.config = config
        self.manager = manager
        self.lock = threading.RLock()
        self.transfer = make_transfer(config.target_device)
        self.residency = Residency(self.transfer, cache_limit_bytes=0)
        self.gradients = HostGradients(self.transfer, on_backward=self._note_task)
        self.store = Store(config, self.transfer, self.gradients)
        self.replacements = Replacements(self.store, self.residency)
        self.saved_tensors = SavedTensorHooks(self)
        self.look_ahead = LookAhead(self.residency)
        self.updates = UpdateQueue(self.gradients.worker, self.transfer, self.look_ahead.place_in_forward)
        self.host_steps = None
        if config.optimizer_on_host:
            self.host_steps = HostSteps(self.gradients, self.transfer, self.updates, find=self.store.find)
        self.timer: StepTimer = IdleTimer()
        self.num_open_scopes = 0
        self.holding = Holding(self.residency)
        self._local = threading.local()
        self._tasks: dict[int, Scope] = {}

    @uncompiled
    def enter(self, unit: Unit) -> Scope:
        """Open a forward's scope and bring its unit in.

        Raises:
            OffloadError: If a tensor of the unit is in a state that cannot be kept exact.
        """
        scopes = self._scopes()
        if not scopes:
            self.settle()
            self.transfer.clock.begin(self.transfer.moved_bytes)
            if torch._C._current_graph_task_id() == NO_TASK:
                if not self.holding.is_on:
                    self.residency.forget_contents()
                self.timer.begin("forward")
        scope = Scope()
        scopes.append(scope)
        self.num_open_scopes += 1
        try:
            self._note_task()
            scope.has_pushed_hooks = self.saved_tensors.push()
            self._use_unit(unit, scope)
        except BaseException:
            self.leave(scope)
            raise
        return scope

    @uncompiled
    def is_covered(self, unit: Unit) -> bool:
        """Return whether the forwards around this one have the unit and its hooks in place already."""
        scopes = self._scopes()
        if not scopes or not unit.buckets or not self.saved_tensors.is_innermost():
            return False
        return all(any(id(bucket) in scope.buckets for scope in reversed(scopes)) for bucket in unit.buckets)

    @uncompiled
    def leave(self, scope: Scope) -> None:
        """Close a forward's scope; what nobody else needs leaves the target or is cached."""
        if scope.has_pushed_hooks:
            self.saved_tensors.pop()
            scope.has_pushed_hooks = False
        self._scopes().remove(scope)
        self.num_open_scopes -= 1
        self._close(scope)
        is_recompute = torch._C._current_graph_task_id() != NO_TASK
        if self.num_open_scopes == 0 and not is_recompute and not self.holding.is_on:
            self._end_forward()

    @exclusive
    def _end_forward(self) -> None:
        """Let go of what was brought in ahead and not used (a forward that ended early)."""
        self.look_ahead.end_forward()
        self.residency.drop_cached()
        self.timer.end("forward")

    @contextmanager
    def forward_scope(self) -> Iterator[None]:
        """Treat the body as a forward: what it reads is brought in until it ends."""
        timer = watch(self, IdleTimer())  # what is done in here is no part of a training step
        scope = self.enter(Unit("forward_scope"))
        try:
            yield
        finally:
            self.leave(scope)
            watch(self, timer)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep what is used in the body until its end; gradients and look-ahead wait for ``end_hold``."""
        self.holding.begin()
        try:
            yield
        finally:
            self._close(self.holding.end())

    def end_hold(self) -> None:
        """End what several ``hold`` bodies in a row left open."""
        self._end_forward()
        self.end_all_tasks()

    @uncompiled
    @exclusive
    def keep_returned(self, output: Any) -> None:
        """Hand a parameter that a forward returns as it is over to the scope outside."""
        outside = self._scopes()[:-1]
        scope = outside[-1] if outside else self._task_scope()
        if scope is None:
            return
        for tensor in tensors_in(output):
            managed = self.store.find(tensor)
            if managed is not None and managed.bucket.is_bound:
                self._use(managed.bucket, scope)

    @uncompiled
    def read(self, holder: ManagedDict, name: str) -> None:
        """Bring a tensor in because a module's entry is being read, if a forward or backward runs."""
        scopes = self._scopes()
        scope = scopes[-1] if scopes else self._task_scope()
        # Without the lock first: most reads are of what this very thread has pinned.
        if scope is None:
            self.updates.finish_for(holder.managed[name].bucket)
        elif id(holder.managed[name].bucket) not in scope.buckets:
            self._use_entry(holder, name, scope)

    @exclusive
    def entry_changed(self, holder: ManagedDict, name: str, before: torch.Tensor | None) -> None:
        """Note that a module's entry, which held ``before``, was assigned or deleted."""
        if holder.is_parameters:
            self.updates.finish_all()
        inside = bool(self._scopes()) or torch._C._current_graph_task_id() != NO_TASK
        self.replacements.note(holder, name, before=before, is_inside_forward=inside)

    @exclusive
    def settle(self) -> None:
        """Take assigned tensors under management, if no forward runs.

        Raises:
            OffloadError, RequestError: If one cannot be, or is of a kind that cannot be managed.
        """
        if self.num_open_scopes == 0:
            self.replacements.settle()
            if self.host_steps is not None:
                self.host_steps.settle()

    @exclusive
    def reopen(
        self, bucket: Bucket, segment: Segment, make_view: Callable[[torch.UntypedStorage], torch.Tensor]
    ) -> torch.Tensor:
        """Bring a saved weight, part of ``segment``, in again and return its view."""
        task = self._note_task()
        slot = self.residency.fetch(bucket, segment)
        view = make_view(slot.storage)
        if bucket.pins == 0:
            # Outside a backward (somebody inspects a graph) nothing would end it: the view holds the slot.
            keep = self.residency.drop if task == NO_TASK else self.residency.cache
            keep(bucket)
        if self.holding.note(bucket) and task != NO_TASK:
            self.look_ahead.reopened(bucket)
        return view

    @exclusive
    def end_task(self, task_id: int) -> None:
        """Close a backward: nothing but the resident set stays, and gradients are complete."""
        scope = self._tasks.pop(task_id, None)
        if scope is not None:
            self._close(scope)
        if self.holding.is_on:
            return
        # A backward inside another one (reentrant checkpointing) leaves what the outer one looks ahead to,
        # and does not wait for gradients that the outer one still has time for.
        if not self._tasks:
            self.look_ahead.end_backward()
            self.residency.drop_cached()
            self.residency.forget_contents()
            self.timer.end("backward")
        thread = threading.get_ident()
        if all(other.thread_id != thread for other in self._tasks.values()):
            self.gradients.finish()

    def end_all_tasks(self) -> None:
        """Close whatever a backward may have left open."""
        for task_id in list(self._tasks):
            self.end_task(task_id)
        self.end_task(NO_TASK)

    def _scopes(self) -> list[Scope]:
        scopes = getattr(self._local, "scopes", None)
        if scopes is None:
            scopes = self._local.scopes = []
        return scopes

    def _task_scope(self) -> Scope | None:
        return self._tasks.get(self._note_task())

    def _note_task(self) -> int:
        """Make sure that the end of the running backward, if one runs, will be noticed."""
        task = torch._C._current_graph_task_id()
        if task != NO_TASK and task not in self._tasks:
            if not self._tasks and not self.holding.is_on:
                self.updates.finish_all()
            Variable._execution_engine.queue_callback(TaskEnd(self, task))  # pyright: ignore
            self.timer.begin("backward")
            self._tasks[task] = Scope()
        return task

    @exclusive
    def _close(self, scope: Scope) -> None:
        is_recompute = torch._C._current_graph_task_id() != NO_TASK
        while scope.buckets:
            _, bucket = scope.buckets.popitem()
            bucket.pins -= 1
            if bucket.pins == 0:
                if bucket.is_bound:
                    bucket.unbind(self.transfer)
                (self.residency.cache if is_recompute else self.residency.drop)(bucket)

    @exclusive
    def _use_unit(self, unit: Unit, scope: Scope) -> None:
        for bucket in list(unit.buckets):
            self._make_ready(bucket)
        for bucket in list(unit.buckets):
            self._use(bucket, scope)

    @exclusive
    def _use_entry(self, holder: ManagedDict, name: str, scope: Scope) -> None:
        if id(holder.managed[name].bucket) not in scope.buckets:
            self._make_ready(holder.managed[name].bucket)
            self._use(holder.managed[name].bucket, scope)

    def _make_ready(self, bucket: Bucket) -> None:
        self.updates.finish_for(bucket)
        if not bucket.is_bound:
            self.replacements.repair(bucket)

    def _use(self, bucket: Bucket, scope: Scope) -> None:
        if id(bucket) in scope.buckets:
            return
        check_recordable(bucket, self.transfer)
        self.residency.fetch(bucket)
        if not bucket.is_bound:
            check_trainable(bucket.tensors)
            bucket.bind()
        self.residency.pin(bucket)
        scope.buckets[id(bucket)] = bucket
        is_recompute = torch._C._current_graph_task_id() != NO_TASK
        self.timer.use(bucket, is_recompute=is_recompute)
        if self.holding.note(bucket):
            self.look_ahead.used(bucket, is_recompute=is_recompute)
