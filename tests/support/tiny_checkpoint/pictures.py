"""The real pictures that the tiny checkpoint and the demo's LoRA are trained on.

The digits are scikit-learn's copy of the UCI "Optical Recognition of Handwritten Digits" test set,
1797 pictures of 8 x 8, which its wheel ships: no network is needed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

SIZE_PX = 64
TILE_PX = 32
_MARGIN_PX = 3
_BLACK, _WHITE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_YELLOW, _BLUE = (0.98, 0.80, 0.15), (0.10, 0.15, 0.60)
PALETTES = ((_BLACK, _WHITE), (_YELLOW, _BLUE))
"""(paper, ink) colours in 0 to 1. The VAE sees both, the base model the first, the LoRA the second."""


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return every digit as a wallpaper of 2 x 2 copies of it, and what it shows.

    A wallpaper, because Wan knows positions only relative to each other: one digit that fills the
    picture needs far more training before its parts end up in their places.

    Returns:
        ``(N, 1, 64, 64)`` fp32 ink in 0 (paper) to 1 (ink), and ``(N,)`` int64 classes 0 to 9.
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    small = torch.from_numpy(digits.images.astype(np.float32) / 16.0).unsqueeze(1)
    large = F.interpolate(small, size=(TILE_PX - 2 * _MARGIN_PX,) * 2, mode="bicubic", align_corners=False)
    ink = F.pad(((large - 0.20) / 0.50).clamp(0.0, 1.0), (_MARGIN_PX,) * 4)
    return ink.repeat(1, 1, SIZE_PX // TILE_PX, SIZE_PX // TILE_PX), torch.from_numpy(
        digits.target.astype(np.int64)
    )


def paint(ink: torch.Tensor, palette: int | torch.Tensor) -> torch.Tensor:
    """Paint digits in one of the `PALETTES`.

    Args:
        ink: ``(N, 1, H, W)`` fp32 in 0 to 1.
        palette: Index of the palette, or ``(N,)`` int64 with one for each picture.

    Returns:
        ``(N, 3, H, W)`` fp32 in 0 to 1.
    """
    indices = torch.as_tensor(palette).expand(len(ink))
    paper, pen = torch.tensor(PALETTES)[indices].unbind(1)
    return paper[:, :, None, None] * (1.0 - ink) + pen[:, :, None, None] * ink


def paint_base(ink: torch.Tensor) -> torch.Tensor:
    """Return the pictures that the base model learns: white digits on black."""
    return paint(ink, 0)


def paint_style(ink: torch.Tensor) -> torch.Tensor:
    """Return the pictures that the demo's LoRA learns: blue digits on yellow."""
    return paint(ink, 1)


def save_style_pictures(folder: Path, digit: int, number: int) -> list[Path]:
    """Write ``number`` pictures of one digit in the LoRA's style as PNG files and return their paths."""
    ink, classes = load_digits()
    chosen = paint_style(ink[classes == digit][:number])
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, picture in enumerate(chosen):
        pixels = (picture.permute(1, 2, 0) * 255.0).round().to(torch.uint8).numpy()
        paths.append(folder / f"digit_{digit}_{index:02}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths
