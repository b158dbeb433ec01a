"""What all patchers of one streamed model share: the streamer, and what they tell ComfyUI of it.

It hangs on the ``BaseModel`` itself, so it lives as long as the weights do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..offload import ModelStreamer
from .patch_arithmetic import patched_by_loading
from .stream_patches import PatchValues, weight_changes
from .stream_state import StateHook

_ATTRIBUTE = "ferry_stream"
_IS_PATCHED = "comfy_patched_weights"
_CAST_SETTINGS = ("comfy_cast_weights", "comfy_force_cast_weights")


class ModelStream:
    """What all patchers of one streamed model share.

    Args:
        model: The ``BaseModel``.
        streamer: Its streamer.

    Attributes:
        hook_patches: Combined patches of the weight hooks that are active now.
    """

    def __init__(self, model: Any, streamer: ModelStreamer) -> None:
        self.streamer = streamer
        self.hook_patches: dict[str, list[tuple]] = {}
        self._values = PatchValues(streamer.pool.device)
        self._state_hook: StateHook | None = None
        self._state_handle: Any = None
        self._cast_settings: list[tuple[nn.Module, dict[str, Any]]] = []
        model.__dict__[_ATTRIBUTE] = self

    def most_bytes(self) -> int:
        """Return the most target memory that this model may come to hold."""
        limit = self.streamer.pool.config.vram_limit_bytes
        whole = self.streamer.weight_bytes
        if limit is None:
            return whole
        others = sum(
            member.resident_bytes for member in self.streamer.pool.members if member is not self.streamer
        )
        return min(whole, max(self.streamer.target_bytes, limit - others))

    def loaded_bytes(self) -> int:
        """Return the target memory held now, copies of patch values included."""
        return self.streamer.target_bytes + self._values.nbytes

    def load(self, model: Any, patches: dict, device: torch.device, extra_bytes: float) -> None:
        """Hold as much on the target as there is room for, and bring the patches up to date."""
        streamer = self.streamer
        room = min(max(0.0, self.loaded_bytes() + extra_bytes), 4.0 * streamer.weight_bytes)
        self._values.keep([patches, self.hook_patches], int(max(0.0, room - streamer.least_bytes)) // 4)
        self.send_changes(model, patches)
        streamer.load(int(room) - self._values.nbytes)
        if self._state_hook is None:
            self._state_hook = StateHook(streamer)
            self._state_handle = model.diffusion_model._register_state_dict_hook(self._state_hook)
        model.device = device
        self.publish(model)

    def send_changes(self, model: Any, patches: dict) -> None:
        """Tell the streamer how weights differ from their masters."""
        self.streamer.set_changes(
            weight_changes(
                model,
                patched_by_loading(model, patches),
                self.hook_patches,
                values=self._values,
                master=self.streamer.registered,
            )
        )

    def publish(self, model: Any) -> None:
        """Show ComfyUI the figures that it reads from the model itself."""
        model.model_loaded_weight_memory = self.loaded_bytes()
        model.model_offload_buffer_memory = 0
        model.model_lowvram = False

    def release(self, model: Any, device: torch.device) -> None:
        """Give all target memory back: a plain model on the host, as if it had never been loaded."""
        self.streamer.unload()
        if self._state_hook is not None:
            self._state_handle.remove()
            self._state_hook = self._state_handle = None
        self._values.keep([], 0)
        self.force_cast(model, enabled=False)
        model.current_weight_patches_uuid = None
        model.device = device
        self.publish(model)

    @contextlib.contextmanager
    def plain_state(self, model: Any) -> Iterator[None]:
        """Within it, the diffusion model's state dict is of the tensors that stand in it.

        ComfyUI takes quantized weights from there then: its objects that patch one when it is written hold
        no whole numbers.
        """
        marked = [
            (module, module.__dict__.get(_IS_PATCHED))
            for module in model.modules()
            if is_traceable_wrapper_subclass(module._parameters.get("weight"))
        ]
        if self._state_hook is not None:
            self._state_hook.is_paused = True
        for module, _ in marked:
            module.__dict__[_IS_PATCHED] = True
        try:
            yield
        finally:
            for module, before in marked:
                del module.__dict__[_IS_PATCHED]
                if before is not None:
                    module.__dict__[_IS_PATCHED] = before
            if self._state_hook is not None:
                self._state_hook.is_paused = False

    def force_cast(self, model: Any, *, enabled: bool) -> None:
        """Let every layer compute in its input's dtype (``set_model_compute_dtype``), or no longer."""
        if enabled == bool(self._cast_settings):
            return
        if not enabled:
            for module, before in self._cast_settings:
                for name in _CAST_SETTINGS:
                    module.__dict__.pop(name, None)
                module.__dict__.update(before)
            self._cast_settings = []
            return
        for module in model.modules():
            if hasattr(module, "comfy_cast_weights"):
                before = {name: module.__dict__[name] for name in _CAST_SETTINGS if name in module.__dict__}
                self._cast_settings.append((module, before))
                module.comfy_cast_weights = True  # pyright: ignore[reportAttributeAccessIssue]
                module.comfy_force_cast_weights = True  # pyright: ignore[reportAttributeAccessIssue]


def stream_of(model: Any) -> ModelStream | None:
    """Return the stream of a ``BaseModel``, None if its weights do not stream."""
    return model.__dict__.get(_ATTRIBUTE)


def release_stream(patcher: Any) -> None:
    """Bring a MODEL's weights back to the host, if they stream; it can then be used in other ways."""
    stream = stream_of(patcher.model)
    if stream is not None:
        stream.release(patcher.model, patcher.offload_device)
