"""What the workflows for each model need to know: files, encoders, sizes and sampler settings.

Names, addresses and settings are those of ComfyUI's own templates for these models
(github.com/Comfy-Org/workflow_templates); where there is none, of the model's page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .workflow_files import (
    BYT5,
    CLIP_L,
    EDIT_REPO,
    FLUX2_REPO,
    FLUX2_VAE,
    FLUX_VAE,
    GEMMA_3,
    HUNYUAN_REPO,
    KLEIN_REPO,
    MISTRAL,
    QWEN_3,
    QWEN_REPO,
    QWEN_VAE,
    QWEN_VL,
    SIGCLIP,
    SPLIT,
    T5,
    UMT5,
    WAN21_REPO,
    WAN21_VAE,
    WAN22_REPO,
    WAN22_VAE,
    ModelFile,
    diffusion,
)


@dataclass(frozen=True)
class WorkflowModel:
    """One model as one kind of task.

    Args:
        key: Start of the file names.
        title: What people call it.
        task: For the note.
        models: Its diffusion models (two: experts, the one for high noise first), or one checkpoint.
        text_encoders: None with a checkpoint that holds them.
        clip_type: The text encoder loader's ``type``.
        vae: None with a checkpoint.
        vision: The image encoder, if it needs one.
        recipe: Key of ``workflow_graphs.RECIPES``: prompts and latent.
        negative: None for a model with distilled guidance, at cfg 1.
        shift: Node and value that set the noise schedule's shift.
        guidance: Value of FluxGuidance, on both prompts.
        length: Frames; 0 for pictures.
        fps: Frames a second of the saved video.
        noise: How the sampler is driven, a key of ``workflow_graphs.SAMPLERS``.
        newer_only: Whether ComfyUI 0.3.75 lacks the model, its text encoder or its nodes.
        trainable: Whether there is a training workflow.
        examples: What it is trained on, a key of ``workflow_notes.EXAMPLES``.
        resolution: Of the training pictures.
    """

    key: str
    title: str
    task: str
    models: tuple[ModelFile, ...]
    text_encoders: tuple[ModelFile, ...] = ()
    clip_type: str = ""
    vae: ModelFile | None = None
    vision: ModelFile | None = None
    recipe: str = "text"
    prompt: str = "a lighthouse on a rocky coast at dusk, warm light in the window, oil painting"
    negative: str | None = ""
    shift: tuple[str, float] | None = None
    guidance: float | None = None
    cfg_norm: bool = False
    latent: str = "EmptySD3LatentImage"
    width: int = 1024
    height: int = 1024
    length: int = 0
    fps: float = 16.0
    steps: int = 20
    cfg: float = 4.0
    sampler: str = "euler"
    scheduler: str = "simple"
    noise: str = "ksampler"
    newer_only: bool = False
    trainable: bool = False
    examples: str = "pictures"
    resolution: int = 1024

    @property
    def is_checkpoint(self) -> bool:
        """Whether one file holds more than the diffusion model."""
        return self.models[0].directory == "checkpoints"

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """Everything to download."""
        others = (*self.text_encoders, self.vae, self.vision)
        return (*self.models, *(file for file in others if file is not None))


_EDIT = "make it a winter night with snow falling, keep everything else as it is"
_MOVE = "the camera moves slowly forward, waves roll in, clouds drift across the sky"
_BLURRED = "blurry, low quality, distorted"
_AURA, _SD3 = "ModelSamplingAuraFlow", "ModelSamplingSD3"

_QWEN = WorkflowModel(
    "qwen_image", "Qwen-Image", "text to image",
    (diffusion(QWEN_REPO, "qwen_image_fp8_e4m3fn.safetensors"),),
    (QWEN_VL,), "qwen_image", QWEN_VAE, shift=(_AURA, 3.1), width=1328, height=1328, trainable=True,
)  # fmt: skip
_Z_IMAGE = WorkflowModel(
    "z_image", "Z-Image", "text to image", (diffusion("Comfy-Org/z_image", "z_image_bf16.safetensors"),),
    (QWEN_3,), "lumina2", FLUX_VAE, shift=(_AURA, 3.0), steps=25, sampler="res_multistep", trainable=True,
)  # fmt: skip
_SD35 = WorkflowModel(
    "sd35_large", "Stable Diffusion 3.5 large", "text to image",
    (ModelFile(
        "Comfy-Org/stable-diffusion-3.5-fp8", "sd3.5_large_fp8_scaled.safetensors", "checkpoints"
    ),),
    scheduler="sgm_uniform", trainable=True,
)  # fmt: skip
_KLEIN = WorkflowModel(
    "flux2_klein", "FLUX.2-klein", "text to image",
    (diffusion(KLEIN_REPO, "flux-2-klein-4b.safetensors"),), (QWEN_3,), "flux2", FLUX2_VAE,
    negative=None, latent="EmptyFlux2LatentImage", steps=4, cfg=1.0, noise="flux2", newer_only=True,
    trainable=True,
)  # fmt: skip
_FLUX2 = replace(
    _KLEIN, key="flux2_dev", title="FLUX.2-dev", newer_only=False, steps=20, guidance=4.0,
    models=(diffusion(FLUX2_REPO, "flux2_dev_fp8mixed.safetensors"),), text_encoders=(MISTRAL,),
)  # fmt: skip
_FLUX1 = WorkflowModel(
    "flux1_dev", "FLUX.1-dev", "text to image",
    (ModelFile("Comfy-Org/flux1-dev", "flux1-dev.safetensors", "diffusion_models"),), (CLIP_L, T5), "flux",
    FLUX_VAE, negative=None, guidance=3.5, cfg=1.0, trainable=True,
)  # fmt: skip
_WAN22 = WorkflowModel(
    "wan22_t2v", "Wan 2.2 T2V-A14B", "text to video",
    tuple(
        diffusion(WAN22_REPO, f"wan2.2_t2v_{noise}_noise_14B_fp8_scaled.safetensors")
        for noise in ("high", "low")
    ),
    (UMT5,), "wan", WAN21_VAE, prompt=_MOVE, negative=_BLURRED, shift=(_SD3, 5.0),
    latent="EmptyHunyuanLatentVideo", width=640, height=640, length=81, cfg=3.5, noise="experts",
    trainable=True, resolution=640,
)  # fmt: skip
_WAN22_5B = replace(
    _WAN22, key="wan22_5b", title="Wan 2.2 TI2V-5B", task="picture to video", vae=WAN22_VAE,
    models=(diffusion(WAN22_REPO, "wan2.2_ti2v_5B_fp16.safetensors"),), recipe="wan_start_latent",
    shift=(_SD3, 8.0), width=1280, height=704, length=121, fps=24.0, cfg=5.0, sampler="uni_pc",
    noise="ksampler",
)  # fmt: skip
_HUNYUAN = WorkflowModel(
    "hunyuan_video_15", "HunyuanVideo 1.5", "text to video",
    (diffusion(HUNYUAN_REPO, "hunyuanvideo1.5_720p_t2v_fp16.safetensors"),), (QWEN_VL, BYT5),
    "hunyuan_video_15", ModelFile(HUNYUAN_REPO, f"{SPLIT}/vae/hunyuanvideo15_vae_fp16.safetensors"),
    prompt=_MOVE, shift=(_SD3, 7.0), latent="EmptyHunyuanVideo15Latent", width=1280, height=720, length=121,
    fps=24.0, cfg=6.0, trainable=True, resolution=640,
)  # fmt: skip
_LTXV = WorkflowModel(
    "ltx_video", "LTX-Video", "text to video",
    (ModelFile("Lightricks/LTX-Video", "ltx-video-2b-v0.9.5.safetensors", "checkpoints"),), (T5,), "ltxv",
    recipe="ltx_text", prompt=_MOVE, negative=_BLURRED, latent="EmptyLTXVLatentVideo", width=768, height=512,
    length=97, fps=24.0, steps=30, cfg=3.0, noise="ltx", trainable=True, resolution=512,
)  # fmt: skip

MODELS: tuple[WorkflowModel, ...] = (
    WorkflowModel(
        "longcat_image", "LongCat-Image", "text to image",
        (diffusion("Comfy-Org/LongCat-Image", "longcat_image_bf16.safetensors"),), (QWEN_VL,),
        "longcat_image", FLUX_VAE, negative=_BLURRED, guidance=4.0, cfg_norm=True, newer_only=True,
        trainable=True,
    ),
    WorkflowModel(
        "longcat_image_edit", "LongCat-Image-Edit", "edit",
        (diffusion("TalmajM/LongCat-Image-Edit_ComfyUI_repackaged", "longcat_image_edit_bf16.safetensors"),),
        (QWEN_VL,), "longcat_image", FLUX_VAE, recipe="longcat_edit", prompt=_EDIT, guidance=4.5, steps=50,
        cfg=4.5, newer_only=True,
    ),
    WorkflowModel(
        "ovis_image", "Ovis-Image", "text to image",
        (diffusion("Comfy-Org/Ovis-Image", "ovis_image_bf16.safetensors"),),
        (ModelFile("Comfy-Org/Ovis-Image", f"{SPLIT}/text_encoders/ovis_2.5.safetensors"),), "ovis",
        FLUX_VAE, shift=(_AURA, 3.0), cfg=5.0, newer_only=True, trainable=True,
    ),
    _QWEN,
    replace(
        _QWEN, key="qwen_image_edit", title="Qwen-Image-Edit", task="edit", recipe="qwen_edit", prompt=_EDIT,
        models=(diffusion(EDIT_REPO, "qwen_image_edit_fp8_e4m3fn.safetensors"),), shift=(_AURA, 3.0),
        cfg=2.5, cfg_norm=True, trainable=False,
    ),
    replace(
        _QWEN, key="qwen_image_edit_2509", title="Qwen-Image-Edit-2509", task="edit with two references",
        models=(diffusion(EDIT_REPO, "qwen_image_edit_2509_fp8_e4m3fn.safetensors"),),
        recipe="qwen_edit_plus", prompt="put what image 2 shows into image 1", shift=(_AURA, 3.0),
        cfg_norm=True, examples="pairs",
    ),
    replace(
        _QWEN, key="qwen_image_edit_2511", title="Qwen-Image-Edit-2511", task="edit with two references",
        models=(diffusion(EDIT_REPO, "qwen_image_edit_2511_fp8mixed.safetensors"),), cfg_norm=True,
        recipe="qwen_edit_2511", prompt="put what image 2 shows into image 1", steps=40, newer_only=True,
        trainable=False,
    ),
    replace(
        _QWEN, key="qwen_image_layered", title="Qwen-Image-Layered", task="picture to layers",
        models=(diffusion("Comfy-Org/Qwen-Image-Layered_ComfyUI", "qwen_image_layered_bf16.safetensors"),),
        vae=ModelFile(
            "Comfy-Org/Qwen-Image-Layered_ComfyUI", f"{SPLIT}/vae/qwen_image_layered_vae.safetensors"
        ),
        recipe="qwen_layers", shift=(_AURA, 1.0), width=640, height=640, cfg=2.5, newer_only=True,
        trainable=False,
    ),
    _Z_IMAGE,
    replace(
        _Z_IMAGE, key="z_image_turbo", title="Z-Image-Turbo", negative=None, steps=8, cfg=1.0,
        models=(diffusion("Comfy-Org/z_image_turbo", "z_image_turbo_bf16.safetensors"),), trainable=False,
    ),
    _SD35,
    replace(
        _SD35, key="sd35_medium", title="Stable Diffusion 3.5 medium",
        models=(ModelFile(
            "Comfy-Org/stable-diffusion-3.5-fp8", "sd3.5_medium_incl_clips_t5xxlfp8scaled.safetensors",
            "checkpoints",
        ),),
    ),
    _KLEIN,
    replace(
        _KLEIN, key="flux2_klein_edit", task="edit with two references", recipe="two_references",
        prompt=_EDIT, trainable=False,
    ),
    _FLUX2,
    replace(
        _FLUX2, key="flux2_dev_edit", task="edit with two references", recipe="two_references",
        prompt=_EDIT, trainable=False,
    ),
    _FLUX1,
    replace(
        _FLUX1, key="flux1_kontext", title="FLUX.1-Kontext-dev", task="edit", recipe="kontext", prompt=_EDIT,
        models=(diffusion(
            "Comfy-Org/flux1-kontext-dev_ComfyUI", "flux1-dev-kontext_fp8_scaled.safetensors"
        ),),
        guidance=2.5, trainable=False,
    ),
    _WAN22,
    replace(
        _WAN22, key="wan22_i2v", title="Wan 2.2 I2V-A14B", task="picture to video", recipe="wan_i2v",
        models=tuple(
            diffusion(WAN22_REPO, f"wan2.2_i2v_{noise}_noise_14B_fp8_scaled.safetensors")
            for noise in ("high", "low")
        ),
        examples="videos", resolution=480,
    ),
    _WAN22_5B,
    replace(
        _WAN22, key="wan21_i2v", title="Wan 2.1 I2V", task="picture to video", recipe="wan_i2v_vision",
        models=(diffusion(WAN21_REPO, "wan2.1_i2v_480p_14B_fp16.safetensors"),),
        vision=ModelFile(WAN21_REPO, f"{SPLIT}/clip_vision/clip_vision_h.safetensors"),
        shift=(_SD3, 8.0), width=832, height=480, length=33, cfg=6.0, sampler="uni_pc", noise="ksampler",
        trainable=False,
    ),
    _HUNYUAN,
    replace(
        _HUNYUAN, key="hunyuan_video_15_i2v", title="HunyuanVideo 1.5 I2V", task="picture to video",
        models=(diffusion(HUNYUAN_REPO, "hunyuanvideo1.5_720p_i2v_fp16.safetensors"),), vision=SIGCLIP,
        recipe="hunyuan_i2v", trainable=False,
    ),
    _LTXV,
    replace(_LTXV, key="ltx_video_i2v", task="picture to video", recipe="ltx_i2v", trainable=False),
    replace(
        _LTXV, key="ltx2", title="LTX-2", task="text to video with sound", recipe="ltx2", noise="ltx2",
        models=(ModelFile("Lightricks/LTX-2", "ltx-2-19b-dev-fp8.safetensors", "checkpoints"),),
        text_encoders=(GEMMA_3,), clip_type="", fps=25.0, steps=20, cfg=4.0, newer_only=True,
        trainable=False,
    ),
    WorkflowModel(
        "sdxl", "Stable Diffusion XL", "text to image",
        (ModelFile("stabilityai/stable-diffusion-xl-base-1.0", "sd_xl_base_1.0.safetensors", "checkpoints"),),
        negative=_BLURRED, latent="EmptyLatentImage", steps=25, cfg=7.0, sampler="dpmpp_2m",
        scheduler="karras", trainable=True,
    ),
    WorkflowModel(
        "lumina2", "Lumina 2", "text to image",
        (diffusion("Comfy-Org/Lumina_Image_2.0_Repackaged", "lumina_2_model_bf16.safetensors"),),
        (ModelFile(
            "Comfy-Org/Lumina_Image_2.0_Repackaged", f"{SPLIT}/text_encoders/gemma_2_2b_fp16.safetensors"
        ),),
        "lumina2", FLUX_VAE, prompt="You are an assistant designed to generate superior images with the "
        "superior degree of image-text alignment based on textual prompts or user prompts. <Prompt Start> "
        "a lighthouse on a rocky coast at dusk", shift=(_AURA, 6.0), steps=25, sampler="res_multistep",
        trainable=True,
    ),
)  # fmt: skip
