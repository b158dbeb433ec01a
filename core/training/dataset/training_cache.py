"""A training set whose latents and captions are encoded and on disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .cache_files import CacheFolder
from .content_digest import content_digest


@dataclass(frozen=True)
class CachedItem:
    """One picture or video.

    Attributes:
        name: File name with its folder, for messages.
        latent_key: Of the file with the latent.
        caption_key: Of the file with the encoded caption.
        empty_caption_key: Of the file with the encoded empty caption; None if captions are never dropped.
        shape: Of the latent, ``(1, C, ...)`` as the VAE gave it.
        repeats: How often it comes in an epoch.
        caption_dropout: How often the empty caption is used instead, 0 to 1.
        control_key: Of the file with the latent of the control picture; None without.
        start_key: Of the file with the latent of the first frame alone, for picture-to-video models; None
            for others.
    """

    name: str
    latent_key: str
    caption_key: str
    empty_caption_key: str | None
    shape: tuple[int, ...]
    repeats: int = 1
    caption_dropout: float = 0.0
    control_key: str | None = None
    start_key: str | None = None


@dataclass(frozen=True)
class TrainingCache:
    """The value that the cache node gives to the training node.

    Attributes:
        files: Where the encoded data is.
        items: In the order of the training set.
    """

    files: CacheFolder
    items: tuple[CachedItem, ...]

    def __len__(self) -> int:
        """Samples of one epoch."""
        return sum(item.repeats for item in self.items)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that is trained on: content, captions, encoders, repeats, order."""
        return content_digest(
            [
                [
                    item.latent_key,
                    item.caption_key,
                    item.empty_caption_key,
                    item.repeats,
                    item.caption_dropout,
                    item.control_key,
                    *([item.start_key] if item.start_key else []),
                ]
                for item in self.items
            ]
        )

    def summary(self) -> str:
        """Return one line: samples, and latents of each shape."""
        shapes = Counter("x".join(map(str, item.shape[1:])) for item in self.items)
        parts = ", ".join(f"{count} of {shape}" for shape, count in sorted(shapes.items()))
        return f"{len(self)} samples an epoch: {parts}"
