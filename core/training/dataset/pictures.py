"""Picture files as RGB tensors, and their fit into a bucket.

Legend: ``F`` frames (1 for a picture), ``H`` ``W`` pixels; values are 0 to 1 in fp32.
"""

from __future__ import annotations

import io
import struct

import numpy
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from .buckets import Bucket

# Modes whose values Pillow keeps as 16 bit; all end up as one channel of 0 to 65535.
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
# What Pillow's readers raise on files that are not sound.
_BROKEN_FILE_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    MemoryError,
    struct.error,
)
# 32-bit integers and floats: the file does not say what is white.
_NO_RANGE = ("I", "F")

# Also kinds that Pillow may not read here: such a file is an offender, not a file passed over.
PICTURE_SUFFIXES = frozenset(
    ".png .apng .jpg .jpeg .jpe .jfif .webp .bmp .dib .gif .tif .tiff .avif .heic .heif .jxl .jp2 .ppm .pgm "
    ".pnm .tga .ico .svg .psd .exr .hdr .dng .cr2 .cr3 .nef .arw .raf .orf .rw2".split()
)


class UnreadablePictureError(Exception):
    """A file cannot be used; the text says why, for the list of all offenders."""


def decode_picture(content: bytes) -> Tensor:
    """Return a picture file's pixels, ``(1, H, W, 3)`` fp32 in 0 to 1, upright.

    EXIF orientation is applied, transparency is laid over white, grey becomes RGB, and 16-bit grey
    keeps its 16 bits.

    Raises:
        UnreadablePictureError: If the file is broken, animated, or its values have no known range.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise UnreadablePictureError(f"is animated ({getattr(image, 'n_frames', 0)} frames)")
            image.load()
            upright = ImageOps.exif_transpose(image)
            return torch.from_numpy(_pixels(upright)).unsqueeze(0)
    except _BROKEN_FILE_ERRORS as error:
        raise UnreadablePictureError(f"cannot be read ({_first_line(error)})") from error
    except Image.DecompressionBombError as error:
        raise UnreadablePictureError(f"has too many pixels ({_first_line(error)})") from error


def _pixels(image: Image.Image) -> numpy.ndarray:
    """Return ``(H, W, 3)`` fp32 in 0 to 1."""
    if image.mode in _SIXTEEN_BIT:
        grey = numpy.asarray(image).astype(numpy.float32) / 65535.0
        return numpy.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in _NO_RANGE:
        raise UnreadablePictureError(f"has 32-bit pixels (mode {image.mode}); save it with 8 or 16 bits")
    if image.has_transparency_data:
        rgba = numpy.asarray(image.convert("RGBA")).astype(numpy.float32) / 255.0
        alpha = rgba[:, :, 3:]
        return rgba[:, :, :3] * alpha + (1.0 - alpha)
    return numpy.asarray(image.convert("RGB")).astype(numpy.float32) / 255.0


def _first_line(error: BaseException) -> str:
    # Pillow names the in-memory file by its address, which would change with every run.
    text = (str(error) or type(error).__name__).splitlines()[0]
    return "no picture format that Pillow knows" if "BytesIO" in text else text


def fit_to_bucket(frames: Tensor, bucket: Bucket) -> Tensor:
    """Return ``frames`` ``(F, H, W, 3)`` scaled to cover the bucket and cropped about the middle.

    Raises:
        ValueError: If the frames have no pixels.
    """
    height, width = frames.shape[1:3]
    if 0 in frames.shape:
        raise ValueError(f"no pixels in frames of shape {tuple(frames.shape)}")
    scale = cover_scale(width, height, bucket)
    size = (max(bucket.height_px, round(height * scale)), max(bucket.width_px, round(width * scale)))
    planes = frames.movedim(-1, 1)
    if size != (height, width):
        planes = F.interpolate(planes, size=size, mode="bicubic", antialias=True).clamp(0.0, 1.0)
    top, left = (size[0] - bucket.height_px) // 2, (size[1] - bucket.width_px) // 2
    cropped = planes[:, :, top : top + bucket.height_px, left : left + bucket.width_px]
    return cropped.movedim(1, -1).contiguous()


def cover_scale(width_px: int, height_px: int, bucket: Bucket) -> float:
    """Return the factor by which a picture is enlarged (above 1) to cover the bucket."""
    return max(bucket.width_px / width_px, bucket.height_px / height_px)
