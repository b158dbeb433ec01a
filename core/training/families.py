"""Training defaults by model family: data only, recognised as the parallel plans are, by class path.

One class may run several families (``Flux`` runs FLUX.1, FLUX.2, LongCat-Image and Ovis-Image), so an
entry may also name values of the network's configuration; the first entry that fits counts.

Sources: the recommended settings in the documentation of kohya-ss/sd-scripts and kohya-ss/musubi-tuner
(docs/flux_train_network.md, qwen_image.md, zimage.md, wan.md), DiffSynth-Studio's flow-match templates,
and the papers named below. Where those disagree the entry says what was chosen. Learning rates belong
to ``alpha == rank``. No entry comes from runs of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FLUX = "comfy.ldm.flux.model.Flux"
_WAN = "comfy.ldm.wan.model.WanModel"


@dataclass(frozen=True)
class FamilyDefaults:
    """What ``auto`` stands for.

    Attributes:
        name: As people call the family.
        class_path: Of the network.
        config: Values that its configuration must have; missing ones count as None.
        rank: Of the adapters.
        alpha: Of the adapters.
        learning_rate: For AdamW.
        targets: As in ``select_targets``; empty is every attention and MLP layer inside the blocks.
        timestep_sampling: A key of ``TIMESTEP_SAMPLINGS``.
        shift: Time shift of the noise levels; None keeps the model's own, as it samples.
        loss: A key of ``LOSSES``.
        loss_weighting: A key of ``LOSS_WEIGHTINGS``.
        guidance: Value for networks that embed a guidance scale; None for others.
        bucket_step_px: Picture sides are multiples of it (VAE, patch and downsampling together).
        expert_boundary: Noise level that parts a high-noise from a low-noise expert; None for one model.
    """

    name: str
    class_path: str = ""
    config: tuple[tuple[str, Any], ...] = ()
    rank: int = 16
    alpha: float = 16.0
    learning_rate: float = 1e-4
    targets: str = ""
    timestep_sampling: str = "logit_normal"
    shift: float | None = None
    loss: str = "MSE"
    loss_weighting: str = "none"
    guidance: float | None = None
    bucket_step_px: int = 16
    expert_boundary: float | None = None


# Flux's shift of mu 1.15 (4096 tokens, a megapixel): exp(1.15).
_FLUX_SHIFT = 3.158
# The model is trained as if without guidance: distilled guidance above 1 would be learned away.
_NO_GUIDANCE = 1.0

FAMILIES: tuple[FamilyDefaults, ...] = (
    # Ovis and LongCat publish no LoRA recipe; both are Flux networks with Flux's own time shift.
    FamilyDefaults("Ovis-Image", _FLUX, (("yak_mlp", True),), shift=_FLUX_SHIFT),
    FamilyDefaults(
        "LongCat-Image", _FLUX, (("context_in_dim", 3584), ("vec_in_dim", None)), shift=_FLUX_SHIFT
    ),
    # FLUX.2's shift depends on the picture's size; ComfyUI's own is for a megapixel.
    FamilyDefaults(
        "FLUX.2-dev", _FLUX, (("image_model", "flux2"), ("guidance_embed", True)), guidance=_NO_GUIDANCE
    ),
    FamilyDefaults("FLUX.2-klein", _FLUX, (("image_model", "flux2"),)),
    FamilyDefaults(
        "FLUX.1-dev",
        _FLUX,
        (("image_model", "flux"), ("guidance_embed", True)),
        shift=_FLUX_SHIFT,
        guidance=_NO_GUIDANCE,
    ),
    FamilyDefaults("FLUX.1-schnell", _FLUX, (("image_model", "flux"),), shift=_FLUX_SHIFT),
    # Edit is the same network; its reference latents come with the captions.
    FamilyDefaults("Qwen-Image (Edit)", "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel", shift=2.2),
    # The refiners in front see text or image alone and stay as they are.
    FamilyDefaults(
        "Z-Image",
        "comfy.ldm.lumina.model.NextDiT",
        (("z_image_modulation", True),),
        targets="layers.*.attention, layers.*.feed_forward",
        shift=2.0,
    ),
    # Logit-normal levels with shift 3: arXiv:2403.03206, sections 3.1 and 5.3.2.
    FamilyDefaults(
        "Stable Diffusion 3.5",
        "comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
        shift=3.0,
    ),
    # TI2V-5B has one model and a VAE of 16 pixels; 14B has two experts, which only their files tell apart.
    FamilyDefaults(
        "Wan 2.2 TI2V-5B", _WAN, (("out_dim", 48),), rank=32, alpha=32.0, shift=5.0, bucket_step_px=32
    ),
    FamilyDefaults(
        "Wan 2.2 I2V", _WAN, (("in_dim", 36),), rank=32, alpha=32.0, shift=5.0, expert_boundary=0.9
    ),
    FamilyDefaults("Wan 2.1 and 2.2", _WAN, rank=32, alpha=32.0, shift=5.0, expert_boundary=0.875),
    # Noise or v prediction: uniform steps, weighted by min-SNR (arXiv:2303.09556).
    FamilyDefaults(
        "SDXL",
        "comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
        (("adm_in_channels", 2816),),
        rank=32,
        alpha=16.0,
        timestep_sampling="uniform",
        loss_weighting="min_snr",
        bucket_step_px=64,
    ),
)

OTHER = FamilyDefaults("other", timestep_sampling="uniform", bucket_step_px=64)
"""For models without an entry: nothing that a family would have to be known for."""


def find_family(class_path: str, config: Mapping[str, Any]) -> FamilyDefaults:
    """Return the first entry that fits, else ``OTHER``.

    Args:
        class_path: Dotted path of the network's class; a subclass is another class.
        config: What the network was built from.
    """
    for family in FAMILIES:
        if family.class_path == class_path and all(config.get(key) == value for key, value in family.config):
            return family
    return OTHER


def bucket_step_px(name: str) -> int:
    """Return the bucket step of the family ``name``; ``OTHER``'s fits all of them."""
    return {family.name: family.bucket_step_px for family in (*FAMILIES, OTHER)}[name]
