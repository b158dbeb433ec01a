"""Everything that an optimizer step changes: the adapters' masters, the optimizer and the average.

What this module does not do: it computes no gradients (``trainer``) and writes no files (``state_file``).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RequestError
from .config import TrainingConfig
from .ema import MovingAverage
from .optimizer import OPTIMIZERS, build_optimizer, check_device
from .schedule import learning_rate_factor


@dataclass(frozen=True)
class WeightsState:
    """A host copy of it all.

    Attributes:
        parameters: fp32 masters by name.
        averages: Their moving averages, empty without.
        optimizer: Its ``state_dict()``.
    """

    parameters: dict[str, Tensor]
    averages: dict[str, Tensor]
    optimizer: dict[str, Any]


class TrainedWeights:
    """The masters with their optimizer.

    Args:
        parameters: By name; they stay where they are.
        config: Optimizer, schedule and average.

    Raises:
        RequestError: If the optimizer cannot work where the parameters are.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainingConfig) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.is_whole = True
        check_device(config.optimizer, next(iter(self.parameters.values())).device)
        self.optimizer = build_optimizer(
            config.optimizer,
            self.parameters.values(),
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
        )
        self._switch(training=True)
        self.average = MovingAverage(self.parameters, decay=config.ema_decay) if config.ema_decay else None

    def update(self, step: int) -> None:
        """Do optimizer step ``step`` (from 0) with the gradients that are there, and drop them.

        ``is_whole`` is False meanwhile, and stays so after an error.
        """
        config = self.config
        factor = learning_rate_factor(
            config.schedule, step, warmup_steps=config.warmup_steps, steps=config.steps
        )
        self.is_whole = False
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        self.optimizer.step()
        self.drop_gradients()
        if self.average is not None:
            self.average.update(step + 1)
        self.is_whole = True

    def later_bytes(self, device: torch.device) -> int:
        """Return the memory on ``device`` that the optimizer will take for state it does not have yet."""
        values = sum(
            parameter.numel()
            for parameter in self.parameters.values()
            if parameter.device.type == device.type and not self.optimizer.state.get(parameter)
        )
        return values * OPTIMIZERS[self.config.optimizer].state_bytes

    def drop_gradients(self) -> None:
        """Forget what was accumulated."""
        self.optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def final(self) -> Iterator[None]:
        """Put the weights that a LoRA is made of in place (averaged, if they are), and take them out again.

        Training is not affected, not even by a rounding.
        """
        if self.average is None and not OPTIMIZERS[self.config.optimizer].averages_weights:
            yield
            return
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            if self.average is not None:
                self.average.apply()
            self._switch(training=False)
            yield
        finally:
            self._switch(training=True)
            self._write(before)

    def state(self) -> WeightsState:
        """Return a copy on the host."""
        averages = self.average.values if self.average is not None else {}
        return WeightsState(
            parameters=_host_copy(self.parameters),
            averages=_host_copy(averages),
            optimizer=_host_copy(self.optimizer.state_dict()),
        )

    def load(self, state: WeightsState) -> None:
        """Continue from a copy that ``check`` accepted; the weight decay is that of the configuration."""
        self._write(state.parameters)
        if self.average is not None:
            self.average.load(state.averages)
        asked = [group["weight_decay"] for group in self.optimizer.param_groups]
        # Its memory is free before the copy takes as much.
        self.optimizer.state.clear()
        # It would go on in the copy's own tensors.
        self.optimizer.load_state_dict(_host_copy(state.optimizer))
        for group, weight_decay in zip(self.optimizer.param_groups, asked, strict=True):
            group["weight_decay"] = weight_decay
        self.is_whole = True

    def check(self, state: WeightsState) -> None:
        """Refuse a copy of other weights.

        Raises:
            RequestError: Naming some that differ.
        """
        expected = {name: tuple(value.shape) for name, value in self.parameters.items()}
        found = {name: tuple(value.shape) for name, value in state.parameters.items()}
        if self.average is not None:
            found = {name: shape for name, shape in found.items() if name in state.averages}
        names = sorted(expected.keys() | found.keys())
        differing = [name for name in names if expected.get(name) != found.get(name)]
        if differing:
            raise RequestError(
                f"a training state with {len(found)} tensors was given",
                limit=f"This training has {len(expected)}; they differ in {differing[:3]}",
                way_out="Choose a state of this training",
            )
        self._check_optimizer(state.optimizer)

    def _check_optimizer(self, state: Mapping[str, Any]) -> None:
        expected, found = self.optimizer.state_dict()["param_groups"], state.get("param_groups", [])
        missing = [
            sorted(new.keys() - old.keys())
            for new, old in zip(expected, found, strict=False)
            if new["params"] != old.get("params") or new.keys() - old.keys()
        ]
        if len(expected) != len(found) or missing:
            raise RequestError(
                f"a training state of another version of {type(self.optimizer).__name__} was given",
                limit=f"Its optimizer's part does not fit this one; what it lacks: {missing[:1]}",
                way_out="Install the version that wrote it, or start a new training",
            )

    def _write(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])

    def _switch(self, *, training: bool) -> None:
        """Switch an optimizer that averages between the weights it trains and their average."""
        if OPTIMIZERS[self.config.optimizer].averages_weights:
            optimizer: Any = self.optimizer
            optimizer.train() if training else optimizer.eval()


def _host_copy(value: Any) -> Any:
    """Return a deep copy with its tensors on the host."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: _host_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_host_copy(item) for item in value)
    return copy.copy(value)
