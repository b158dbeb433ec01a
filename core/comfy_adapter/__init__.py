"""The only place that imports ComfyUI: shows its models to the engines and the engines to its nodes."""

from ..errors import RequestError
from .conditioning import (
    conditioning_files,
    conditioning_version,
    load_conditioning,
    register_conditioning_folder,
    save_conditioning,
)
from .parallel_model import check_degrees, make_parallel
from .sampling import sample_parallel, sampler_names, scheduler_names
from .worker_groups import close_workers

__all__ = [
    "RequestError",
    "check_degrees",
    "close_workers",
    "conditioning_files",
    "conditioning_version",
    "load_conditioning",
    "make_parallel",
    "register_conditioning_folder",
    "sample_parallel",
    "save_conditioning",
    "sampler_names",
    "scheduler_names",
]
