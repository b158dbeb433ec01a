"""Modulation layers of each model class: data only.

Each entry names a module that is called with one small vector (the embedded timestep, to which a model
may add a pooled caption or a guidance scale) and the Linear below it whose input that vector decides.
Versions of a class differ; an entry that a model does not have is left out. A wrong entry costs time,
never exactness: outputs are kept by the exact vector.
"""

from __future__ import annotations

_FLUX_LAYERS = (
    ("double_blocks.*.img_mod", "lin"),
    ("double_blocks.*.txt_mod", "lin"),
    ("single_blocks.*.modulation", "lin"),
    ("double_stream_modulation_img", "lin"),
    ("double_stream_modulation_txt", "lin"),
    ("single_stream_modulation", "lin"),
    # Not the final layer's: it is given the same vector in another shape.
)

# Wan has none: its modulation is a small table, added to a vector that all blocks share.
_LAYERS: dict[str, tuple[tuple[str, str], ...]] = {
    "comfy.ldm.flux.model.Flux": _FLUX_LAYERS,
    # Its text refiner has such layers too, but they see the caption's mean besides the timestep.
    "comfy.ldm.hunyuan_video.model.HunyuanVideo": _FLUX_LAYERS,
    "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel": (
        ("transformer_blocks.*.img_mod", "-1"),
        ("transformer_blocks.*.txt_mod", "-1"),
    ),
    "comfy.ldm.lumina.model.NextDiT": (
        ("noise_refiner.*.adaLN_modulation", "-1"),
        ("layers.*.adaLN_modulation", "-1"),
        ("final_layer.adaLN_modulation", "-1"),
    ),
    "comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper": (
        ("joint_blocks.*.x_block.adaLN_modulation", "-1"),
        ("joint_blocks.*.context_block.adaLN_modulation", "-1"),
        ("final_layer.adaLN_modulation", "-1"),
    ),
}


def find_modulation(class_path: str) -> tuple[tuple[str, str], ...]:
    """Return the modulation layers of a model class, ``(module, Linear below it)``; empty if it has none.

    Args:
        class_path: For example ``comfy.ldm.flux.model.Flux``.
    """
    return _LAYERS.get(class_path, ())
