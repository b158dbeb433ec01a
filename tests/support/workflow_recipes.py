"""Prompts and latents of each kind of task: from text, editing with references, from a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .graph_builder import Output
from .workflow_graphs import Parts
from .workflow_models import WorkflowModel
from .workflow_sheet import Sheet

Recipe = Callable[[Sheet, WorkflowModel, Parts], None]
_PICTURE = "example.png"  # comes with ComfyUI


def _encode(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    """The two prompts as text; without a negative one the positive, zeroed."""
    (parts.positive,) = sheet.add("CLIPTextEncode", node_title="Prompt", text=model.prompt, clip=parts.clip)
    if model.negative is not None:
        (parts.negative,) = sheet.add(
            "CLIPTextEncode", node_title="Negative prompt", text=model.negative, clip=parts.clip
        )
    elif model.noise == "ksampler":
        (parts.negative,) = sheet.add("ConditioningZeroOut", conditioning=parts.positive)


def _guide(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    if model.guidance is None:
        return
    (parts.positive,) = sheet.add("FluxGuidance", conditioning=parts.positive, guidance=model.guidance)
    if model.negative is not None:
        (parts.negative,) = sheet.add("FluxGuidance", conditioning=parts.negative, guidance=model.guidance)


def _size(model: WorkflowModel) -> dict[str, Any]:
    size = {"width": model.width, "height": model.height, "batch_size": 1}
    return size | ({"length": model.length} if model.length else {})


def _empty(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    (parts.latent,) = sheet.add(model.latent, **_size(model))


def _picture(sheet: Sheet, title: str, scaler: str = "", **values: Any) -> Output:
    image, _mask = sheet.add("LoadImage", node_title=title, image=_PICTURE)
    return sheet.add(scaler, image=image, **values)[0] if scaler else image


def _megapixel(sheet: Sheet, title: str) -> Output:
    return _picture(sheet, title, "ImageScaleToTotalPixels", upscale_method="lanczos", megapixels=1.0)


def _text(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    _encode(sheet, model, parts)
    _guide(sheet, model, parts)
    _empty(sheet, model, parts)


def _ltx_text(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    _encode(sheet, model, parts)
    parts.positive, parts.negative = sheet.add(
        "LTXVConditioning", positive=parts.positive, negative=parts.negative, frame_rate=model.fps
    )
    _empty(sheet, model, parts)


def _ltx2(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    _ltx_text(sheet, model, parts)
    (audio,) = sheet.add(
        "LTXVEmptyLatentAudio",
        audio_vae=parts.audio_vae,
        frames_number=model.length,
        frame_rate=int(model.fps),
    )
    (parts.latent,) = sheet.add("LTXVConcatAVLatent", video_latent=parts.latent, audio_latent=audio)


def _ltx_i2v(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    _encode(sheet, model, parts)
    positive, negative, parts.latent = sheet.add(
        "LTXVImgToVideo",
        positive=parts.positive,
        negative=parts.negative,
        vae=parts.vae,
        image=_picture(sheet, "First frame"),
        strength=0.85,
        **_size(model),
    )
    parts.positive, parts.negative = sheet.add(
        "LTXVConditioning", positive=positive, negative=negative, frame_rate=model.fps
    )


def _wan_start_latent(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    _encode(sheet, model, parts)
    (parts.latent,) = sheet.add(
        "Wan22ImageToVideoLatent", vae=parts.vae, start_image=_picture(sheet, "First frame"), **_size(model)
    )


def _image_to_video(kind: str, crop: str = "") -> Recipe:
    def recipe(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
        _encode(sheet, model, parts)
        image = _picture(sheet, "First frame")
        seen = {}
        if parts.vision is not None:
            (output,) = sheet.add("CLIPVisionEncode", clip_vision=parts.vision, image=image, crop=crop)
            seen = {"clip_vision_output": output}
        parts.positive, parts.negative, parts.latent = sheet.add(
            kind,
            positive=parts.positive,
            negative=parts.negative,
            vae=parts.vae,
            start_image=image,
            **seen,
            **_size(model),
        )

    return recipe


def _qwen_edit(
    kind: str, num_pictures: int, method: str = "", scaler: str = "FluxKontextImageScale"
) -> Recipe:
    """An encoder that sees the pictures; the first one's size is the result's."""

    def recipe(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
        if scaler:
            first = _picture(sheet, "Picture to edit", scaler)
        else:
            first = _megapixel(sheet, "Picture to edit")
        pictures = {"image" if num_pictures == 1 else "image1": first}
        if num_pictures == 2:
            pictures["image2"] = _picture(sheet, "Reference")
        encoded = []
        for title, text in (("Edit", model.prompt), ("Negative prompt", "")):
            values = {"prompt": text, "clip": parts.clip, "vae": parts.vae} | pictures
            (output,) = sheet.add(kind, node_title=title, **values)
            if method:
                (output,) = sheet.add(
                    "FluxKontextMultiReferenceLatentMethod",
                    conditioning=output,
                    reference_latents_method=method,
                )
            encoded.append(output)
        parts.positive, parts.negative = encoded
        _guide(sheet, model, parts)
        (parts.latent,) = sheet.add("VAEEncode", pixels=first, vae=parts.vae)

    return recipe


def _qwen_layers(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
    _encode(sheet, model, parts)
    image = _picture(
        sheet,
        "Picture to split",
        "ImageScaleToMaxDimension",
        upscale_method="lanczos",
        largest_size=model.width,
    )
    (latent,) = sheet.add("VAEEncode", pixels=image, vae=parts.vae)
    (parts.positive,) = sheet.add("ReferenceLatent", conditioning=parts.positive, latent=latent)
    (parts.negative,) = sheet.add("ReferenceLatent", conditioning=parts.negative, latent=latent)
    width, height, _batch = sheet.add("GetImageSize", image=image)
    (parts.latent,) = sheet.add(
        "EmptyQwenImageLayeredLatentImage", width=width, height=height, layers=2, batch_size=1
    )


def _references(titles: tuple[str, ...]) -> Recipe:
    """Encoded pictures beside the prompt (FLUX)."""

    def recipe(sheet: Sheet, model: WorkflowModel, parts: Parts) -> None:
        (parts.positive,) = sheet.add("CLIPTextEncode", node_title="Edit", text=model.prompt, clip=parts.clip)
        _guide(sheet, model, parts)
        latents = []
        for title in titles:
            image = (
                _picture(sheet, title, "FluxKontextImageScale")
                if model.noise == "ksampler"
                else _megapixel(sheet, title)
            )
            (latent,) = sheet.add("VAEEncode", pixels=image, vae=parts.vae)
            (parts.positive,) = sheet.add("ReferenceLatent", conditioning=parts.positive, latent=latent)
            latents.append(latent)
        if model.noise == "ksampler":
            (parts.negative,) = sheet.add("ConditioningZeroOut", conditioning=parts.positive)
            parts.latent = latents[0]
        else:
            _empty(sheet, model, parts)

    return recipe


RECIPES: dict[str, Recipe] = {
    "text": _text,
    "ltx_text": _ltx_text,
    "ltx2": _ltx2,
    "ltx_i2v": _ltx_i2v,
    "wan_start_latent": _wan_start_latent,
    "wan_i2v": _image_to_video("WanImageToVideo"),
    "wan_i2v_vision": _image_to_video("WanImageToVideo", crop="none"),
    "hunyuan_i2v": _image_to_video("HunyuanVideo15ImageToVideo", crop="center"),
    "qwen_edit": _qwen_edit("TextEncodeQwenImageEdit", 1, scaler=""),
    "longcat_edit": _qwen_edit("TextEncodeQwenImageEdit", 1, method="index", scaler=""),
    "qwen_edit_plus": _qwen_edit("TextEncodeQwenImageEditPlus", 2),
    "qwen_edit_2511": _qwen_edit("TextEncodeQwenImageEditPlus", 2, method="index_timestep_zero"),
    "qwen_layers": _qwen_layers,
    "kontext": _references(("Picture to edit",)),
    "two_references": _references(("Picture to edit", "Reference")),
}
"""`WorkflowModel.recipe` -> what adds the nodes."""
