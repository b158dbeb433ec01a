"""Run a tensor plan: hooks around the modules whose weights are cut, and their sizes as attributes.

The hooks act in every call of the model, whoever makes it: with a part of the weights there is no other
way to compute. All ranks of the group make the same calls with the same inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import PlanError
from ..module_hooks import Forward, ModuleHook, hook_names, install_hook, remove_hook
from .arguments import ArgumentSlot, find_slot, signature_of
from .collectives import all_gather, all_reduce
from .tensor_plan import GatheredColumn, LocalArgument, NormAcrossRanks, RowParallel
from .tensor_shards import ShardedModule, TensorShards
from .tensor_units import UnitShares, runs

_HOOK = "tensor_parallel"
_ARGUMENTS_HOOK = "tensor_parallel_arguments"


def refuse_tensor_parallel(model: nn.Module) -> None:
    """Check that a model has its weights whole.

    Raises:
        PlanError: If it is tensor parallel already.
    """
    for path, module in model.named_modules():
        if {_HOOK, _ARGUMENTS_HOOK} & set(hook_names(module)):
            raise PlanError(f"{path} of {type(model).__name__} is parallel already; call remove() first")


class TensorParallelHandle:
    """A model that computes with a part of its weights.

    Args:
        shards: What this rank holds.
        group: The ranks that hold the rest.
    """

    def __init__(self, shards: TensorShards, group: dist.ProcessGroup) -> None:
        self.shards = shards
        self.group = group
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._parameters: list[tuple[nn.Module, str, nn.Parameter | None]] = []

    def install(self) -> None:
        """Install hooks and local sizes; the caller sees to the weights (``TensorShards.take``)."""
        for entry in self.shards.modules.values():
            for name, value in entry.attributes.items():
                self._attributes.append((entry.module, name, getattr(entry.module, name)))
                setattr(entry.module, name, value)
            hook = self._hook(entry)
            if hook is not None:
                install_hook(entry.module, _HOOK, hook)
            if entry.arguments:
                install_hook(entry.module, _ARGUMENTS_HOOK, LocalArgumentsHook(entry, self.shards.rank))

    def cut_weights(self) -> None:
        """Replace the whole parameters of the model by this rank's part, until ``remove``."""
        for entry in self.shards.modules.values():
            if entry.rule is None:
                continue
            for name, parameter in list(entry.module._parameters.items()):
                if parameter is None:
                    continue
                local = self.shards.take(f"{entry.path}.{name}", parameter.detach())
                self._parameters.append((entry.module, name, parameter))
                entry.module._parameters[name] = (
                    None if local is None else nn.Parameter(local.contiguous(), requires_grad=False)
                )

    def remove(self) -> None:
        """Take everything off again; parameters that ``cut_weights`` replaced come back, bit for bit."""
        for entry in self.shards.modules.values():
            remove_hook(entry.module, _HOOK)
            remove_hook(entry.module, _ARGUMENTS_HOOK)
        for module, name, value in reversed(self._attributes):
            setattr(module, name, value)
        for module, name, parameter in self._parameters:
            module._parameters[name] = parameter
        self._attributes, self._parameters = [], []

    def _hook(self, entry: ShardedModule) -> ModuleHook | None:
        if isinstance(entry.rule, RowParallel):
            return SumOutputHook(self.group)
        if isinstance(entry.rule, GatheredColumn):
            part = self.shards.parts[f"{entry.path}.weight"]
            return GatherOutputHook(runs(part.size, self.shards.degree), self.group)
        if isinstance(entry.rule, NormAcrossRanks):
            part = self.shards.parts[f"{entry.path}.weight"]
            return NormAcrossRanksHook(part.size, self.group)
        return None


class SumOutputHook(ModuleHook):
    """Adds the ranks' outputs up."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
        """Return the sum over the ranks."""
        return all_reduce(forward(*args, **kwargs), group=self.group)


class GatherOutputHook(ModuleHook):
    """Joins the ranks' output channels.

    Args:
        shares: Output channels of each rank.
        group: The ranks.
    """

    def __init__(self, shares: UnitShares, group: dist.ProcessGroup) -> None:
        self.sizes = [count * shares.width for count in shares.counts]
        self.group = group

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
        """Return ``[..., channels]`` from each rank's ``[..., local channels]``."""
        output = forward(*args, **kwargs)
        whole = all_gather(output.movedim(-1, 0), self.sizes, group=self.group)
        return whole.movedim(0, -1).contiguous()


class NormAcrossRanksHook(ModuleHook):
    """Makes an RMSNorm of a rank's channels that of all channels.

    The module's own forward divides by the root mean square of the rank's channels; the quotient of the
    two roots, in fp32, corrects that.

    Args:
        num_channels: Channels of all ranks together.
        group: The ranks.
    """

    def __init__(self, num_channels: int, group: dist.ProcessGroup) -> None:
        self.num_channels = num_channels
        self.group = group

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
        """Return the norm of ``args[0]``, ``[..., local channels]``."""
        (x,) = args
        eps = getattr(module, "eps", None)
        if eps is None:
            eps = torch.finfo(x.dtype).eps  # what torch takes
        # The norm first: a float copy of x would be as large as two of its own.
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()
        local_mean = squares / x.shape[-1]
        mean = all_reduce(squares, group=self.group) / self.num_channels
        output = forward(*args, **kwargs)
        # In place: multiplied in fp32 and rounded once, without an fp32 copy of the output.
        return output.mul_(((local_mean + eps) / (mean + eps)).sqrt())


class LocalArgumentsHook(ModuleHook):
    """Gives a module only this rank's units of some arguments."""

    def __init__(self, entry: ShardedModule, rank: int) -> None:
        self.path = entry.path
        self.rank = rank
        self.actions: list[tuple[LocalArgument, UnitShares, ArgumentSlot]] = []
        for rule, shares in entry.arguments:
            slot = find_slot(signature_of(entry.module), rule.argument)
            if slot is None:
                raise PlanError(f"{entry.path} has no argument {rule.argument!r}, which the plan names")
            self.actions.append((rule, shares, slot))

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call the module with the arguments cut."""
        for rule, shares, slot in self.actions:
            value = slot.read(args, kwargs)
            if value is not None:
                args, kwargs = slot.replace(args, kwargs, self._local(value, rule, shares))
        return forward(*args, **kwargs)

    def _local(self, value: Any, rule: LocalArgument, shares: UnitShares) -> Any:
        if isinstance(value, tuple):
            return (self._local(value[0], rule, shares), *value[1:])
        if value.shape[rule.dim] == 1:
            return value
        width, rest = divmod(value.shape[rule.dim], sum(shares.counts))
        if rest:
            raise PlanError(
                f"{self.path}, argument {rule.argument!r}: {tuple(value.shape)} is not cut by {rule.unit}"
            )
        first = sum(shares.counts[: self.rank]) * width
        return value.narrow(rule.dim, first, shares.counts[self.rank] * width)
