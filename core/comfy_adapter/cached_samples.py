"""Samples of a training cache, read from disk when a step needs them.

A caption of a large text encoder takes 4 to 30 MB, so a set of thousands does not fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import RequestError, TrainingError
from ..training import Sample, SampleSource
from ..training.dataset import BrokenCacheError, CachedItem, CacheFolder, TrainingCache
from .caption_checks import check_caption, check_start_image
from .training_inputs import Caption, Guidance, read_samples, scale_latent, set_guidance


@dataclass(frozen=True)
class StoredSample:
    """One cached picture as a ``SampleSource``.

    Attributes:
        model: The MODEL; decides the latent's scale.
        files: Where the cache is.
        item: What to read.
        shape: Of the latent as the model takes it, ``(1, C, ...)``.
        guidance: See ``set_guidance``.
    """

    model: Any
    files: CacheFolder
    item: CachedItem
    shape: tuple[int, ...]
    guidance: Guidance | None = None

    def read(self) -> Sample:
        """Return the sample.

        Raises:
            TrainingError: If a cache file is gone or damaged.
        """
        latent = scale_latent(self.model, self._tensors(self.item.latent_key)[0]["latent"].float())
        references: dict[str, Any] = {}
        if self.item.control_key is not None:
            # As ComfyUI's own nodes pass them: unscaled, the model scales them itself.
            references = {"reference_latents": [self._tensors(self.item.control_key)[0]["latent"].float()]}
        if self.item.start_key is not None:
            references |= _start(self._tensors(self.item.start_key)[0]["latent"].float())
        condition = Caption(self._caption(self.item.caption_key, references), latent)
        unconditional = None
        if self.item.empty_caption_key is not None:
            unconditional = Caption(self._caption(self.item.empty_caption_key, references), latent)
        return Sample(latent, condition, unconditional, self.item.caption_dropout)

    def _caption(self, key: str, references: dict[str, Any]) -> list:
        tensors, values = self._tensors(key)
        cond = tensors.pop("cond")
        entry = [cond, {**values, **tensors, **references}]
        check_caption(self.model, self.item.name, entry)
        return set_guidance(entry, self.guidance)

    def _tensors(self, key: str) -> tuple[dict, dict]:
        try:
            entry = self.files.read(key)
        except BrokenCacheError as error:
            raise TrainingError(
                f"the cached data of {self.item.name} cannot be used: {error}. Run Cache Training Data "
                "again; it makes broken files anew."
            ) from error
        return entry.tensors, entry.values


def _start(latent: Tensor) -> dict[str, Tensor]:
    """Return what ComfyUI's WanImageToVideo adds to a caption: the start, and where the video is unknown."""
    mask = latent.new_ones((1, 1, *latent.shape[2:]))
    mask[:, :, 0] = 0.0
    return {"concat_latent_image": latent, "concat_mask": mask}


def read_examples(
    model: Any,
    latents: Sequence[dict],
    positive: Sequence[list],
    data: TrainingCache | None,
    *,
    guidance: Guidance | None = None,
) -> Sequence[SampleSource]:
    """Return the samples of either form: a training cache, or latents with captions.

    Raises:
        RequestError: If both or neither are given, or something does not fit.
    """
    if data is None:
        return read_samples(model, latents, positive, guidance=guidance)
    if latents or positive:
        raise RequestError(
            "training_data was given together with latents or positive",
            limit="A training learns from one of them",
            way_out="Disconnect latents and positive, or training_data",
        )
    return read_cache(model, data, guidance=guidance)


def read_cache(model: Any, cache: TrainingCache, *, guidance: Guidance | None = None) -> list[SampleSource]:
    """Return the samples of one epoch; a repeated picture comes several times.

    Args:
        model: The MODEL.
        cache: From the cache node.
        guidance: See ``set_guidance``.

    Raises:
        RequestError: If the set is empty or a file does not fit the model.
    """
    if not cache.items:
        raise RequestError(
            "a training cache without pictures was given",
            limit="Training needs one",
            way_out="Connect Cache Training Data behind Load Training Folder",
        )
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    samples: list[SampleSource] = []
    for item in cache.items:
        if item.shape not in shapes:
            # One of each shape is read before anything runs: the VAE must have been this model's.
            sample = StoredSample(model, cache.files, item, item.shape, guidance).read()
            check_start_image(model, item.name, sample.condition.entry)
            shapes[item.shape] = sample.shape
        samples += [StoredSample(model, cache.files, item, shapes[item.shape], guidance)] * item.repeats
    return samples
