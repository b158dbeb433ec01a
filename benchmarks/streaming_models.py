"""The models that ``streaming.py`` measures, with random weights, and a sampling of each."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen": {
        "image_model": "qwen_image", "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60,
        "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584,
        "axes_dims_rope": (16, 56, 56),
    },
    "flux": {
        "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768,
        "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19,
        "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
        "qkv_bias": True, "guidance_embed": True,
    },
}  # fmt: skip
TINY = {
    "qwen": {"num_layers": 6, "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 40,
             "axes_dims_rope": (4, 6, 6)},
    "flux": {"vec_in_dim": 24, "context_in_dim": 40, "hidden_size": 48, "num_heads": 3, "depth": 2,
             "depth_single_blocks": 4, "axes_dim": [4, 6, 6]},
}  # fmt: skip
CLASSES = {"qwen": "QwenImage", "flux": "Flux"}
DIFFUSERS = {"qwen": "QwenImageTransformer2DModel", "flux": "FluxTransformer2DModel"}

Sampling = Callable[[int], None]
"""Runs that many steps."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What one process measures.

    Attributes:
        model: A key of ``CONFIGS``.
        budgets: Bytes for weights.
        steps: Steps of one measured sampling.
        is_tiny: A toy of the same class, on the CPU.
    """

    model: str
    budgets: tuple[int, ...]
    steps: int
    is_tiny: bool

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device("cpu") if self.is_tiny else torch.device("cuda", 0)

    @property
    def config(self) -> dict[str, Any]:
        """The model's sizes."""
        return CONFIGS[self.model] | (TINY[self.model] if self.is_tiny else {})


class Clock:
    """The ends of steps, none of which is waited for.

    Args:
        device: Where they compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._launched_s: list[float] = []

    def start(self) -> None:
        """Begin anew, now."""
        self._marks, self._launched_s = [], []
        self.mark()

    def mark(self) -> None:
        """Note the end of a step."""
        self._launched_s.append(time.perf_counter())
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds of every step; the device must be done."""
        pairs = itertools.pairwise(self._marks)
        if self._is_cuda:
            return [first.elapsed_time(last) / 1000 for first, last in pairs]
        return [last - first for first, last in pairs]

    def launch_seconds(self) -> list[float]:
        """Return how long the host took to launch every step."""
        return [last - first for first, last in itertools.pairwise(self._launched_s)]


def set_up(way: str, *, is_tiny: bool) -> None:
    """Load the pack and ComfyUI as a server started with this way's options would."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    spec = importlib.util.spec_from_file_location(
        "comfyui_ferry", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["comfyui_ferry"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["comfyui_ferry"])
    from comfy.cli_args import args

    args.cpu = is_tiny
    if way == "comfyui async":
        args.async_offload = 2
    elif way == "comfyui lowvram":
        args.disable_async_offload = True
    if way == "comfyui dynamic":
        import comfy_aimdo.control

        comfy_aimdo.control.init(nvml_pressure=not args.disable_nvml_pressure)
        devices = [(0, int(args.vram_headroom * GIB))]
        if not is_tiny and not comfy_aimdo.control.init_devices(devices):
            raise RuntimeError("comfy-aimdo does not work here")


def fill(module: torch.nn.Module) -> None:
    """Give every weight small random values: one piece of noise serves all."""
    piece = 0.02 * torch.randn(2**22)
    for tensor in (*module.parameters(), *module.buffers()):
        flat = tensor.detach().view(-1)
        for start in range(0, flat.numel(), piece.numel()):
            part = flat[start : start + piece.numel()]
            part.copy_(piece[: part.numel()])


def build(work: Work, *, is_dynamic: bool = False) -> Any:
    """Return a ComfyUI MODEL with random weights on the host."""
    import comfy.memory_management
    import comfy.model_patcher
    import comfy.supported_models
    from comfy.ldm.flux.model import FluxParams

    config = dict(work.config)
    if work.model == "flux" and "txt_ids_dims" in FluxParams.__annotations__:
        config["txt_ids_dims"] = []
    settings = getattr(comfy.supported_models, CLASSES[work.model])(config)
    settings.set_inference_dtype(torch.bfloat16, None)
    base = settings.get_model({}, "")
    fill(base.diffusion_model)
    kind = comfy.model_patcher.ModelPatcher
    if is_dynamic:
        # Only now: with it on, layers have no weights before a file gives them some.
        comfy.memory_management.aimdo_enabled = True
        kind = comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    return kind(base, load_device=work.device, offload_device=torch.device("cpu"))


def comfy_sampling(patcher: Any, work: Work, clock: Clock) -> Sampling:
    """Return a run of the diffusion model at 1024 x 1024 over all steps, called as the sampler calls it."""
    side = 16 if work.is_tiny else 128
    kind: dict[str, Any] = {"device": work.device, "dtype": torch.bfloat16}
    x = torch.randn(1, 16, *((1,) if work.model == "qwen" else ()), side, side, **kind)
    inputs: dict[str, Any] = {}
    if work.model == "qwen":
        context = torch.randn(1, 128, work.config["joint_attention_dim"], **kind)
    else:
        context = torch.randn(1, 512, work.config["context_in_dim"], **kind)
        inputs["y"] = torch.randn(1, work.config["vec_in_dim"], **kind)
        inputs["guidance"] = torch.full((1,), 3.5, **kind)
    base = patcher.model

    def sample(steps: int) -> None:
        sigmas = torch.linspace(1, 0, steps + 1, device=work.device)
        for index in range(steps):
            sigma = sigmas[index : index + 1]
            options = {
                "sample_sigmas": sigmas,
                "sigmas": sigma,
                "cond_or_uncond": [0],
                "uuids": ["prompt"],
            }
            timestep = base.model_sampling.timestep(sigma).float()
            base.diffusion_model(x, timestep, context=context, transformer_options=options, **inputs)
            clock.mark()

    return sample


def diffusers_sampling(work: Work, clock: Clock) -> Sampling:
    """Return the same of diffusers' class under group offloading with streams (always one block a group)."""
    import diffusers

    kind: dict[str, Any] = {"device": work.device, "dtype": torch.bfloat16}
    sizes = {"num_layers": 2} if work.is_tiny else {}
    if work.model == "flux":
        sizes |= {"guidance_embeds": True} | ({"num_single_layers": 2} if work.is_tiny else {})
    with mock.patch.object(torch.nn.Linear, "reset_parameters", lambda self: None):
        torch.set_default_dtype(torch.bfloat16)
        module = getattr(diffusers, DIFFUSERS[work.model])(**sizes).requires_grad_(False).eval()
        torch.set_default_dtype(torch.float32)
    fill(module)
    streams = {} if work.is_tiny else {"use_stream": True, "record_stream": True}
    module.enable_group_offload(
        onload_device=work.device, offload_device=torch.device("cpu"), offload_type="block_level",
        num_blocks_per_group=1, **streams,
    )  # fmt: skip
    side = 4 if work.is_tiny else 64
    x = torch.randn(1, side * side, 64, **kind)
    call: dict[str, Any] = {"return_dict": False}
    if work.model == "qwen":
        call |= {"encoder_hidden_states": torch.randn(1, 128, 3584, **kind),
                 "encoder_hidden_states_mask": None, "img_shapes": [[(1, side, side)]]}  # fmt: skip
    else:
        call |= {"encoder_hidden_states": torch.randn(1, 512, 4096, **kind),
                 "pooled_projections": torch.randn(1, 768, **kind), "guidance": torch.full((1,), 3.5, **kind),
                 "img_ids": torch.zeros(side * side, 3, **kind),
                 "txt_ids": torch.zeros(512, 3, **kind)}  # fmt: skip

    def sample(steps: int) -> None:
        for index in range(steps):
            module(x, timestep=torch.full((1,), 1 - index / steps, **kind), **call)
            clock.mark()

    return sample
