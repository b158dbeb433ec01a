"""How the text encoders of edit models are shown the control picture beside a caption.

ComfyUI's own text encode nodes do it, so that training and sampling see the same. Models whose text
encoder sees no picture (FLUX.1 Kontext, FLUX.2) get the control picture as a reference latent alone.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import RequestError

AUTO_PROMPT, NO_PICTURE = "auto", "caption alone"


@dataclass(frozen=True)
class ControlPrompt:
    """One way.

    Attributes:
        name: As a person chooses it.
        encode: Takes the CLIP, the caption and the pixels ``(1, H, W, 3)``; returns a CONDITIONING.
    """

    name: str
    encode: Callable[[Any, str, Tensor], list]


def _qwen_edit(clip: Any, caption: str, pixels: Tensor) -> list:
    return _node("TextEncodeQwenImageEdit").execute(clip, caption, image=pixels).args[0]


def _qwen_edit_plus(clip: Any, caption: str, pixels: Tensor) -> list:
    return _node("TextEncodeQwenImageEditPlus").execute(clip, caption, image1=pixels).args[0]


def _node(name: str) -> Any:
    return getattr(importlib.import_module("comfy_extras.nodes_qwen"), name)


_PROMPTS = (
    ControlPrompt("Qwen-Image-Edit-2509 and later", _qwen_edit_plus),
    ControlPrompt("Qwen-Image-Edit", _qwen_edit),
)
CONTROL_PROMPTS = (AUTO_PROMPT, *(prompt.name for prompt in _PROMPTS), NO_PICTURE)


def choose_prompt(clip: Any, asked: str, *, has_controls: bool) -> ControlPrompt | None:
    """Return how ``clip`` is shown control pictures, None if it is shown none.

    Args:
        clip: ComfyUI's CLIP.
        asked: One of ``CONTROL_PROMPTS``; auto: the newest way if the text encoder takes pictures.
        has_controls: Whether there are any.

    Raises:
        RequestError: If a way is unknown, or asked for without pictures or of a text encoder that takes none.
    """
    if asked not in CONTROL_PROMPTS:
        raise RequestError(
            f"control_prompt={asked!r} was asked",
            limit=f"Known are {list(CONTROL_PROMPTS)}",
            way_out="Choose one of them",
        )
    chosen = next((prompt for prompt in _PROMPTS if prompt.name == asked), None)
    takes_pictures = "images" in inspect.signature(clip.tokenizer.tokenize_with_weights).parameters
    if chosen is not None and not (has_controls and takes_pictures):
        what = "This text encoder takes no pictures" if has_controls else "The data has no control pictures"
        raise RequestError(
            f"control_prompt={asked!r} was asked",
            limit=what,
            way_out="Set control_prompt to auto; control pictures come with control_folder of Load Training "
            "Folder",
        )
    if asked == AUTO_PROMPT and has_controls and takes_pictures:
        return _PROMPTS[0]
    return chosen
