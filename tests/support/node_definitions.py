"""What ComfyUI's nodes and ours looked like: kept as test data, for workflows and for compatibility.

``python -m support.node_definitions`` (in ``tests``) writes the file of the ComfyUI in ``COMFYUI_PATH``. It
is run for a release, after ``node_diff`` has found nothing that would break a saved workflow.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from .comfy_server import PACK, ComfyServer, comfyui_version, find_comfyui

FOLDER = PACK / "tests" / "data" / "node_definitions"
PREFIX = "Ferry"
STOCK_NODES = frozenset(
    """BasicGuider CFGGuider CFGNorm CLIPLoader CLIPTextEncode CLIPVisionEncode CLIPVisionLoader
    CheckpointLoaderSimple ConditioningZeroOut CreateVideo DualCLIPLoader EmptyFlux2LatentImage
    EmptyHunyuanLatentVideo EmptyHunyuanVideo15Latent EmptyLTXVLatentVideo EmptyLatentImage
    EmptyQwenImageLayeredLatentImage EmptySD3LatentImage Flux2Scheduler FluxGuidance FluxKontextImageScale
    FluxKontextMultiReferenceLatentMethod GetImageSize HunyuanVideo15ImageToVideo ImageScaleBy
    ImageScaleToMaxDimension ImageScaleToTotalPixels KSampler KSamplerAdvanced KSamplerSelect
    LTXAVTextEncoderLoader LTXVAudioVAEDecode LTXVAudioVAELoader LTXVConcatAVLatent LTXVConditioning
    LTXVEmptyLatentAudio LTXVImgToVideo LTXVScheduler LTXVSeparateAVLatent LatentCut LatentCutToBatch
    LoadImage LoadImageDataSetFromFolder LoraModelLoader LossGraphNode ModelSamplingAuraFlow
    ModelSamplingSD3 RandomNoise ReferenceLatent SamplerCustomAdvanced SaveImage SaveVideo
    TextEncodeQwenImageEdit TextEncodeQwenImageEditPlus UNETLoader VAEDecode VAEEncode VAELoader
    Wan22ImageToVideoLatent WanImageToVideo""".split()
)
"""Those of ComfyUI that the shipped workflows use."""

FILE_INPUTS = frozenset(
    """ckpt_name clip_name clip_name1 clip_name2 conditioning_name control_folder folder image resume_from
    text_encoder unet_name vae_name""".split()
)
"""Inputs whose choices are files, which differ from machine to machine."""

_KEPT = ("input", "input_order", "output", "output_name", "output_is_list", "display_name", "deprecated")
_OPTIONS_KEPT = (
    "default", "min", "max", "options", "forceInput", "control_after_generate", "image_upload", "multiline"
)  # fmt: skip


def trim(definition: dict[str, Any]) -> dict[str, Any]:
    """Return what a saved graph depends on: no tooltips, no descriptions."""
    kept = {key: definition[key] for key in _KEPT if definition.get(key) is not None}
    kept["input"] = {
        part: {name: _trim_input(name, specification) for name, specification in inputs.items()}
        for part, inputs in definition["input"].items()
        if part != "hidden"
    }
    return kept


def _trim_input(name: str, specification: list[Any] | tuple[Any, ...]) -> list[Any]:
    kind, options = specification[0], specification[1] if len(specification) > 1 else {}
    if name in FILE_INPUTS and (isinstance(kind, list) or kind == "COMBO"):
        kind, options = "COMBO", options | {"options": []}
    return [kind, {key: value for key, value in options.items() if key in _OPTIONS_KEPT}]


def read_definitions(version: str) -> dict[str, Any]:
    """Return the stored definitions of a ComfyUI version."""
    return json.loads((FOLDER / f"{version}.json").read_text(encoding="utf-8"))


def stored_versions() -> list[str]:
    """Return the ComfyUI versions with stored definitions."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def main() -> None:
    """Ask a server and write its file."""
    comfyui = find_comfyui()
    with tempfile.TemporaryDirectory() as base, ComfyServer(Path(base), comfyui) as server:
        found = server.get("/object_info")
    kept = {
        name: trim(found[name]) for name in sorted(found) if name in STOCK_NODES or name.startswith(PREFIX)
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{comfyui_version(comfyui)}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
