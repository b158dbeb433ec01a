"""Make a workflow's prompt small enough for tiny models on a CPU."""

from __future__ import annotations

from typing import Any

Prompt = dict[str, dict[str, Any]]
_SIZE_PX, _FRAMES, _STEPS = 64, 9, 2


def shrink(prompt: Prompt) -> Prompt:
    """Return the prompt with sizes of 64 pixels and 9 frames, and two steps; nothing else changes."""
    small = {"width": _SIZE_PX, "height": _SIZE_PX, "length": _FRAMES, "frames_number": _FRAMES}
    small |= {"steps": _STEPS, "largest_size": _SIZE_PX, "megapixels": 0.01, "resolution": _SIZE_PX}
    small |= {"video_frames": _FRAMES}
    result = {}
    for node_id, node in prompt.items():
        inputs = dict(node["inputs"])
        for name, value in small.items():
            if name in inputs and not isinstance(inputs[name], list):
                inputs[name] = value
        if node["class_type"] == "KSamplerAdvanced":
            first = inputs["start_at_step"] == 0
            inputs |= {"start_at_step": 0 if first else 1, "end_at_step": 1 if first else 2}
        result[node_id] = node | {"inputs": inputs}
    return result
