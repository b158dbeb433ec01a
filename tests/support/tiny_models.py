"""Tiny, random models of ComfyUI's own classes, with inputs that reach every part of their plans.

Three heads, so that head shards are uneven on two ranks and empty on four; odd token counts, so that
sequences never divide. Weights are scaled by fan-in: with plain small ones attention would hardly
change the output, and a broken exchange would go unseen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class TinyCase:
    """One model and one call of it.

    Args:
        build: Returns the model (needs ComfyUI).
        inputs: Returns the keyword arguments of one call of its ``_forward``.
        newer_only: Whether 0.3.75 lacks it.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    newer_only: bool = False


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return standard normal values, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def build_flux(*, flux2: bool = False, **changes: Any) -> nn.Module:
    """Return a Flux; FLUX.1-dev by default, FLUX.2-klein with ``flux2``."""
    from comfy.ldm.flux.model import Flux, FluxParams

    flux1: Inputs = {
        "in_channels": 4, "out_channels": 4, "vec_in_dim": 24, "context_in_dim": 40, "mlp_ratio": 4.0,
        "depth_single_blocks": 2, "axes_dim": [4, 6, 6], "theta": 10000, "patch_size": 2, "qkv_bias": True,
        "guidance_embed": True, "txt_ids_dims": [],
    }  # fmt: skip
    klein: Inputs = {
        "in_channels": 8, "out_channels": 8, "vec_in_dim": None, "context_in_dim": 60, "mlp_ratio": 3.0,
        "depth_single_blocks": 3, "axes_dim": [4] * 4, "theta": 2000, "patch_size": 1, "qkv_bias": False,
        "guidance_embed": False, "txt_ids_dims": [3], "ops_bias": False, "global_modulation": True,
        "mlp_silu_act": True, "default_ref_method": "index", "ref_index_scale": 10.0,
    }  # fmt: skip
    config = (klein if flux2 else flux1) | {"hidden_size": 48, "num_heads": 3, "depth": 2} | changes
    known = inspect.signature(FluxParams).parameters
    return finish(Flux, {name: value for name, value in config.items() if name in known})


def build_qwen(**changes: Any) -> nn.Module:
    """Return a Qwen-Image."""
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    config = {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 3, "joint_attention_dim": 40, "axes_dims_rope": (4, 6, 6),
    }  # fmt: skip
    return finish(QwenImageTransformer2DModel, config | changes)


def build_wan(**changes: Any) -> nn.Module:
    """Return a Wan text-to-video."""
    from comfy.ldm.wan.model import WanModel

    config = {
        "model_type": "t2v", "dim": 48, "in_dim": 4, "out_dim": 4, "num_heads": 3, "ffn_dim": 72,
        "num_layers": 2, "patch_size": (1, 2, 2), "freq_dim": 16, "text_dim": 40,
    }  # fmt: skip
    return finish(WanModel, config | changes)


def finish(cls: type[nn.Module], config: Inputs) -> nn.Module:
    """Return ``cls(**config)`` on the CPU in fp32 with random weights."""
    import comfy.ops

    operations = comfy.ops.disable_weight_init
    return randomize(cls(**config, dtype=torch.float32, device="cpu", operations=operations))


@torch.no_grad()
def randomize(model: nn.Module, gain: float = 1.4) -> nn.Module:
    """Fill every weight with fan-in scaled noise and return the model, frozen."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1 and name.endswith(("weight", "scale")):
            parameter.copy_(1 + 0.2 * values)
        elif parameter.ndim == 1:
            parameter.copy_(0.3 * values)
        elif parameter.ndim == 3:  # modulation tables
            parameter.copy_(0.7 * values)
        else:
            parameter.copy_(gain / parameter[0].numel() ** 0.5 * values)
    return model.eval()


def flux_call(*, text: int = 11, batch: int = 1, context: int = 40, **more: Any) -> Inputs:
    """Return a FLUX.1 call: 35 image tokens, padded up from an odd height."""
    inputs = {
        "x": noise(batch, 4, 13, 10), "timestep": torch.full((batch,), 0.7),
        "context": noise(batch, text, context),
        "y": noise(batch, 24), "guidance": torch.full((batch,), 3.5),
    }  # fmt: skip
    return inputs | more


def flux2_call(*, batch: int = 1, **more: Any) -> Inputs:
    """Return a FLUX.2 call: 35 image tokens."""
    inputs = {
        "x": noise(batch, 8, 7, 5),
        "timestep": torch.full((batch,), 0.7),
        "context": noise(batch, 11, 60),
    }
    return inputs | more


def qwen_call(*, text: int = 11, batch: int = 1, **more: Any) -> Inputs:
    """Return a Qwen-Image call: 35 image tokens."""
    inputs = {
        "x": noise(batch, 4, 1, 10, 14), "timesteps": torch.full((batch,), 0.7),
        "context": noise(batch, text, 40),
    }  # fmt: skip
    return inputs | more


def wan_call(*, channels: int = 4, batch: int = 1, **more: Any) -> Inputs:
    """Return a Wan call: 3 frames of 20 tokens, padded up from an odd width."""
    inputs = {
        "x": noise(batch, channels, 3, 10, 7), "timestep": torch.full((batch,), 700.0),
        "context": noise(batch, 11, 40),
    }  # fmt: skip
    return inputs | more


def residuals(count: int, tokens: int, seed: int = 0) -> list[torch.Tensor | None]:
    """Return ControlNet residuals for ``count`` blocks, every second one None."""
    return [noise(1, tokens, 48, seed=seed + index) if index % 2 == 0 else None for index in range(count)]


def _flux_control() -> Inputs:
    return {"input": residuals(2, 35), "output": residuals(2, 35, seed=7)}


def _shift_text(inputs: Inputs) -> Inputs:
    """A ``post_input`` patch that mixes tokens, which is right only on the whole sequence."""
    return inputs | {"txt": inputs["txt"] + inputs["img"].mean(1, keepdim=True)}


def _long_text_mask() -> torch.Tensor:
    """An attention mask [L, L] for 11 text and 35 image tokens, different for every pair."""
    return noise(46, 46, seed=3)


_KONTEXT_REFS = (noise(1, 4, 8, 6), noise(1, 4, 6, 10))
_QWEN_REFS = (noise(1, 4, 1, 8, 6), noise(1, 4, 1, 6, 6))
_NO_VEC: Inputs = {"vec_in_dim": None, "guidance_embed": False, "txt_ids_dims": [1, 2]}
_LONGCAT_SHIFT = {"rope_options": {"shift_t": 1.0, "shift_y": 9.0, "shift_x": 9.0}}
_PADDED_TEXT = torch.cat([torch.ones(2, 7), torch.tensor([[1.0] * 4, [0.0] * 4])], dim=1).long()

FLUX_CASES = {
    "flux1-dev": TinyCase(build_flux, flux_call),
    "flux1-dev batch 2": TinyCase(build_flux, lambda: flux_call(batch=2)),
    "flux1-dev full mask": TinyCase(build_flux, lambda: flux_call(attention_mask=_long_text_mask())),
    "flux1-dev short text": TinyCase(build_flux, lambda: flux_call(text=2)),
    "flux1-kontext control": TinyCase(
        build_flux, lambda: flux_call(ref_latents=list(_KONTEXT_REFS), control=_flux_control())
    ),
    "flux1-dev post_input": TinyCase(
        build_flux, lambda: flux_call(transformer_options={"patches": {"post_input": [_shift_text]}})
    ),
    "longcat-edit": TinyCase(
        lambda: build_flux(context_in_dim=56, **_NO_VEC),
        lambda: flux_call(
            context=56, text=9, ref_latents=[_KONTEXT_REFS[0]], transformer_options=dict(_LONGCAT_SHIFT)
        ),
        newer_only=True,
    ),
    "ovis": TinyCase(
        lambda: build_flux(context_in_dim=32, yak_mlp=True, txt_norm=True, **_NO_VEC),
        lambda: flux_call(context=32, text=9),
        newer_only=True,
    ),
    "flux2-klein": TinyCase(lambda: build_flux(flux2=True), flux2_call),
    "flux2-dev refs": TinyCase(
        lambda: build_flux(flux2=True, guidance_embed=True),
        lambda: flux2_call(guidance=torch.tensor([3.5]), ref_latents=[noise(1, 8, 4, 3)]),
    ),
    "flux2 timestep zero": TinyCase(
        lambda: build_flux(flux2=True),
        lambda: flux2_call(
            batch=2, ref_latents=[noise(2, 8, 4, 3)], ref_latents_method="index_timestep_zero"
        ),
        newer_only=True,
    ),
}

QWEN_CASES = {
    "qwen": TinyCase(build_qwen, qwen_call),
    "qwen text mask, batch 2": TinyCase(build_qwen, lambda: qwen_call(batch=2, attention_mask=_PADDED_TEXT)),
    "qwen short text": TinyCase(build_qwen, lambda: qwen_call(text=2)),
    "qwen edit, control": TinyCase(
        build_qwen, lambda: qwen_call(ref_latents=list(_QWEN_REFS), control={"input": residuals(2, 35)})
    ),
    "qwen edit-2511": TinyCase(
        lambda: build_qwen(default_ref_method="index_timestep_zero"),
        lambda: qwen_call(ref_latents=list(_QWEN_REFS)),
        newer_only=True,
    ),
    "qwen layered": TinyCase(
        lambda: build_qwen(default_ref_method="negative_index", use_additional_t_cond=True),
        lambda: qwen_call(x=noise(1, 4, 3, 8, 6), ref_latents=[_QWEN_REFS[0]]),
        newer_only=True,
    ),
}

WAN_CASES = {
    "wan t2v": TinyCase(build_wan, wan_call),
    "wan t2v batch 2": TinyCase(build_wan, lambda: wan_call(batch=2)),
    "wan i2v": TinyCase(lambda: build_wan(in_dim=9), lambda: wan_call(channels=9)),
    "wan ti2v": TinyCase(build_wan, lambda: wan_call(timestep=torch.tensor([[0.0, 300.0, 700.0]]))),
    "wan2.1 i2v clip": TinyCase(
        lambda: build_wan(model_type="i2v", in_dim=9),
        lambda: wan_call(channels=9, clip_fea=noise(1, 257, 1280)),
    ),
    "wan reference, frame timesteps": TinyCase(
        lambda: build_wan(in_dim_ref_conv=4),
        lambda: wan_call(
            reference_latent=noise(1, 4, 10, 8), timestep=torch.tensor([[0.0, 0.0, 300.0, 700.0]])
        ),
    ),
    "wan time concat": TinyCase(build_wan, lambda: wan_call(time_dim_concat=noise(1, 4, 1, 10, 7))),
    "wan context latents": TinyCase(
        build_wan,
        lambda: wan_call(context_latents=[noise(1, 4, 1, 6, 7)]),
        newer_only=True,
    ),
}

CASES: dict[str, TinyCase] = FLUX_CASES | QWEN_CASES | WAN_CASES


def is_newer_comfyui() -> bool:
    """Return whether the ComfyUI under test has the classes that 0.3.75 lacks."""
    from comfy.ldm.flux.model import FluxParams

    return "txt_ids_dims" in inspect.signature(FluxParams).parameters
