"""The only place that imports ComfyUI: shows its models to the engines and the engines to its nodes."""

from ..errors import RequestError
from .parallel_model import check_degrees, make_parallel
from .sampling import sample_parallel, sampler_names, scheduler_names
from .worker_groups import close_workers

__all__ = [
    "RequestError",
    "check_degrees",
    "close_workers",
    "make_parallel",
    "sample_parallel",
    "sampler_names",
    "scheduler_names",
]
