"""A folder of pictures and videos with captions by file name, checked as a whole.

``cat.png`` belongs to ``cat.txt``. Everything wrong with any file is reported in one error, so that a
person mends the folder once. Nothing outside the root folder is ever read.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath

from ...errors import RequestError
from ..number_ranges import Range, check_numbers
from .buckets import MAX_ASPECT, Bucket, choose_bucket, list_buckets
from .items import MediaItem, TrainingSet, decode_media
from .pictures import PICTURE_SUFFIXES, UnreadablePictureError, cover_scale
from .videos import VIDEO_SUFFIXES

CAPTION_SUFFIX = ".txt"
_NUMBERS = {
    "resolution_px": Range(1, whole=True, name="resolution"),
    "step_px": Range(1, whole=True),
    "repeats": Range(1, whole=True),
    "caption_dropout": Range(0, 1),
    "max_upscale": Range(1),
    "video_frames": Range(1, whole=True),
    "video_rate_hz": Range(0),
}


@dataclass(frozen=True)
class FolderOptions:
    """How a folder becomes a training set.

    Attributes:
        resolution_px: Side of the square bucket; all buckets have about its area.
        step_px: Bucket sides are multiples of it.
        repeats: How often each file comes in an epoch.
        caption_dropout: How often a sample is trained without its caption, 0 to 1.
        mirror: Add each file once more with left and right exchanged.
        default_caption: For files without a caption; empty means that there must be one.
        max_upscale: The most that a picture may be enlarged by.
        video_frames: Frames taken from each video.
        video_rate_hz: Frames a second; 0 takes each frame of the file.
        control_folder: For edit models: the folder, relative to the same root, with the picture that each
            one is made of, under the same name (``cat.png`` there for ``cat.jpg`` here); empty: none.
    """

    resolution_px: int = 1024
    step_px: int = 64
    repeats: int = 1
    caption_dropout: float = 0.0
    mirror: bool = False
    default_caption: str = ""
    max_upscale: float = 1.25
    video_frames: int = 17
    video_rate_hz: float = 16.0
    control_folder: str = ""

    def __post_init__(self) -> None:
        check_numbers(self, _NUMBERS)


def order_folders(root: Path, names: Iterable[str]) -> list[str]:
    """Return the folders below ``root`` in order: pictures with captions, then pictures, then all others."""
    return sorted(names, key=lambda name: (_unlikeness(root, name), name))


def _unlikeness(root: Path, name: str) -> int:
    """How little a folder looks like training data, by its files' names: 0 to 2."""
    folder = root / name
    if not folder.resolve().is_relative_to(root.resolve()) or not folder.is_dir():
        return 2
    suffixes = {path.suffix.lower() for path in folder.iterdir()}
    if not suffixes & (PICTURE_SUFFIXES | VIDEO_SUFFIXES):
        return 2
    return 0 if CAPTION_SUFFIX in suffixes else 1


def load_training_folder(root: Path, name: str, options: FolderOptions) -> TrainingSet:
    """Return the training set in the folder ``name`` below ``root``.

    Args:
        root: ComfyUI's input folder; nothing outside it is read.
        name: The folder, relative to ``root``. Its subfolders are not part of it.
        options: See ``FolderOptions``.

    Raises:
        RequestError: If the folder is not below ``root``, or naming every file that cannot be used.
    """
    buckets = list_buckets(resolution_px=options.resolution_px, step_px=options.step_px)
    folder = resolve_folder(root, name)
    media, captions, offenders = _pair_files(folder)
    controls = _pair_controls(root, name, options, media, offenders)
    items: list[MediaItem] = []
    for path in media:
        caption = ""
        try:
            _check_inside(path, root)
            caption = _read_caption(captions.get(path.stem), root, options)
        except (UnreadablePictureError, OSError) as error:
            offenders[path.name].append(str(error))
        try:
            item = _inspect(path, root, options, buckets)
        except (UnreadablePictureError, OSError) as error:
            if str(error) not in offenders[path.name]:
                offenders[path.name].append(str(error))
            continue
        control = None
        if path.stem in controls:
            other = controls[path.stem]
            try:
                control = _inspect(other, root, options, buckets)
            except (UnreadablePictureError, OSError) as error:
                offenders[path.name].append(f"has a control picture ({other.name}) that {error}")
                continue
            control = replace(
                control, name=f"{options.control_folder}/{other.name}", repeats=1, caption_dropout=0.0
            )
        items.append(replace(item, name=f"{name}/{path.name}", caption=caption, control=control))
        if options.mirror:
            mirrored = None if control is None else replace(control, mirrored=True)
            items.append(replace(items[-1], mirrored=True, control=mirrored))
    _refuse_offenders(name, offenders, empty=not media)
    return TrainingSet(tuple(items))


def _inspect(path: Path, root: Path, options: FolderOptions, buckets: list[Bucket]) -> MediaItem:
    """Return the file as an item without name and caption, having decoded all that training takes of it."""
    _check_inside(path, root)
    content = path.read_bytes()
    is_video = path.suffix.lower() in VIDEO_SUFFIXES
    item = MediaItem(
        name=path.name,
        path=path,
        digest=hashlib.sha256(content).hexdigest(),
        caption="",
        bucket=buckets[0],
        num_frames=options.video_frames if is_video else 1,
        rate_hz=options.video_rate_hz if is_video else 0.0,
        is_video=is_video,
        repeats=options.repeats,
        caption_dropout=options.caption_dropout,
    )
    height, width = decode_media(content, item).shape[1:3]
    _check_shape(width, height)
    bucket = choose_bucket(width, height, buckets)
    _check_size(width, height, cover_scale(width, height, bucket), options, f"{bucket}")
    return replace(item, bucket=bucket)


def resolve_folder(root: Path, name: str) -> Path:
    """Return the folder ``name`` below ``root``.

    Raises:
        RequestError: If it is not a folder below ``root``, also by way of a link.
    """
    parts = PureWindowsPath(name)  # knows both kinds of slashes, and drives
    escapes = not name.strip() or "\0" in name or parts.drive or parts.root or ".." in parts.parts
    resolved_root = root.resolve()
    folder = resolved_root if escapes else (root / Path(*parts.parts)).resolve()
    if escapes or not folder.is_relative_to(resolved_root) or folder == resolved_root:
        raise RequestError(
            f"folder={name!r} was asked",
            limit="Training data is read from folders inside ComfyUI's input folder only, without '..' and "
            "without links that lead out of it",
            way_out="Copy the pictures into a folder below input and name that folder",
        )
    if not os.path.isdir(folder):  # also of a name that no file system takes
        raise RequestError(
            f"folder={name!r} was asked",
            limit="There is no such folder inside ComfyUI's input folder",
            way_out="Check its name, or copy the pictures there",
        )
    return folder


def folder_version(root: Path, name: str) -> str:
    """Return a text that changes whenever a file of the folder does, so that it is loaded again."""
    files = sorted(path for path in resolve_folder(root, name).iterdir() if path.is_file())
    states = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def _pair_files(folder: Path) -> tuple[list[Path], dict[str, Path], defaultdict[str, list[str]]]:
    """Return pictures and videos, captions by stem, and what is wrong with the names."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    media = [path for path in files if path.suffix.lower() in PICTURE_SUFFIXES | VIDEO_SUFFIXES]
    texts = [path for path in files if path.suffix.lower() == CAPTION_SUFFIX]
    captions = {path.stem: path for path in texts}
    offenders: defaultdict[str, list[str]] = defaultdict(list)
    for path in texts:
        if captions[path.stem] != path:
            offenders[path.name].append(f"is a second caption beside {captions[path.stem].name}")
    by_stem: defaultdict[str, list[Path]] = defaultdict(list)
    for path in media:
        by_stem[path.stem.lower()].append(path)
    for same in by_stem.values():
        for path in same if len(same) > 1 else []:
            others = ", ".join(other.name for other in same if other != path)
            offenders[path.name].append(f"has the same name as {others}, so a caption would belong to both")
    stems = {path.stem for path in media}
    for path in [path for stem, path in captions.items() if stem not in stems]:
        offenders[path.name].append("is a caption without a picture")
    return media, captions, offenders


def _pair_controls(
    root: Path, name: str, options: FolderOptions, media: list[Path], offenders: defaultdict[str, list[str]]
) -> dict[str, Path]:
    """Return the control pictures by stem; whatever has no partner on either side is an offender."""
    if not options.control_folder:
        return {}
    folder = resolve_folder(root, options.control_folder)
    if folder == resolve_folder(root, name):
        raise RequestError(
            f"control_folder={options.control_folder!r} was asked for folder={name!r}",
            limit="Pictures made of themselves would teach nothing",
            way_out="Put the control pictures into a folder of their own",
        )
    files, _, names = _pair_files(folder)
    where = options.control_folder
    for file, reasons in names.items():
        offenders[f"{where}/{file}"] += [why for why in reasons if "caption without" not in why]
    stems = {path.stem for path in media}
    for path in files:
        if path.stem not in stems:
            offenders[f"{where}/{path.name}"].append("is a control picture without a picture of its name")
        elif path.suffix.lower() in VIDEO_SUFFIXES:
            offenders[f"{where}/{path.name}"].append("is a video, and a control has to be a picture")
    controls = {path.stem: path for path in files}
    for path in media:
        if path.stem not in controls:
            offenders[path.name].append(f"has no control picture in {where}")
    return controls


def _check_inside(path: Path, root: Path) -> None:
    if not path.resolve().is_relative_to(root.resolve()):
        raise UnreadablePictureError("is a link that leads out of ComfyUI's input folder")
    if not path.is_file():
        raise UnreadablePictureError("is not a file")


def _read_caption(path: Path | None, root: Path, options: FolderOptions) -> str:
    caption = ""
    if path is not None:
        try:
            _check_inside(path, root)
            caption = path.read_text(encoding="utf-8-sig").strip()
            if "\0" in caption:  # UTF-16 of plain letters is valid UTF-8, with a NUL after each
                raise UnreadablePictureError("is not UTF-8 text")
        except UnicodeDecodeError as error:
            raise UnreadablePictureError(f"has a caption ({path.name}) that is not UTF-8 text") from error
        except UnreadablePictureError as error:
            raise UnreadablePictureError(f"has a caption ({path.name}) that {error}") from error
    caption = caption or options.default_caption.strip()
    if not caption:
        where = "is empty" if path is not None else "is missing"
        raise UnreadablePictureError(f"has no caption: its {CAPTION_SUFFIX} file {where}")
    return caption


def _check_shape(width_px: int, height_px: int) -> None:
    aspect = max(width_px / height_px, height_px / width_px)
    if aspect > MAX_ASPECT:
        raise UnreadablePictureError(
            f"is {width_px}x{height_px}, longer than {MAX_ASPECT:g}:1; crop it to what matters"
        )


def _check_size(width_px: int, height_px: int, scale: float, options: FolderOptions, bucket: str) -> None:
    # A hair above the limit is a rounded pixel, not a small picture.
    if scale > options.max_upscale * (1 + 1e-6):
        raise UnreadablePictureError(
            f"is too small: {width_px}x{height_px} would be enlarged {scale:.2f} times to {bucket}, the "
            f"limit is {options.max_upscale:g}"
        )


def _refuse_offenders(name: str, offenders: dict[str, list[str]], *, empty: bool) -> None:
    offenders = {file: reasons for file, reasons in offenders.items() if reasons}
    if empty and not offenders:
        raise RequestError(
            f"folder {name!r} was asked",
            limit="It holds no pictures and no videos (subfolders are not searched)",
            way_out="Put pictures with captions (cat.png, cat.txt) there, or name another folder",
        )
    if offenders:
        lines = [f"{file} {'; '.join(reasons)}" for file, reasons in sorted(offenders.items())]
        raise RequestError(
            f"folder {name!r} has {len(lines)} files that cannot be trained on:\n" + "\n".join(lines) + "\n",
            limit="Every picture needs a readable file of its own name, a caption and enough pixels",
            way_out="Mend or remove them; default_caption stands in for missing captions, a lower resolution "
            "or a higher max_upscale allows small pictures",
        )
