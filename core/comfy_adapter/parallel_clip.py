"""Turn a CLIP into one whose large text encoders have their weights shared by several GPUs.

The result is an ordinary CLIP: tokens, weights of words, pooling and LoRA loaders work as before. Only the
transformers that have a tensor plan (T5-XXL, Qwen2.5-VL and the like) run in the workers; smaller ones, as
CLIP-L, and the table of token embeddings stay on the host and are computed there.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import RequestError
from ..parallel import ParallelDims, dotted_path, largest_rank_bytes, validate_model
from ..plans import TEXT_ENCODER_PLANS, find_text_encoder_plan
from .devices import check_gpus, worker_devices
from .encoder_export import describe_encoder
from .nested import map_tensors
from .patch_messages import encode_patches
from .remote_patcher import RemotePatcher
from .worker_groups import acquire_group, check_room, load_part, model_token
from .worker_memory import worker_memory
from .worker_parts import WorkerPart

_KEY = "ferry_parallel_clip"
# What ComfyUI calls on a transformer; pictures of a prompt go through the second.
_METHODS = ("forward", "preprocess_embed")


def make_parallel_clip(clip: Any, *, gpus: int) -> Any:
    """Return a clone of ``clip`` that encodes on ``gpus`` worker processes; starts none yet.

    Args:
        clip: A ``comfy.sd.CLIP``.
        gpus: Number of GPUs, one process each; each holds its part of the weights.

    Raises:
        RequestError: If no text encoder of it has a plan, one cannot be shared by so many, or its weights
            are of a kind that workers cannot hold.
    """
    check_gpus(gpus)
    devices = worker_devices(gpus)
    if isinstance(clip.patcher, TextPatcher):
        raise RequestError(
            "a CLIP that is parallel already was given",
            limit="One CLIP has one number of GPUs",
            way_out="Keep one Parallel Text Encoder in the chain",
        )
    parts = _encoder_parts(clip.cond_stage_model, gpus)
    parallel = clip.clone()
    patcher = parallel.patcher
    patcher.__class__ = TextPatcher
    patcher.attachments[_KEY] = TextRun(parts, devices, patcher.load_device)
    patcher.load_device = patcher.offload_device = torch.device("cpu")
    encode_patches(patcher.run.remote_patches(patcher.patches), prefix="")
    parallel.cond_stage_model = RemoteStage(clip.cond_stage_model, patcher.run)
    return parallel


class TextRun:
    """What one parallel CLIP and its clones share.

    Args:
        parts: The transformers for the workers, by path in the CLIP's model.
        devices: Of the workers.
        gpu: Where ComfyUI counts the workers' weights.
    """

    def __init__(self, parts: Mapping[str, WorkerPart], devices: tuple[str, ...], gpu: torch.device) -> None:
        self.parts = parts
        self.devices = devices
        self.load_device, self.offload_device = gpu, torch.device("cpu")

    def remote_patches(self, patches: Mapping[str, Any]) -> dict[str, Any]:
        """Return those patches that are of weights in the workers.

        Raises:
            RequestError: If a patch is of token embeddings, which are looked up in this process.
        """
        prefixes = tuple(part.patch_prefix for part in self.parts.values())
        for part in self.parts.values():
            transformer: Any = part.module
            table = transformer.get_input_embeddings()
            for name, module in transformer.named_modules(prefix=part.patch_prefix.removesuffix(".")):
                if module is table and f"{name}.weight" in patches:
                    raise RequestError(
                        f"a parallel CLIP with a patch of {name}.weight was asked",
                        limit="Token embeddings are looked up before the workers see a prompt",
                        way_out="Leave the embeddings out of the LoRA, or encode on one GPU",
                    )
        return {name: entries for name, entries in patches.items() if name.startswith(prefixes)}

    def load(self, patches: Mapping[str, Any], patches_uuid: Any, *, force_cast: bool) -> None:
        """Start the workers if need be and give them the transformers with these patches."""
        needs = {path: check_room(part, self.devices) for path, part in self.parts.items()}
        group = acquire_group(self.devices, parts=list(self.parts.values()))
        for path, part in self.parts.items():
            mine = {name: each for name, each in patches.items() if name.startswith(part.patch_prefix)}
            load_part(group, part, mine, patches_uuid, force_cast=force_cast, needs=needs[path])

    def call(self, part: WorkerPart, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a method of a transformer on all workers and return its result."""
        arguments = {"method": method, "args": args, "kwargs": kwargs}
        arguments = map_tensors(arguments, lambda tensor: tensor.cpu())
        try:
            return acquire_group(self.devices).call(model_token(part.owner), arguments)[0]
        except TypeError as error:
            raise RequestError(
                f"a prompt holds a value that cannot be sent to the workers: {error}",
                limit="Workers receive tensors, numbers, text and lists or dictionaries of them",
                way_out="Encode this prompt with the CLIP before Parallel Text Encoder",
            ) from error

    @contextlib.contextmanager
    def remote(self) -> Iterator[None]:
        """Send the transformers' calls to the workers meanwhile."""
        placed: list[tuple[nn.Module, str]] = []
        try:
            for part in self.parts.values():
                for method in _METHODS:
                    if hasattr(part.module, method):
                        part.module.__dict__[method] = self._sender(part, method)
                        placed.append((part.module, method))
            yield
        finally:
            for module, method in placed:
                del module.__dict__[method]

    def _sender(self, part: WorkerPart, method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.call(part, method, args, kwargs)


class RemoteStage:
    """Stands for a CLIP's ``cond_stage_model``: the same model, but its encoding uses the workers."""

    def __init__(self, stage: Any, run: TextRun) -> None:
        self._stage = stage
        self._run = run

    def encode_token_weights(self, tokens: Any) -> Any:
        """Return what the model returns for these tokens."""
        with self._run.remote():
            return self._stage.encode_token_weights(tokens)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to write text, which needs a cache that workers do not keep."""
        raise RequestError(
            "writing text with a parallel CLIP was asked",
            limit="Workers encode prompts only",
            way_out="Connect the CLIP from before Parallel Text Encoder",
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class TextPatcher(RemotePatcher):
    """A ``ModelPatcher`` of a CLIP whose large transformers live in the workers; the rest is on the host."""

    @property
    def run(self) -> TextRun:
        """What this patcher shares with its clones."""
        return self.attachments[_KEY]

    def get_nested_additional_models(self) -> list:
        """Return what ComfyUI loads together with this; the workers' copies are among them."""
        entries = [worker_memory(part, self.run) for part in self.run.parts.values()]
        return [*super().get_nested_additional_models(), *entries]

    def partially_load(
        self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Load the workers, and patch what stays on the host; called by ComfyUI before every encoding."""
        if force_patch_weights:
            raise RequestError(
                "saving a parallel CLIP was asked",
                limit="Its patched weights live in the workers",
                way_out="Connect the saving node before Parallel Text Encoder",
            )
        base = super()
        base.unpatch_model(torch.device("cpu"), unpatch_weights=True)
        remote = self.run.remote_patches(self.patches)
        self.run.load(remote, self.patches_uuid, force_cast=self.force_cast_weights)
        base.patch_model(load_weights=False)
        local = self.patches.keys() - remote.keys()
        for name in local:
            self.patch_weight_to_device(name, torch.device("cpu"))
        # A value that no patcher has, so that whichever loads the model next takes these off first.
        self.model.current_weight_patches_uuid = uuid.uuid4() if local else None
        return 0

    def patch_hooks(self, hooks: Any) -> None:
        """Refuse prompts that bring their own weights (LoRA hooks)."""
        if hooks is not None:
            raise RequestError(
                "a parallel CLIP with hooked weights (Create Hook LoRA) was given",
                limit="Workers keep one set of weights",
                way_out="Apply the LoRA to the CLIP, or use the CLIP from before Parallel Text Encoder",
            )
        super().patch_hooks(hooks)


def _encoder_parts(stage: nn.Module, gpus: int) -> dict[str, WorkerPart]:
    """Return the transformers of a CLIP's model that have a plan, by path."""
    planned = {plan.class_path for plan in TEXT_ENCODER_PLANS}
    dims, parts = ParallelDims(tp=gpus), {}
    for path, module in stage.named_modules():
        if dotted_path(module) not in planned:
            continue
        plan = find_text_encoder_plan(dotted_path(module))
        prefix = f"{path}."
        validate_model(plan, module, dims)
        description = describe_encoder(module, plan, gpus=gpus, patch_prefix=prefix)
        parts[path] = WorkerPart(
            owner=module,
            module=module,
            kind="encoder",
            dims=dims,
            describe=lambda description=description: description,
            num_bytes=largest_rank_bytes(module, plan, gpus),
            patch_prefix=prefix,
        )
    if not parts:
        find_text_encoder_plan(dotted_path(stage))  # raises, naming those that have one
    return parts
