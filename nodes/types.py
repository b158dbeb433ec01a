"""Sockets of the pack's own values."""

from __future__ import annotations

from comfy_api.latest import io

TrainingSetSocket = io.Custom("FERRY_TRAINING_SET")
"""A ``TrainingSet``: files, captions and buckets."""

TrainingCacheSocket = io.Custom("FERRY_TRAINING_CACHE")
"""A ``TrainingCache``: encoded latents and captions on disk."""
