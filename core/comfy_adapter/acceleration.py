"""Ways to run the same forward in a worker faster: recorded as a CUDA graph, compiled, or both."""

from __future__ import annotations

import enum
import importlib.util

from ..errors import RequestError


class Acceleration(enum.Enum):
    """What a worker does besides sharing the work; the value is what users choose."""

    AUTO = "auto"
    NONE = "none"
    GRAPHS = "cuda graphs"
    COMPILE = "torch.compile"
    COMPILE_GRAPHS = "torch.compile + cuda graphs"

    @property
    def compiles(self) -> bool:
        """Whether the model's blocks are compiled."""
        return self in (Acceleration.COMPILE, Acceleration.COMPILE_GRAPHS)

    @property
    def records(self) -> bool:
        """Whether forwards are recorded as CUDA graphs; automatically, if they can be."""
        return self in (Acceleration.AUTO, Acceleration.GRAPHS, Acceleration.COMPILE_GRAPHS)


ACCELERATIONS = tuple(each.value for each in Acceleration)


def check_acceleration(value: str, devices: tuple[str, ...]) -> Acceleration:
    """Return what ``value`` stands for, if workers on ``devices`` can do it.

    Raises:
        RequestError: Otherwise.
    """
    if value not in ACCELERATIONS:
        raise RequestError(
            f"acceleration={value!r} was asked",
            limit=f"There are {', '.join(ACCELERATIONS)}",
            way_out="Choose one of them",
        )
    chosen, on_gpu = Acceleration(value), devices[0] != "cpu"
    if chosen is Acceleration.AUTO and not on_gpu:
        return Acceleration.NONE
    if chosen.records and not on_gpu:
        raise RequestError(
            f"acceleration={value!r} was asked",
            limit="CUDA graphs need CUDA GPUs, and ComfyUI runs on the CPU",
            way_out="Set acceleration to none",
        )
    if chosen.compiles and on_gpu and importlib.util.find_spec("triton") is None:
        raise RequestError(
            f"acceleration={value!r} was asked",
            limit="torch.compile needs the Python package triton on GPUs, and it is not installed",
            way_out="Install triton, or set acceleration to none or cuda graphs",
        )
    return chosen


def check_streamed(chosen: Acceleration) -> None:
    """Refuse what weights that stream cannot do: they are evaluated as they come.

    Raises:
        RequestError: If something else than ``auto`` or ``none`` was asked.
    """
    if chosen not in (Acceleration.AUTO, Acceleration.NONE):
        raise RequestError(
            f"acceleration={chosen.value!r} was asked",
            limit="The weights of this model stream through the workers' VRAM",
            way_out="Set acceleration to auto or none, or use more GPUs so that the weights fit",
        )
