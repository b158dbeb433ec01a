"""A training's whole state as one safetensors file, to go on from bit for bit.

Tensors stand under flat names; everything else, among it the optimizer's own numbers, is JSON in the
header. Nothing is pickled, so a file from elsewhere can hold no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import RequestError, SaveError, TrainingError
from .checkpoint import save_verified
from .config import TrainingConfig
from .trained_weights import WeightsState

_FORMAT = "comfyui_ferry.training_state"
_VERSION = "1"
_TENSOR, _TUPLE, _MAPPING = "$tensor", "$tuple", "$mapping"


@dataclass(frozen=True)
class TrainingState:
    """Where a training stands after an optimizer step.

    Attributes:
        step: Optimizer steps done.
        attempt: Data positions used; more than ``step`` if steps were skipped.
        losses: One for each step.
        weights: The masters with their averages and their optimizer.
        unused: Paths of adapters that were found to have no influence and were left out.
        identity: What has to be the same for the training to go on, in a person's words.
    """

    step: int
    attempt: int
    losses: list[float]
    weights: WeightsState
    unused: list[str]
    identity: dict[str, str] = field(default_factory=dict)


def save_state(path: Path, state: TrainingState) -> None:
    """Write ``state`` to the new file ``path``, whole or not at all.

    Raises:
        SaveError: If it could not be written or does not read back as it is; no file is left then.
    """
    tensors: dict[str, Tensor] = {"losses": torch.tensor(state.losses, dtype=torch.float64)}
    tensors |= {f"parameters/{name}": value for name, value in state.weights.parameters.items()}
    tensors |= {f"averages/{name}": value for name, value in state.weights.averages.items()}
    header = {
        "step": state.step,
        "attempt": state.attempt,
        "unused": state.unused,
        "identity": state.identity,
        "optimizer": _to_json(state.weights.optimizer, "optimizer", tensors),
    }
    kept = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
    metadata = {"format": _FORMAT, "version": _VERSION, "state": json.dumps(header)}

    def verify(written: Path) -> None:
        with safe_open(written, framework="pt") as file:
            found = set(file.keys())
            differing = sorted(found ^ kept.keys())
            differing += [
                name for name in found & kept.keys() if not _same(file.get_tensor(name), kept[name])
            ]
        if differing:
            raise SaveError(f"{written} reads back with other values for {differing[:5]}. Save it again.")

    save_verified(path, kept, metadata=metadata, verify=verify)


def read_state(path: Path) -> TrainingState:
    """Return the state in a file.

    Raises:
        RequestError: If it is not a whole training state of a known version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, f"It cannot be read ({error})") from error
    if (metadata.get("format"), metadata.get("version")) != (_FORMAT, _VERSION):
        raise _unreadable(path, f"Its header does not say {_FORMAT}, version {_VERSION}")
    try:
        header = json.loads(metadata["state"])
        return TrainingState(
            step=int(header["step"]),
            attempt=int(header["attempt"]),
            losses=tensors["losses"].tolist(),
            weights=WeightsState(
                _under("parameters/", tensors),
                _under("averages/", tensors),
                _from_json(header["optimizer"], tensors),
            ),
            unused=[str(path) for path in header["unused"]],
            identity={str(name): str(value) for name, value in header["identity"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(path, f"Something is missing in it ({error!r})") from error


def check_identity(state: TrainingState, expected: Mapping[str, str], *, name: str) -> None:
    """Refuse to go on from a state of another training.

    Args:
        state: What was read.
        expected: The identity of the training that was asked for.
        name: The file's name for the message.

    Raises:
        RequestError: Naming everything that differs, with both values.
    """
    differing = [
        f"{key} was {state.identity.get(key, 'not recorded')} and is {value} now"
        for key, value in expected.items()
        if state.identity.get(key) != value
    ]
    if differing:
        raise RequestError(
            f"resume_from={name!r} was asked",
            limit=f"It is the state of another training: {'; '.join(differing)}",
            way_out="Set these back to what they were, or start a new training with resume_from 'none'",
        )


def check_continues(state: TrainingState, config: TrainingConfig) -> None:
    """Refuse what cannot be gone on with, whatever the model.

    Raises:
        RequestError: If all its steps are done, or an average is asked for that it does not have.
    """
    if state.step >= config.steps:
        raise RequestError(
            f"steps={config.steps} was asked with a training state of step {state.step}",
            limit="'steps' counts all steps, those before the stop too, so nothing is left to do",
            way_out=f"Raise steps above {state.step}",
        )
    if config.ema_decay and not state.weights.averages:
        raise RequestError(
            f"ema_decay={config.ema_decay} was asked with a training state without averages",
            limit="An average has to run from the first step",
            way_out="Set ema_decay to 0, or start a new training",
        )


def _same(first: Tensor, second: Tensor) -> bool:
    # Bytes, so that a NaN is equal to itself.
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _unreadable(path: Path, limit: str) -> RequestError:
    return RequestError(
        f"the training state {path.name!r} was asked for",
        limit=limit,
        way_out="Choose another state; an older one of the same training is not affected",
    )


def _to_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON, its tensors moved into ``tensors`` under names that start with ``name``."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {_MAPPING: [[key, _to_json(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_to_json(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TrainingError(
        f"the optimizer keeps a {type(value).__name__} ({name}), which a training state cannot hold. "
        "Choose another optimizer, or switch the saving of states off."
    )


def _from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        if _TUPLE in value:
            return tuple(_from_json(item, tensors) for item in value[_TUPLE])
        return {key: _from_json(item, tensors) for key, item in value[_MAPPING]}
    return value
