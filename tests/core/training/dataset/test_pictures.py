"""Every kind of picture file becomes the RGB picture that a person sees."""

from __future__ import annotations

import io

import numpy
import pytest
import torch
from comfyui_ferry.core.training.dataset import Bucket, UnreadablePictureError, decode_picture, fit_to_bucket
from PIL import Image


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def half_and_half(left, right, mode="RGB", size=(8, 6)):
    image = Image.new(mode, size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def corners(pixels):
    return [tuple(round(float(value), 3) for value in pixels[0, 0, column]) for column in (0, -1)]


def test_rgb_is_itself():
    pixels = decode_picture(encoded(half_and_half((255, 0, 51), (0, 102, 255))))
    assert pixels.shape == (1, 6, 8, 3)
    assert pixels.dtype == torch.float32
    assert corners(pixels) == [(1.0, 0.0, 0.2), (0.0, 0.4, 1.0)]


def test_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    content = encoded(half_and_half((0, 0, 0), (255, 255, 255)), exif=exif)
    pixels = decode_picture(content)
    assert pixels.shape == (1, 8, 6, 3)
    assert float(pixels[0, 0].max()) == 0.0
    assert float(pixels[0, -1].min()) == 1.0


@pytest.mark.parametrize(("mode", "left", "right"), [("L", 51, 255), ("LA", (51, 255), (0, 0)), ("1", 0, 1)])
def test_grey_becomes_rgb(mode, left, right):
    pixels = decode_picture(encoded(half_and_half(left, right, mode)))
    dark = 0.0 if mode == "1" else 0.2
    assert corners(pixels) == [(dark,) * 3, (1.0,) * 3]


def test_transparency_is_laid_over_white():
    image = half_and_half((255, 0, 0, 255), (0, 0, 0, 0), "RGBA")
    assert corners(decode_picture(encoded(image))) == [(1.0, 0.0, 0.0), (1.0, 1.0, 1.0)]
    half = half_and_half((0, 0, 0, 51), (0, 0, 0, 255), "RGBA")
    assert corners(decode_picture(encoded(half))) == [(0.8,) * 3, (0.0,) * 3]
    palette = half_and_half(0, 1, "P")
    palette.putpalette([255, 0, 0, 0, 0, 255])
    assert corners(decode_picture(encoded(palette, transparency=1))) == [(1.0, 0.0, 0.0), (1.0, 1.0, 1.0)]


def test_sixteen_bits_are_kept():
    values = numpy.array([[0, 257, 32768, 65535]], dtype=numpy.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = decode_picture(encoded(Image.fromarray(values), kind))
        assert torch.equal(pixels[0, 0, :, 1], torch.tensor([0.0, 257, 32768, 65535]) / 65535)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot be read"),
        (b"not a picture", "cannot be read"),
        (encoded(Image.effect_noise((64, 64), 80))[:-900], "cannot be read"),
        (encoded(Image.fromarray(numpy.ones((2, 2), numpy.float32)), "TIFF"), "32-bit"),
        (
            encoded(
                Image.new("RGB", (4, 4)),
                "GIF",
                save_all=True,
                append_images=[Image.new("RGB", (4, 4), "red")],
            ),
            "animated",
        ),
    ],
)
def test_what_cannot_be_used_says_why(content, why):
    with pytest.raises(UnreadablePictureError, match=why):
        decode_picture(content)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow
def test_damaged_files_of_every_kind_are_read_or_refused():
    """Whatever Pillow's readers stumble over, the file is named in the list of offenders."""
    exif = Image.Exif()
    exif[0x112], exif[0x10E] = 6, "a cat"
    whole = [
        encoded(Image.effect_noise((16, 12), 80), kind) for kind in ("PNG", "TIFF", "GIF", "WEBP", "AVIF")
    ]
    whole.append(encoded(Image.effect_noise((16, 12), 80), "JPEG", exif=exif))
    random = numpy.random.default_rng(0)
    refused = 0
    for content in whole:
        for _ in range(200):
            damaged = bytearray(content)
            for place in random.integers(0, min(len(damaged), 400), 4):
                damaged[place] = random.integers(256)
            try:
                decode_picture(bytes(damaged))
            except UnreadablePictureError:
                refused += 1
    assert 100 < refused < 1200


def test_a_picture_covers_its_bucket_about_the_middle():
    pixels = torch.zeros(1, 40, 100, 3)
    pixels[:, :, 45:55] = 1.0  # the middle column band
    fitted = fit_to_bucket(pixels, Bucket(20, 20))
    assert fitted.shape == (1, 20, 20, 3)
    assert float(fitted[0, :, 9:11].min()) > 0.9
    assert float(fitted[0, :, :6].max()) < 0.1
    assert torch.allclose(fitted, fitted.flip(2), atol=1e-5)
    assert 0.0 <= float(fitted.min()) <= float(fitted.max()) <= 1.0
    assert torch.equal(fit_to_bucket(pixels[:, :32, :64], Bucket(64, 32)), pixels[:, :32, :64])
