"""Sample tiny MODELs with ComfyUI's own KSampler code, in this process or on workers."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS

# fp32: the same arithmetic runs, but attention over shards of heads adds in another order (1e-6 is seen).
TOLERANCE = 1e-5
CFG_2 = {"gpus": 2, "cfg_degree": 2, "ulysses_degree": 1}
ULYSSES_2 = {"gpus": 2, "cfg_degree": 1, "ulysses_degree": 2}


def prompts(kind: str, positive: dict | None = None, negative: dict | None = None) -> dict[str, list]:
    """Return a positive and a negative prompt of different lengths, with more options each."""
    family = PATCHERS[kind]
    return {
        "positive": [[entry, options | (positive or {})] for entry, options in family.caption(1, 11)],
        "negative": [[entry, options | (negative or {})] for entry, options in family.caption(2, 5)],
    }


def sample(
    model: Any,
    kind: str,
    *,
    conditioning: dict[str, list] | None = None,
    latent: dict | None = None,
    steps: int = 3,
    denoise: float = 1.0,
    cfg: float = 3.0,
    sampler: str = "euler",
) -> torch.Tensor:
    """Return the latent that KSampler makes."""
    import nodes

    chosen = conditioning or prompts(kind)
    image = latent or {"samples": torch.zeros_like(PATCHERS[kind].latent()["samples"])}
    with torch.inference_mode():
        return nodes.common_ksampler(
            model, 5, steps, cfg, sampler, "simple", chosen["positive"], chosen["negative"], image,
            denoise=denoise,
        )[0]["samples"]  # fmt: skip


def guide_by_two(model: Any, kind: str) -> torch.Tensor:
    """Return a latent guided by three prompts of different lengths (DualCFGGuider)."""
    import comfy.samplers
    import comfy_extras.nodes_custom_sampler as custom

    family = PATCHERS[kind]
    guider = custom.Guider_DualCFG(model)
    guider.set_conds(family.caption(1, 11), family.caption(2, 5), family.caption(3, 8))
    guider.set_cfg(2.0, 3.0)
    start = family.latent(4)["samples"]
    with torch.inference_mode():
        return guider.sample(
            start, torch.zeros_like(start), comfy.samplers.sampler_object("euler"),
            torch.tensor([1.0, 0.6, 0.2, 0.0]), seed=4,
        )  # fmt: skip


def parallel(model: Any, degrees: dict[str, int]) -> Any:
    """Return the parallel MODEL."""
    from comfyui_ferry.core.comfy_adapter import make_parallel

    return make_parallel(model, **degrees)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the greatest difference relative to the greatest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


def with_lora(model: Any, strength: float = 1.0, *, everywhere: bool = False) -> Any:
    """Return the MODEL with a LoRA on every Linear of its first block, or of all of them."""
    import comfy.sd

    state: dict[str, torch.Tensor] = {}
    for name, weight in model.model.diffusion_model.state_dict().items():
        chosen = ".0." in name or (everywhere and "blocks." in name)
        if chosen and name.endswith(".weight") and weight.ndim == 2:
            base = f"diffusion_model.{name.removesuffix('.weight')}"
            state[f"{base}.lora_up.weight"] = 0.1 * noise(weight.shape[0], 4)
            state[f"{base}.lora_down.weight"] = 0.1 * noise(4, weight.shape[1], seed=1)
    return comfy.sd.load_lora_for_models(model, None, state, strength, 0)[0]


def worker_processes() -> list[int]:
    """Return the process ids of this process' workers, each of which leads a session."""
    children = (child.pid for child in psutil.Process().children(recursive=True))
    return [pid for pid in children if os.getsid(pid) == pid]
