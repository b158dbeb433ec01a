"""An ordinary MODEL whose weights stream: a ``ModelPatcher`` that ComfyUI counts but never moves.

All clones of a streamed MODEL share one ``ModelStream``, which hangs on the ``BaseModel`` itself. If a
model has none (a copy made by ``clone(force_deepcopy=True)``), the patcher is a plain one.
"""

from __future__ import annotations

from typing import Any

import comfy.model_patcher
import torch
from comfy.patcher_extension import CallbacksMP
from torch import nn

from ..errors import RequestError
from ..offload import PackedWeight
from .model_stream import ModelStream, stream_of
from .patch_arithmetic import patched_by_loading
from .stream_patches import PatchValues, weight_changes
from .stream_state import state_pieces


class StreamedPatcher(comfy.model_patcher.ModelPatcher):
    """A ``ModelPatcher`` whose weights are moved by a ``ModelStream``."""

    @property
    def stream(self) -> ModelStream | None:
        """What this patcher shares with its clones."""
        return stream_of(self.model)

    def is_dynamic(self) -> bool:
        """Tell ComfyUI that this patcher has no dynamic VRAM."""
        return False

    def model_size(self) -> int:
        """Return the most target memory that the weights may take: the budget, or all of them."""
        return super().model_size() if self.stream is None else self.stream.most_bytes()

    def loaded_size(self) -> int:
        """Return the target memory that they take now."""
        return super().loaded_size() if self.stream is None else self.stream.loaded_bytes()

    def get_ram_usage(self) -> int:
        """Return the host memory of the weights (0.3.75 asks for its cache)."""
        return super().model_size() if self.stream is None else self.stream.streamer.stats().host_bytes

    def partially_load(
        self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Take ``extra_memory`` more bytes; called by ComfyUI before every sampling.

        Returns:
            How many bytes more are held now.

        Raises:
            RequestError: If the MODEL carries something that a streamed model cannot honour.
        """
        stream = self.stream
        if stream is None:
            return super().partially_load(device_to, extra_memory, force_patch_weights)
        self._check(force_patch_weights)
        before = stream.loaded_bytes()
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            super().unpatch_model(None, unpatch_weights=False)
            self.patch_model(load_weights=False)
            for value in self.object_patches.values():
                if isinstance(value, nn.Module):
                    value.to(device_to)
            stream.force_cast(self.model, enabled=self.force_cast_weights)
            self._load(device_to, extra_memory, force_patch_weights)
        return stream.loaded_bytes() - before

    def partially_unload(
        self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Give resident blocks up and return the bytes that this freed."""
        stream = self.stream
        if stream is None:
            return super().partially_unload(device_to, memory_to_free, force_patch_weights)
        freed = stream.streamer.shrink(int(min(memory_to_free, stream.loaded_bytes())))
        stream.publish(self.model)
        return freed

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        """Load at most ``lowvram_model_memory`` bytes (0: no limit but the budget)."""
        if self.stream is None:
            super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)
            return
        self._check(force_patch_weights)
        room = float("inf") if full_load or not lowvram_model_memory else lowvram_model_memory
        self._load(device_to, room - self.stream.loaded_bytes(), force_patch_weights)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Undo object patches; with ``unpatch_weights`` bring the weights back to the host as well."""
        stream = self.stream
        if stream is None:
            super().unpatch_model(device_to, unpatch_weights)
            return
        super().unpatch_model(None, unpatch_weights=False)
        if unpatch_weights:
            self.unpatch_hooks()
            stream.release(self.model, self.offload_device)

    def patch_hooks(self, hooks: Any) -> None:
        """Change the weights as the hooks of a conditioning ask (Create Hook LoRA, keyframes)."""
        stream = self.stream
        if stream is None:
            super().patch_hooks(hooks)
            return
        combined = {} if hooks is None else self.get_combined_hook_patches(hooks)
        if combined or stream.hook_patches:
            stream.hook_patches = combined
            stream.send_changes(self.model, self.patches)
        self.current_hooks = hooks

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        """Undo what hooks changed."""
        if self.stream is None:
            super().unpatch_hooks(whitelist_keys_set)
        else:
            self.patch_hooks(None)

    def model_state_dict(self, filter_prefix: str | None = None) -> dict[str, Any]:
        """Return the unpatched weights on the host, whatever is loaded now."""
        state = super().model_state_dict(filter_prefix)
        if self.stream is not None:
            masters = {key: self.stream.streamer.registered(key) for key in state}
            state.update({key: tensor for key, tensor in masters.items() if tensor is not None})
        return state

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, list]:
        """Return weights and patches for a merge; the weights are the unpatched ones on the host."""
        result = super().get_key_patches(filter_prefix)
        if self.stream is not None:
            for key, entries in result.items():
                master = self.stream.streamer.registered(key)
                if master is not None:
                    entries[0] = (master, entries[0][1])
        return result

    def patch_weight_to_device(
        self,
        key: str,
        device_to: Any = None,
        inplace_update: bool = False,
        return_weight: bool = False,
        force_cast: bool = False,
    ) -> Any:
        """Return one patched weight, for saving.

        Raises:
            RequestError: If a streamed weight was to be patched for good.
        """
        stream = self.stream
        if stream is None:
            options = {"return_weight": True, "force_cast": force_cast} if return_weight else {}
            return super().patch_weight_to_device(key, device_to, inplace_update, **options)
        if not return_weight:
            raise RequestError(
                f"patching {key} of a streamed MODEL for good was asked",
                limit="A streamed weight is patched on its way to the GPU, and stays as it was on the host",
                way_out="Connect the node that asks for it before Offload Model",
            )
        master = stream.streamer.registered(key)
        if master is None:
            return comfy.model_patcher.get_key_weight(self.model, key)[0]
        changes = weight_changes(
            self.model, self.patches, {}, values=PatchValues(torch.device("cpu")), master=lambda _: master
        )
        weight = master if device_to is None else master.to(device_to)
        return changes[key].apply(weight) if key in changes else weight

    def model_state_dict_for_saving(self, model: Any = None, prefix: str = "") -> dict[str, Any]:
        """Return the patched weights (newer ComfyUI): most of them are patched when they are written.

        Raises:
            RequestError: If weights are in GGUF's blocks.
        """
        self._check_saving()
        saved = super().model_state_dict_for_saving  # pyright: ignore[reportAttributeAccessIssue]
        stream = self.stream
        if stream is None:
            return saved(model, prefix)
        with stream.plain_state(self.model):
            state = saved(model, prefix)
        for key in patched_by_loading(self.model, self.patches):
            name = key.removeprefix(prefix)
            # These stand in the state as they do in the model.
            if key.startswith(prefix) and type(state.get(name)) in (torch.Tensor, nn.Parameter):
                weight = self.patch_weight_to_device(key, self.load_device, return_weight=True)
                pieces = state_pieces(name, weight) or {name: weight}
                state.update({piece: tensor.cpu() for piece, tensor in pieces.items()})
        return state

    def pin_weight_to_device(self, key: str) -> None:
        """Do nothing: the arena is pinned as a whole."""
        if self.stream is None:
            super().pin_weight_to_device(key)

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """Return a MODEL of the same weights; newer ComfyUI's ``force_deepcopy`` loads them anew, plain.

        Raises:
            RequestError: If a plain copy was asked of a MODEL that no stock loader made.
        """
        can_reload = self.stream is None or getattr(self, "cached_patcher_init", None) is not None
        if kwargs.get("force_deepcopy") and not can_reload:
            raise RequestError(
                "a plain copy of a streamed MODEL was asked (the stock Train LoRA makes one)",
                limit="Its file was not read by a loader that could read it again",
                way_out="Use Train LoRA (Offload), or Offload Model behind a stock loader",
            )
        return super().clone(*args, **kwargs)

    def deepclone_multigpu(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse ComfyUI's MultiGPU split.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            "a MultiGPU copy of a streamed MODEL was asked",
            limit="Its copies would not stream",
            way_out="Remove the MultiGPU node, or use Parallel Model",
        )

    def _load(self, device_to: Any, extra_bytes: float, force_patch_weights: bool) -> None:
        stream = self.stream
        assert stream is not None
        # Hooks of a sampling that ended badly, maybe of another clone.
        stream.hook_patches, self.current_hooks = {}, None
        try:
            stream.load(self.model, self.patches, device_to, extra_bytes)
        except BaseException:
            stream.release(self.model, self.offload_device)
            raise
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
            room = stream.loaded_bytes()
            callback(self, device_to, room, force_patch_weights, room >= stream.streamer.weight_bytes)
        # Nodes that swap blocks themselves move some of them then.
        stream.streamer.bring_back()
        self.apply_hooks(self.forced_hooks, force_apply=True)

    def _check(self, force_patch_weights: bool) -> None:
        if self.weight_wrapper_patches:
            raise RequestError(
                f"a node wrapped weights of a streamed MODEL: {sorted(self.weight_wrapper_patches)[:5]}",
                limit="Wrapped weights (the stock Train LoRA makes them) must stay where they are",
                way_out="Use Train LoRA (Offload), or connect that node before Offload Model",
            )
        if self.model_options.get("torch_compile_kwargs"):
            raise RequestError(
                "torch.compile of a streamed MODEL was asked",
                limit="A compiled model keeps the weights that it was compiled with",
                way_out="Remove the compile node, or load the model with a stock loader",
            )
        if force_patch_weights:
            self._check_saving()
        saves_lazily = hasattr(comfy.model_patcher.ModelPatcher, "model_state_dict_for_saving")
        if force_patch_weights and self.patches and not saves_lazily:
            raise RequestError(
                "saving a streamed MODEL with patches was asked",
                limit="In this ComfyUI version a saved MODEL must hold its patched weights",
                way_out="Connect the saving node before Offload Model",
            )

    def _check_saving(self) -> None:
        if any(isinstance(weight, PackedWeight) for weight in self.model.parameters()):
            raise RequestError(
                "saving a MODEL of a GGUF file was asked",
                limit="Its weights are in GGUF's blocks, which ComfyUI's files do not hold",
                way_out="Save a MODEL that was loaded from a safetensors file",
            )
