"""The only place that imports ComfyUI: shows its models to the engines and the engines to its nodes.

The public names are imported on first use, because a worker process imports ``jobs`` from here and
must put ComfyUI's settings in place before any module that reads them is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from .acceleration import ACCELERATIONS, check_acceleration
    from .conditioning import (
        conditioning_files,
        conditioning_version,
        load_conditioning,
        register_conditioning_folder,
        save_conditioning,
    )
    from .control_prompts import AUTO_PROMPT, CONTROL_PROMPTS
    from .degree_planner import DegreeAdvice, plan_degrees
    from .devices import check_gpus
    from .diffusion_files import diffusion_model_names
    from .family_defaults import AUTO, AUTO_GUIDANCE, NOISE_RANGES, FilledWidgets, fill_auto
    from .model_build import WEIGHT_DTYPES
    from .model_offload import load_offloaded, offload_model
    from .parallel_clip import make_parallel_clip
    from .parallel_model import check_degrees, make_parallel
    from .parallel_routes import register_parallel_routes
    from .parallel_vae import make_parallel_vae
    from .sampling import sample_parallel, sampler_names, scheduler_names
    from .train_lora import COMPUTE_DTYPES, SAVE_DTYPES, TrainedLora, TrainingRequest, run_lora_training
    from .training_cache import NO_START, START_IMAGES, CacheResult, cache_training_set
    from .training_folder import (
        FAMILY_NAMES,
        NO_CONTROL,
        input_subfolders,
        load_input_folder,
        training_folder_version,
        training_set_images,
    )
    from .training_preview import PreviewInputs
    from .training_routes import register_training_routes
    from .training_states import resume_choices, resume_version
    from .user_settings import settings_version
    from .worker_groups import close_workers

_HOMES = {
    "AUTO_PROMPT": "control_prompts",
    "CONTROL_PROMPTS": "control_prompts",
    "NO_CONTROL": "training_folder",
    "NO_START": "training_cache",
    "START_IMAGES": "training_cache",
    "ACCELERATIONS": "acceleration",
    "check_acceleration": "acceleration",
    "PreviewInputs": "training_preview",
    "AUTO": "family_defaults",
    "AUTO_GUIDANCE": "family_defaults",
    "NOISE_RANGES": "family_defaults",
    "FilledWidgets": "family_defaults",
    "fill_auto": "family_defaults",
    "COMPUTE_DTYPES": "train_lora",
    "CacheResult": "training_cache",
    "DegreeAdvice": "degree_planner",
    "FAMILY_NAMES": "training_folder",
    "SAVE_DTYPES": "train_lora",
    "TrainedLora": "train_lora",
    "TrainingRequest": "train_lora",
    "cache_training_set": "training_cache",
    "check_degrees": "parallel_model",
    "check_gpus": "devices",
    "close_workers": "worker_groups",
    "conditioning_files": "conditioning",
    "conditioning_version": "conditioning",
    "input_subfolders": "training_folder",
    "load_conditioning": "conditioning",
    "load_input_folder": "training_folder",
    "make_parallel": "parallel_model",
    "make_parallel_clip": "parallel_clip",
    "make_parallel_vae": "parallel_vae",
    "WEIGHT_DTYPES": "model_build",
    "diffusion_model_names": "diffusion_files",
    "load_offloaded": "model_offload",
    "offload_model": "model_offload",
    "plan_degrees": "degree_planner",
    "register_conditioning_folder": "conditioning",
    "register_parallel_routes": "parallel_routes",
    "register_training_routes": "training_routes",
    "resume_choices": "training_states",
    "resume_version": "training_states",
    # Not "train_lora": importing the module of that name would put the module in the function's place.
    "run_lora_training": "train_lora",
    "sample_parallel": "sampling",
    "sampler_names": "sampling",
    "settings_version": "user_settings",
    "save_conditioning": "conditioning",
    "scheduler_names": "sampling",
    "training_folder_version": "training_folder",
    "training_set_images": "training_folder",
}

__all__ = [
    "AUTO_PROMPT",
    "CONTROL_PROMPTS",
    "NO_CONTROL",
    "NO_START",
    "START_IMAGES",
    "ACCELERATIONS",
    "check_acceleration",
    "AUTO",
    "AUTO_GUIDANCE",
    "NOISE_RANGES",
    "FilledWidgets",
    "fill_auto",
    "COMPUTE_DTYPES",
    "FAMILY_NAMES",
    "CacheResult",
    "DegreeAdvice",
    "SAVE_DTYPES",
    "PreviewInputs",
    "RequestError",
    "TrainedLora",
    "TrainingRequest",
    "cache_training_set",
    "check_degrees",
    "check_gpus",
    "close_workers",
    "conditioning_files",
    "conditioning_version",
    "input_subfolders",
    "load_conditioning",
    "load_input_folder",
    "make_parallel",
    "make_parallel_clip",
    "make_parallel_vae",
    "WEIGHT_DTYPES",
    "diffusion_model_names",
    "load_offloaded",
    "offload_model",
    "plan_degrees",
    "register_conditioning_folder",
    "register_parallel_routes",
    "register_training_routes",
    "resume_choices",
    "resume_version",
    "sample_parallel",
    "sampler_names",
    "settings_version",
    "save_conditioning",
    "scheduler_names",
    "run_lora_training",
    "training_folder_version",
    "training_set_images",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
