"""Attach offload training to a model, and take it off again.

What this module does not do: what happens during forwards and backwards is in ``engine`` and ``hooks``.
"""

from __future__ import annotations

import contextlib
import weakref
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import OffloadError
from ..module_hooks import install_hook, remove_hook
from .attach import check_request, collect, make_dicts, make_units, set_dict, set_limits, take_over
from .budget import OffloadBudget
from .checks import check_model
from .config import OffloadConfig
from .engine import Engine
from .hooks import HOOK_NAME, UnitHook
from .host_steps import check_host_steps
from .modulation import ModulationCache, make_cache
from .modulation_layers import ModulationPlan
from .module_dicts import ManagedDict
from .overlapped_steps import Finish, OverlappedSteps
from .pinning import HostPinning
from .planner import ResidencyPlan
from .prefetch import start_next_forward
from .saved_tensors import check_torch
from .shared_masters import SharedMasters
from .stats import OffloadStats, take_snapshot
from .tuner import ResidencyTuner, apply_plan, lower_residency
from .units import has_forward, owned_tensors, plan_units
from .unobserved import unobserved


class OffloadTrainingManager:
    """Keep a model's weights on the host and bring each unit to the target only while it is used.

    The model then computes on ``target_device`` as if it were there, in forward and backward, with
    gradient checkpointing or without, and gives the same numbers. Outside of forwards its tensors
    are on the host: optimizers, ``state_dict``, ``load_state_dict``, saving, initialising work as
    usual. A method other than ``forward``, called from outside any forward, may read weights directly
    within ``forward_scope()``. Attaching a second manager to the same model removes the first one.

    Limits:
        * A write through ``.data`` inside a forward leaves no trace and is not carried back.
        * A parameter kept in a list or on ``ctx`` besides its module is on the target only while its
          own module runs; pass it to ``save_for_backward``, or read it from the module.
        * With ``enable_optimizer_cpu_offload`` on CUDA, ``torch.autograd.grad`` with respect to
          parameters is not supported: autograd ties their graph to the device they are on. Hooks that
          wait for accumulated gradients (``register_post_accumulate_grad_hook``) are refused there.
        * ``torch.func.grad`` and its kin disable saved-tensor hooks, and are refused.
        * A parameter that requires a gradient only later needs a new manager.

    Args:
        model: Any module; its tensors may be on the CPU or on CUDA.
        target_device: Where it computes: a CUDA device, or ``cpu``, where everything works alike
            and residency is counted, for tests without a GPU.
        enable_optimizer_cpu_offload: Offload trainable parameters too; their gradients arrive on
            the host, where the optimizer steps. Otherwise they stay on the target. torch's Adam and
            AdamW, unless they were made with ``fused`` or ``foreach``, take their fused kernel there
            (fp32 and fp64; equal up to rounding).
        cpu_offload_split_threshold: In MB (2**20 bytes): a module up to this size moves as a whole.
            None: every leaf module moves by itself.
        recompute_cache_mb: In MB: limit for weights kept from a recompute for the backward that
            follows it. None: two of the largest units, or 1/32 of the model if that is more.
        modulation: Frozen layers that see one small vector each; their outputs are kept, and computed
            ahead by ``modulation_cache.precompute``, so that steps need not stream them.
        budget: Keep as much on the target as this allows and a step gains by; planned from the second
            step, see ``residency_plan``. Resets PyTorch's record of peak memory once.
        plan: Keep what this says, from the start.
        pinning: What pins host memory, and how much; None: on CUDA, all that the limits allow.
        shared_masters: Host memory in which the frozen weights are common to several processes.
        prefetch_next_forward: A forward begins with the frozen weights that the backward before it ended
            with, and ``after_backward()`` starts copies of what comes next; see ``prefetch``.

    Attributes:
        modulation_cache: None unless ``modulation`` was given.
        tuner: What plans within ``budget``; None without one, or with a ``plan``.

    Raises:
        RequestError: If a value is out of range or a tensor cannot be managed; nothing changed then.
        OffloadError: If pinning fails, a manager of another model overlaps, or a forward is running.
    """

    def __init__(
        self,
        model: nn.Module,
        target_device: torch.device | str,
        enable_optimizer_cpu_offload: bool = False,
        cpu_offload_split_threshold: float | None = None,
        *,
        recompute_cache_mb: float | None = None,
        modulation: ModulationPlan | None = None,
        budget: OffloadBudget | None = None,
        plan: ResidencyPlan | None = None,
        pinning: HostPinning | None = None,
        shared_masters: SharedMasters | None = None,
        prefetch_next_forward: bool = False,
    ) -> None:
        self.modulation_cache: ModulationCache | None = None
        self._engine: Engine | None = None
        self._successor: OffloadTrainingManager | None = None
        self._holders: list[ManagedDict] = []
        self._hooked: list[weakref.ref[nn.Module]] = []
        self._model_ref: weakref.ref[nn.Module] | None = None
        self._num_units = 0
        self.tuner: ResidencyTuner | None = None
        self._plan = plan
        self._prefetch_next_forward = prefetch_next_forward
        config = OffloadConfig.from_request(
            target_device,
            enable_optimizer_cpu_offload,
            split_threshold_mb=cpu_offload_split_threshold,
            recompute_cache_mb=recompute_cache_mb,
        )
        check_torch()
        check_model(model, config)
        check_request(model, config, (budget, modulation, plan, pinning, shared_masters))
        if modulation is not None:
            self.modulation_cache = make_cache(model, modulation, self.forward_scope, config.target_device)
        take_over(model, self)
        if pinning is None and config.target_device.type == "cuda":
            pinning = HostPinning(budget_bytes=None if budget is None else budget.pin_bytes)
        engine = Engine(config, manager=self)
        engine.store.pinning, engine.store.shared_masters = pinning, shared_masters
        engine.residency.keeps_frozen = prefetch_next_forward
        self._attach(model, engine)
        if budget is not None and plan is None:
            self.tuner = ResidencyTuner(engine, budget)

    def after_backward(self) -> None:
        """Finish a backward: gradients are complete on their device, only the resident set is on the target.

        Call it before the optimizer's step. It goes to the manager that replaced this one, if one did.
        """
        if self._successor is not None:
            self._successor.after_backward()
        elif self._engine is not None:
            self._engine.settle()
            self._engine.end_all_tasks()
            has_run = self._engine.transfer.clock.end(self._engine.transfer.moved_bytes)
            if self.tuner is not None and has_run:
                self.tuner.after_step()
            if self._prefetch_next_forward:
                start_next_forward(self._engine)

    @property
    def residency_plan(self) -> ResidencyPlan | None:
        """What stays on the target and what a step is expected to cost; None while there is no plan."""
        return self._plan if self.tuner is None else self.tuner.plan

    def lower_residency(self, nbytes: int) -> int:
        """Give back target memory of weights that stay, between steps; return how many bytes that frees.

        Raises:
            OffloadError: If the manager was removed.
        """
        return lower_residency(self.running_engine(), nbytes)

    def overlap_optimizer(
        self, optimizer: Optimizer, *, accumulation_steps: int = 1, finish: Finish = "step"
    ) -> OverlappedSteps:
        """Step the optimizer's parameters on the host while the backward goes on.

        The loop stays as it is, ``step()`` included, but must not touch gradients or hyperparameters
        between backward and step; ``overlapped_steps`` says why. ``remove()`` of the result ends it.

        Args:
            optimizer: One of ``torch.optim`` that treats every parameter by itself.
            accumulation_steps: How many backwards there are before each step.
            finish: "next use" lets the work go on beside the next forward, after ``step()``;
                ``overlapped_steps`` says when to call ``settle()`` of the result.

        Raises:
            RequestError: If the optimizer is of another kind, or parameters are not offloaded.
            OffloadError: If the manager was removed.
        """
        steps = check_host_steps(self.running_engine().host_steps)
        return steps.overlap(optimizer, accumulation_steps=accumulation_steps, finish=finish)

    def forward_scope(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which reading a weight brings it to the target, as inside a forward.

        Raises:
            OffloadError: If the manager was removed.
        """
        return self.running_engine().forward_scope()

    def remove(self) -> None:
        """Give the model back bit for bit as it was, gradients kept; may be called again.

        Raises:
            OffloadError: If a forward of the model is running.
        """
        engine = self._engine
        if engine is None:
            return
        if engine.num_open_scopes:
            running = f"{engine.num_open_scopes} forward(s) of the model run"
            raise OffloadError(f"remove() was called while {running}. Call it after they have ended.")
        engine.updates.finish_all()
        self._engine = None
        if self.modulation_cache is not None:
            self.modulation_cache.remove()
        with unobserved():
            engine.end_all_tasks()
            engine.gradients.remove()
            if engine.host_steps is not None:
                engine.host_steps.remove()
            engine.store.restore()
        engine.residency.set_kept((), cache_limit_bytes=0)
        engine.residency.pool.trim(0)
        for holder in self._holders:
            set_dict(holder.module, holder.hand_back(), is_parameters=holder.is_parameters)
        for reference in self._hooked:
            module = reference()
            if module is not None:
                remove_hook(module, HOOK_NAME)
        self._holders.clear()
        self._hooked.clear()
        engine.transfer.synchronize()
        engine.transfer.stop_staging()
        engine.store.unpin()

    @property
    def resident_bytes(self) -> int:
        """Managed bytes on the target now."""
        return 0 if self._engine is None else self._engine.residency.resident_bytes

    @property
    def resident_set_bytes(self) -> int:
        """Managed bytes that are meant to stay on the target."""
        residency = None if self._engine is None else self._engine.residency
        return 0 if residency is None else residency.resident_set_bytes + residency.kept_bytes

    def stats(self) -> OffloadStats:
        """Return a snapshot of what is where and what was moved.

        Raises:
            OffloadError: If the manager was removed.
        """
        engine = self.running_engine()
        engine.settle()
        return take_snapshot(engine, num_units=self._num_units)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @property
    def holders(self) -> list[ManagedDict]:
        """What stands for the modules' parameters and buffers."""
        return list(self._holders)

    def running_engine(self) -> Engine:
        """Return the engine, for the parts of this package that work with it; refuse if it was removed."""
        if self._engine is None:
            raise OffloadError("This OffloadTrainingManager was removed. Attach a new one.")
        return self._engine

    def _attach(self, model: nn.Module, engine: Engine) -> None:
        self._engine = engine
        self._model_ref = weakref.ref(model)
        try:
            with unobserved():
                self._manage(model, engine)
            set_limits(engine)
            if self._plan is not None:
                apply_plan(engine, self._plan)
        except BaseException:
            self.remove()
            raise

    def _manage(self, model: nn.Module, engine: Engine) -> None:
        cache = self.modulation_cache
        apart = [layer.linear for layer in cache.layers] if cache is not None else []
        plans = plan_units(model, engine.config.split_threshold_bytes, apart=apart)
        self._num_units = len(plans)
        engine.store.units.update(make_units(model, plans))
        self._holders = make_dicts(model, engine)
        engine.store.add(collect(self._holders))
        for holder in self._holders:
            set_dict(holder.module, holder, is_parameters=holder.is_parameters)
        if cache is not None:
            cache.install()
        for module in model.modules():
            if has_forward(module) and any(True for child in module.modules() for _ in owned_tensors(child)):
                install_hook(module, HOOK_NAME, UnitHook(engine, engine.store.units[id(module)]))
                self._hooked.append(weakref.ref(module))
