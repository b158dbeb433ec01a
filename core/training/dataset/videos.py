"""Video files as frames at a fixed rate, read with PyAV (which ComfyUI brings along).

Legend: ``F`` frames, ``H`` ``W`` pixels.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy
import torch
from torch import Tensor

from .pictures import UnreadablePictureError

VIDEO_SUFFIXES = frozenset(
    ".mp4 .mov .webm .mkv .avi .flv .m4v .wmv .mpg .mpeg .ts .m2ts .mts .3gp .ogv .vob".split()
)


def decode_frames(content: bytes, *, num_frames: int, rate_hz: float) -> Tensor:
    """Return the first ``num_frames`` frames at ``rate_hz``, ``(F, H, W, 3)`` fp32 in 0 to 1.

    Args:
        content: The video file.
        num_frames: How many frames.
        rate_hz: Frames a second; 0 takes every frame of the file. Where the file has fewer frames a
            second, the frame on screen at that moment is taken again.

    Raises:
        UnreadablePictureError: If the file is broken or too short.
    """
    try:
        av: Any = importlib.import_module("av")
    except ImportError as error:
        raise UnreadablePictureError("is a video, and PyAV (pip install av) is not installed") from error
    try:
        with av.open(io.BytesIO(content), mode="r") as container:
            if not container.streams.video:
                raise UnreadablePictureError("has no video stream")
            chosen = list(_chosen_frames(container, num_frames=num_frames, rate_hz=rate_hz))
    except (av.FFmpegError, ValueError) as error:
        raise UnreadablePictureError(f"cannot be read ({str(error).splitlines()[0]})") from error
    sizes = sorted({frame.shape[1::-1] for frame in chosen})
    if len(sizes) > 1:
        raise UnreadablePictureError(f"changes its size from {sizes[0]} to {sizes[1]} pixels")
    if len(chosen) < num_frames:
        at = f" at {rate_hz:g} frames a second" if rate_hz else ""
        raise UnreadablePictureError(f"has {len(chosen)} frames{at}, fewer than {num_frames}")
    return torch.from_numpy(numpy.stack(chosen)).float() / 255.0


def _chosen_frames(container: Any, *, num_frames: int, rate_hz: float) -> Iterator[numpy.ndarray]:
    """Yield ``(H, W, 3)`` uint8 frames: for each wanted moment the frame that is on screen then."""
    stream = container.streams.video[0]
    native_hz = Fraction(stream.average_rate or 24)
    wanted, shown, start_s, time_s = 0, None, None, Fraction(0)
    for index, frame in enumerate(container.decode(stream)):
        time_s = Fraction(index) / native_hz if frame.pts is None else frame.pts * frame.time_base
        start_s = time_s if start_s is None else start_s
        pixels = _upright(frame)
        if not rate_hz:
            yield pixels
            wanted += 1
        else:
            while shown is not None and wanted < num_frames and wanted / rate_hz < time_s - start_s - 1e-6:
                yield shown
                wanted += 1
        if wanted >= num_frames:
            return
        shown = pixels
    # The last frame stays on screen for its own length.
    end_s = 0.0 if start_s is None else float(time_s - start_s + 1 / native_hz)
    while rate_hz and shown is not None and wanted < num_frames and wanted / rate_hz < end_s - 1e-6:
        yield shown
        wanted += 1


def _upright(frame: Any) -> numpy.ndarray:
    pixels = frame.to_ndarray(format="rgb24")
    # Degrees counter-clockwise by which a player turns the stored picture (phones film sideways).
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return numpy.ascontiguousarray(numpy.rot90(pixels, turns)) if turns else pixels
