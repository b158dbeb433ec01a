"""The diffusion model of one helper in a data-parallel training: filled, prepared, and differentiated.

Its weights are the parent's, in memory that both map; the adapters are its own and are overwritten with
the parent's before every step. What this module does not do: it steps no optimizer and saves nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import TrainingError
from ..offload import SharedMasters
from ..training import LOSSES, LoraConfig, OffloadSettings, Trouble, find_layer, seed_torch
from . import packed_weights, quantized
from .empty_model import build_empty_model
from .nested import map_tensors
from .prepared_model import prepared_network
from .trainable_model import in_training


class TrainingWorker:
    """One helper's model.

    Args:
        message: Of ``training_helpers.describe_training``.
        device: Where it computes.
    """

    def __init__(self, message: Mapping[str, Any], *, device: torch.device) -> None:
        self.device = device
        self.loss = LOSSES[message["loss"]]
        self.module = build_empty_model(message["description"])
        _fill(self.module, message)
        for path, attributes in message["casting"].items():
            vars(self.module.get_submodule(path)).update(attributes)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(in_training())
        network = prepared_network(
            self.module,
            LoraConfig(**message["lora"]),
            OffloadSettings(**message["offload"]),
            seed=message["seed"],
            device=device,
            gradient_checkpointing=message["gradient_checkpointing"],
            shared=SharedMasters.open(message["masters"]),
        )
        self.network = self._stack.enter_context(network)
        self.network.rewriting.install()
        self.parameters = self.network.adapters.named_parameters()

    def set_weights(self, names: Sequence[str], weights: Tensor) -> None:
        """Give the adapters' parameters ``names`` the values ``weights``, all of them in one row."""
        sizes = [self.parameters[name].numel() for name in names]
        with torch.no_grad():
            for name, piece in zip(names, weights.split(sizes), strict=True):
                parameter = self.parameters[name]
                parameter.copy_(piece.view_as(parameter))
                parameter.grad = None

    def share(
        self, names: Sequence[str], micro_steps: Sequence[Sequence[dict[str, Any]]], *, divisor: int
    ) -> dict[str, Any]:
        """Return this helper's losses and, from the first helper, the sum of all helpers' gradients.

        All helpers must call it together. One that fails says so to the others before it raises, so that
        none waits for a sum that never comes.

        Args:
            names: The parameters whose gradients are wanted.
            micro_steps: The calls of each, see ``micro_step_calls``.
            divisor: Samples of a whole step.
        """
        try:
            losses, trouble = self.network.run_passes(lambda: self._passes(micro_steps, divisor))
        except BaseException:
            self._all_well(False)
            raise
        reply: dict[str, Any] = {"losses": losses, "trouble": None if trouble is None else vars(trouble)}
        if self._all_well(trouble is None):
            gradients = self._summed(names)
            if dist.get_rank() == 0:
                reply["gradients"] = gradients
        return reply

    def _passes(
        self, micro_steps: Sequence[Sequence[dict[str, Any]]], divisor: int
    ) -> tuple[list[float], Trouble | None]:
        losses: list[float] = []
        trouble: Trouble | None = None
        for calls in micro_steps:
            loss, trouble = self._micro_step(calls, divisor)
            losses.append(loss)
            if trouble is not None:
                break
        return losses, trouble

    def _micro_step(self, calls: Sequence[dict[str, Any]], divisor: int) -> tuple[float, Trouble | None]:
        total = 0.0
        manager = self.network.manager
        assert manager is not None
        for call in calls:
            call = map_tensors(call, lambda tensor: tensor.to(self.device))
            loss = self._loss(call, divisor)
            value = float(loss.detach())
            if not math.isfinite(value):
                del loss
                manager.after_backward()
                layer = find_layer(self.module, lambda call=call: self._loss(call, divisor))
                return total, Trouble("the loss", layer)
            loss.backward()
            manager.after_backward()
            total += value
        return total, None

    def _loss(self, call: Mapping[str, Any], divisor: int) -> Tensor:
        seed_torch(call["random"], self.device)
        output = self.module(*call["args"], **call["kwargs"])
        if not isinstance(output, Tensor) or output.shape != call["target"].shape:
            raise TrainingError(
                f"{type(self.module).__name__} gives no output of the latent's shape, so other GPUs cannot "
                "help to train it. Set gpus to 1."
            )
        error = output.float() - call["target"]
        losses = self.loss(error, torch.zeros_like(error)).flatten(1).mean(dim=1)
        return (losses * call["weight"]).sum() / divisor

    def _all_well(self, well: bool) -> bool:
        """Return whether every helper is."""
        failures = torch.tensor([0.0 if well else 1.0], device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(failures)
        return float(failures) == 0.0

    def _summed(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the sum of all helpers' gradients in one row, and how many helpers had each."""
        chosen = [self.parameters[name] for name in names]
        rows = [
            torch.zeros_like(p).view(-1) if p.grad is None else p.grad.detach().reshape(-1) for p in chosen
        ]
        had = torch.tensor([float(p.grad is not None) for p in chosen])
        row = torch.cat([*(row.to(self.device, torch.float32) for row in rows), had.to(self.device)])
        if dist.get_world_size() > 1:
            dist.reduce(row, dst=0)
        row = row.cpu()
        return {"row": row[: -len(chosen)], "had": row[-len(chosen) :]}


def _fill(module: nn.Module, message: Mapping[str, Any]) -> None:
    """Give the model parameters of the right kind, whose memory nobody touches, and the parent's buffers."""
    stand_ins = {
        place: torch.empty(shape, dtype=dtype) for place, (shape, dtype) in message["parameters"].items()
    }
    tensors = {name: stand_ins[place] for name, place in message["names"].items()}
    if "quantized" in message["description"]:
        tensors = quantized.restore_layers(module, message["description"]["quantized"], tensors)
    tensors = packed_weights.join(message["description"].get("packed", {}), tensors)
    made: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if id(tensor) not in made:
            kept = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            made[id(tensor)] = kept
        module.get_submodule(path)._parameters[last] = made[id(tensor)]
    for name, tensor in message["buffers"].items():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._buffers[last] = tensor
