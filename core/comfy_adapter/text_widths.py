"""Whether a caption is of the text encoder that belongs to the model, told by the widths it meets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import RequestError

# Where ComfyUI's diffusion models take the embedding (FLUX, Qwen-Image, HunyuanVideo and others; SD3;
# Lumina and Z-Image; Wan; LTX), and the pooled one (FLUX; SD3; SDXL).
_READERS = {
    "c_crossattn": ("txt_in", "context_embedder", "cap_embedder", "text_embedding", "caption_projection"),
    "y": ("vector_in", "y_embedder", "label_emb"),
}
# A UNet has no such layer: each of its blocks reads the embedding by itself.
_CROSS_ATTENTION = {"c_crossattn": "attn2.to_k"}
_KINDS = {"c_crossattn": "an embedding", "y": "a pooled embedding"}


@dataclass(frozen=True)
class TextWidth:
    """The width that a model takes one of its text inputs in.

    Attributes:
        layer: The path of the first layer that sees it.
        channels: Its input width.
    """

    layer: str
    channels: int


def text_widths(network: nn.Module) -> dict[str, TextWidth]:
    """Return the width of each text input of a diffusion model, where it can be told."""
    found = {name: next(_read_by(network, name), None) for name in _READERS}
    return {name: width for name, width in found.items() if width is not None}


def check_widths(widths: Mapping[str, TextWidth], inputs: Mapping[str, Any], *, model: str) -> None:
    """Refuse text inputs of other widths.

    Args:
        widths: Of ``text_widths``.
        inputs: The model's own arguments; embeddings are ``(B, T, C)``, pooled ones ``(B, C)``.
        model: Its name.

    Raises:
        RequestError: Naming both widths.
    """
    for name, width in widths.items():
        value = getattr(inputs.get(name), "cond", None)
        if isinstance(value, Tensor) and value.shape[-1] != width.channels:
            raise RequestError(
                f"a caption with {_KINDS[name]} of {value.shape[-1]} channels was given",
                limit=f"{model} takes {width.channels} ({width.layer})",
                way_out="Encode the captions with the text encoder that belongs to this model",
            )


def _read_by(network: nn.Module, name: str) -> Iterator[TextWidth]:
    for reader in _READERS[name]:
        module = getattr(network, reader, None)
        if isinstance(module, nn.Module):
            yield from _linear_widths(reader, module)
    ending = _CROSS_ATTENTION.get(name)
    if ending is not None:
        for path, module in network.named_modules():
            if path.endswith(ending):
                yield from _linear_widths(path, module)


def _linear_widths(path: str, module: nn.Module) -> Iterator[TextWidth]:
    for inner, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            yield TextWidth(f"{path}.{inner}".rstrip("."), layer.in_features)
