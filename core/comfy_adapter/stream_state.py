"""The weights of a streamed diffusion model for those who ask it for its ``state_dict`` while it is loaded.

A Control-LoRA (``comfy.controlnet.ControlLora``) computes with weights of the model that it controls, and
takes them from there when a sampling begins. A model that ComfyUI has loaded gives them patched and on its
device; a streamed one has unpatched bytes on the host. So each weight that is read there is made what a
layer would compute with.

What this module does not do: the state dict of the whole ``BaseModel``, from which names are read, stays
what it is; so does that of the diffusion model while it is saved, for which weights are patched one by one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ..offload import ModelStreamer

_PREFIX = "diffusion_model."


class RunningState(OrderedDict[str, Any]):
    """A state dict whose weights are read one by one, as the model computes with them.

    Args:
        state: The host's weights.
        read: Returns one of them as it runs, by name; None if it is not streamed.
    """

    def __init__(self, state: dict[str, Any], read: Callable[[str], torch.Tensor | None]) -> None:
        super().__init__(state)
        self._read = read

    @override
    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        running = self._read(name)
        if running is None:
            # What a quantized weight is made of besides its values: weight_scale beside weight.
            owner = next((name[:end] for end in _word_ends(name) if name[:end] in self), None)
            running = self._read(owner) if owner is not None else None
            return value if running is None else state_pieces(owner, running).get(name, value)
        return state_pieces(name, running).get(name, running)


def _word_ends(name: str) -> list[int]:
    """Return where words of a name's last part end that are not its end."""
    return [index for index in range(name.rfind(".") + 2, len(name)) if name[index] == "_"]


def state_pieces(name: str | None, running: Any) -> dict[str, torch.Tensor]:
    """Return the plain tensors of a quantized weight by the names that a state dict gives them."""
    make = getattr(running, "state_dict", None)
    return {} if make is None else make(name)


class StateHook:
    """Makes the state dict of a diffusion model one of running weights; a copy of the model has none.

    Args:
        streamer: The model's streamer.

    Attributes:
        is_paused: Whether it leaves state dicts as they are, for somebody who patches by himself.
    """

    def __init__(self, streamer: ModelStreamer) -> None:
        self.is_paused = False
        self._streamer = weakref.ref(streamer)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> Any:
        """Return what ``module.state_dict()`` returns; None leaves it as it is."""
        streamer = self._streamer()
        if streamer is None or prefix or self.is_paused:
            return None
        return RunningState(state, lambda name: streamer.running(_PREFIX + name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a hook that does nothing."""
        return _leave


def _leave(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    pass
