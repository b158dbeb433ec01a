"""What a training set holds: one entry a picture or video, read again only when it is needed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import RequestError
from ..data import generator
from .buckets import Bucket
from .pictures import UnreadablePictureError, decode_picture, fit_to_bucket
from .videos import decode_frames


@dataclass(frozen=True)
class MediaItem:
    """One picture or video, as it is trained on.

    Attributes:
        name: File name with its folder, for messages.
        path: The file.
        digest: SHA-256 of the file's content, hexadecimal.
        caption: Its caption.
        bucket: The size it is brought to.
        num_frames: 1 for a picture.
        rate_hz: Frames a second taken from a video; 0 takes each.
        mirrored: Whether left and right are exchanged.
        repeats: How often it comes in an epoch.
        caption_dropout: How often it is trained without its caption, 0 to 1.
        control: The picture that an edit model is given to make this one of; None for other models.
    """

    name: str
    path: Path
    digest: str
    caption: str
    bucket: Bucket
    num_frames: int = 1
    rate_hz: float = 0.0
    is_video: bool = False
    mirrored: bool = False
    repeats: int = 1
    caption_dropout: float = 0.0
    control: MediaItem | None = None


@dataclass(frozen=True)
class TrainingSet:
    """Pictures and videos with captions; the value that the dataset nodes pass on.

    Attributes:
        items: In the order of their names; mirrored ones beside their originals.
    """

    items: tuple[MediaItem, ...]

    def __len__(self) -> int:
        """Samples of one epoch."""
        return sum(item.repeats for item in self.items)

    def summary(self) -> str:
        """Return one line: how many, and how many in each bucket."""
        sizes = Counter((item.bucket, item.num_frames) for item in self.items)
        parts = [
            f"{count} at {bucket}" + (f" x {frames} frames" if frames > 1 else "")
            for (bucket, frames), count in sorted(sizes.items())
        ]
        files = len({item.path for item in self.items})
        controlled = sum(item.control is not None for item in self.items)
        controls = f", {controlled} with a control picture" if controlled else ""
        return f"{files} files, {len(self)} samples an epoch: {', '.join(parts)}{controls}"


def join_sets(*sets: TrainingSet | None) -> TrainingSet:
    """Return one set of all; None stands for none."""
    return TrainingSet(tuple(item for one in sets if one is not None for item in one.items))


def read_pixels(item: MediaItem) -> Tensor:
    """Return the item's pixels in its bucket, ``(F, H, W, 3)`` fp32 in 0 to 1.

    Raises:
        RequestError: If the file changed or went away since the set was made.
    """
    try:
        content = item.path.read_bytes()
    except OSError as error:
        raise _changed(item, str(error)) from error
    if hashlib.sha256(content).hexdigest() != item.digest:
        raise _changed(item, "its content is another")
    try:
        frames = decode_media(content, item)
    except UnreadablePictureError as error:
        raise _changed(item, str(error)) from error
    fitted = fit_to_bucket(frames, item.bucket)
    return fitted.flip(2) if item.mirrored else fitted


def decode_media(content: bytes, item: MediaItem) -> Tensor:
    """Return the frames of the file ``content`` in their own size, ``(F, H, W, 3)``.

    Raises:
        UnreadablePictureError: Saying why it cannot be used.
    """
    if item.is_video:
        return decode_frames(content, num_frames=item.num_frames, rate_hz=item.rate_hz)
    return decode_picture(content)


def _changed(item: MediaItem, why: str) -> RequestError:
    return RequestError(
        f"{item.name} is not what it was when the folder was loaded ({why})",
        limit="What is trained on must be what was checked",
        way_out="Run the workflow again, so that the folder is loaded again",
    )


def plain_examples(training_set: TrainingSet, *, seed: int) -> Iterator[tuple[Tensor, str]]:
    """Yield ``(pixels (F, H, W, 3), caption)`` for each sample of an epoch, for nodes that know no set.

    A caption is dropped once for all, by the seed and the sample's name: such nodes draw nothing.

    Raises:
        RequestError: If a sample has a control picture, which would be lost.
    """
    controlled = next((item.name for item in training_set.items if item.control is not None), None)
    if controlled is not None:
        raise RequestError(
            f"{controlled} has a control picture",
            limit="Lists of pictures and captions have no place for it",
            way_out="Connect Cache Training Data instead, or load the folder without control_folder",
        )
    for item in training_set.items:
        pixels = read_pixels(item)
        for repeat in range(item.repeats):
            random = generator(seed, "caption dropout", item.name, item.mirrored, repeat)
            dropped = float(torch.rand((), generator=random)) < item.caption_dropout
            yield pixels, "" if dropped else item.caption
