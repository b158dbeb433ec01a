"""Spatial plans of ComfyUI's autoencoders.

``AutoencoderKL`` and ``AutoencodingEngine`` with the same decoder serve FLUX.1, FLUX.2, Z-Image, Ovis-Image,
LongCat-Image, Stable Diffusion and SDXL. Wan 2.1's serves Qwen-Image and Wan, Wan 2.2's the 5B model.
"""

from __future__ import annotations

from ..parallel.spatial_plan import SpatialPlan, SpatialRole

_TORCH = {
    "torch.nn.modules.module.Module": SpatialRole.POINTWISE,
    "torch.nn.modules.container.ModuleList": SpatialRole.POINTWISE,
    "torch.nn.modules.container.Sequential": SpatialRole.POINTWISE,
    "torch.nn.modules.activation.SiLU": SpatialRole.POINTWISE,
    "torch.nn.modules.dropout.Dropout": SpatialRole.POINTWISE,
    "torch.nn.modules.linear.Identity": SpatialRole.POINTWISE,
    "torch.nn.modules.upsampling.Upsample": SpatialRole.POINTWISE,  # all of them are nearest
    "comfy.ops.disable_weight_init.Conv2d": SpatialRole.CONVOLUTION,
    "comfy.ops.disable_weight_init.Conv3d": SpatialRole.CONVOLUTION,
    "comfy.ops.disable_weight_init.GroupNorm": SpatialRole.GROUP_NORM,
}
_KL = "comfy.ldm.modules.diffusionmodules.model"
_KL_ROLES = {
    **_TORCH,
    f"{_KL}.Decoder": SpatialRole.POINTWISE,
    f"{_KL}.ResnetBlock": SpatialRole.POINTWISE,
    f"{_KL}.Upsample": SpatialRole.POINTWISE,
    f"{_KL}.AttnBlock": SpatialRole.ATTENTION,
}
# Video: HunyuanVideo 1.0 pads in the class, 1.5 in the function that calls it.
_KL_VIDEO_ROLES = {
    **_KL_ROLES,
    f"{_KL}.VideoConv3d": SpatialRole.PADDED,
    f"{_KL}.CarriedConv3d": SpatialRole.PADDED,
}
_HUNYUAN_IMAGE, _HUNYUAN_VIDEO = "comfy.ldm.hunyuan_video.vae", "comfy.ldm.hunyuan_video.vae_refiner"
_LTX, _LTX_MODEL = "comfy.ldm.lightricks.vae", "comfy.ldm.lightricks.model"
_LTX_ROLES = {
    **_TORCH,
    "torch.nn.modules.normalization.GroupNorm": SpatialRole.GROUP_NORM,
    "comfy.ops.disable_weight_init.Linear": SpatialRole.POINTWISE,  # of the decoding timestep
    "comfy.ops.disable_weight_init.LayerNorm": SpatialRole.POINTWISE,  # over channels
    f"{_LTX}.pixel_norm.PixelNorm": SpatialRole.POINTWISE,  # over channels
    f"{_LTX}.causal_conv3d.CausalConv3d": SpatialRole.POINTWISE,  # pads frames only
    **{
        f"{_LTX}.causal_video_autoencoder.{name}": SpatialRole.POINTWISE
        for name in (
            "Decoder", "DepthToSpaceUpsample", "LayerNorm", "ResnetBlock3D", "UNetMidBlock3D", "processor"
        )
    },
    **{
        f"{_LTX_MODEL}.{name}": SpatialRole.POINTWISE
        for name in ("PixArtAlphaCombinedTimestepSizeEmbeddings", "TimestepEmbedding", "Timesteps")
    },
}  # fmt: skip
_WAN21, _WAN22 = "comfy.ldm.wan.vae", "comfy.ldm.wan.vae2_2"
_WAN_ROLES = {
    **_TORCH,
    f"{_WAN21}.CausalConv3d": SpatialRole.CONVOLUTION,
    f"{_WAN21}.RMS_norm": SpatialRole.POINTWISE,  # over channels
    f"{_WAN21}.AttentionBlock": SpatialRole.ATTENTION,
}


def _wan(name: str, module: str, *classes: str) -> SpatialPlan:
    return SpatialPlan(
        name=name,
        class_path=f"{module}.WanVAE",
        decoder_path=f"{module}.Decoder3d",
        parts=("conv2", "decoder"),
        roles=_WAN_ROLES | {f"{module}.{each}": SpatialRole.POINTWISE for each in ("Decoder3d", *classes)},
        cache_arguments=("cache_list", "cache_idx"),
    )


PLANS: tuple[SpatialPlan, ...] = (
    *(
        SpatialPlan(
            name=name,
            class_path=f"comfy.ldm.models.autoencoder.{name}",
            decoder_path=f"{_KL}.Decoder",
            parts=("post_quant_conv", "decoder"),
            roles=_KL_VIDEO_ROLES,
        )
        for name in ("AutoencoderKL", "AutoencodingEngine")
    ),
    SpatialPlan(
        name="HunyuanImage VAE",
        class_path="comfy.ldm.models.autoencoder.AutoencodingEngine",
        decoder_path=f"{_HUNYUAN_IMAGE}.Decoder",
        parts=("decoder",),
        roles=_KL_ROLES
        | {f"{_HUNYUAN_IMAGE}.{name}": SpatialRole.POINTWISE for name in ("Decoder", "PixelUnshuffle2D")},
    ),
    SpatialPlan(
        name="HunyuanVideo 1.5 VAE",
        class_path="comfy.ldm.models.autoencoder.AutoencodingEngine",
        decoder_path=f"{_HUNYUAN_VIDEO}.Decoder",
        parts=("decoder",),
        roles=_KL_VIDEO_ROLES
        | {
            f"{_HUNYUAN_VIDEO}.NoPadConv3d": SpatialRole.PADDED,  # CarriedConv3d of older ComfyUI
            "comfy.ops.disable_weight_init.Linear": SpatialRole.POINTWISE,  # of a timestep: unused
        }
        | {
            f"{_HUNYUAN_VIDEO}.{name}": SpatialRole.POINTWISE
            for name in ("Decoder", "HunyuanRefinerResnetBlock", "RMS_norm", "UpSmpl")
        },
    ),
    SpatialPlan(
        name="LTX VAE",
        class_path=f"{_LTX}.causal_video_autoencoder.VideoVAE",
        decoder_path=f"{_LTX}.causal_video_autoencoder.Decoder",
        parts=("decoder", "per_channel_statistics"),
        roles=_LTX_ROLES,
        chunk_limit="run_up",
        draws_noise=True,
    ),
    _wan("Wan 2.1 VAE", _WAN21, "ResidualBlock", "Resample"),
    _wan("Wan 2.2 VAE", _WAN22, "ResidualBlock", "Resample", "Up_ResidualBlock", "DupUp3D"),
)
