"""Nodes that make a MODEL compute on several GPUs."""

from __future__ import annotations

import math
from typing import Any

from comfy_api.latest import io

from ..core.comfy_adapter import (
    ACCELERATIONS,
    RequestError,
    check_acceleration,
    check_degrees,
    make_parallel,
    settings_version,
)
from .schema import known


def degree_inputs() -> list[Any]:
    """Return the inputs that every parallel node has: the degrees, and how workers evaluate the model."""
    return [
        io.Int.Input(
            "gpus",
            default=2,
            min=0,
            max=64,
            tooltip="How many GPUs compute, one worker process each. Must equal the product of all degrees.",
        ),
        io.Int.Input(
            "cfg_degree",
            default=1,
            min=0,
            max=64,
            tooltip="CFG parallel: positive and negative prompt at the same time on different GPUs. "
            "2 helps whenever cfg is above 1.",
        ),
        io.Int.Input(
            "ulysses_degree",
            default=2,
            min=0,
            max=64,
            tooltip="Ulysses: GPUs that share one picture or video. At most the model's attention heads.",
        ),
        # Optional and last, so that prompts and workflows saved without it keep working.
        io.Int.Input(
            "ring_degree",
            default=1,
            min=0,
            max=64,
            optional=True,
            tooltip="Ring attention: GPUs that share one picture or video, with any number of heads. "
            "Together with Ulysses their product does. Slower than Ulysses on fast links.",
        ),
        io.Int.Input(
            "tensor_parallel_degree",
            default=1,
            min=0,
            max=64,
            optional=True,
            tooltip="Tensor parallel: GPUs that share the weights, for models too large for one. At most the "
            "model's attention heads. Needs fast links; for speed alone Ulysses is better.",
        ),
        io.String.Input(
            "ray_address",
            default="",
            optional=True,
            tooltip="Empty: the GPUs of this machine. host:port of a Ray cluster it is a node of, or auto: "
            "the GPUs of all its machines. Ray trusts its whole network: see docs/clusters.md.",
        ),
        io.Combo.Input(
            "acceleration",
            options=list(ACCELERATIONS),
            default=ACCELERATIONS[0],
            optional=True,
            tooltip="auto and cuda graphs: steps of a size seen before are replayed in one launch, with the "
            "same result; auto where the model can. torch.compile: faster kernels after a slow first step; "
            "the last bits differ. none: each step is launched kernel by kernel.",
        ),
        io.Int.Input(
            "batch_degree",
            default=1,
            min=0,
            max=64,
            optional=True,
            tooltip="Batch parallel: samples of one batch at the same time on different GPUs. Helps whenever "
            "the latent holds several pictures.",
        ),
    ]


def degree_problem(
    gpus: int | None,
    cfg_degree: int | None,
    ulysses_degree: int | None,
    ring_degree: int | None,
    tensor_parallel_degree: int | None,
    batch_degree: int | None,
    ray_address: str | None,
    acceleration: str | None,
) -> bool | str:
    """Return True if the inputs fit the machine (or are not known yet), else what is wrong."""
    if gpus is None or cfg_degree is None or ulysses_degree is None or ray_address is None:
        return True
    optional = _fitting_degrees(
        gpus, (cfg_degree, ulysses_degree), (ring_degree, tensor_parallel_degree, batch_degree)
    )
    try:
        _, devices = check_degrees(
            gpus=gpus,
            cfg_degree=cfg_degree,
            ulysses_degree=ulysses_degree,
            ring_degree=optional[0],
            tensor_parallel_degree=optional[1],
            batch_degree=optional[2],
            ray_address=ray_address,
        )
        if acceleration is not None:
            check_acceleration(acceleration, devices)
    except RequestError as error:
        return str(error)
    return True


def _fitting_degrees(gpus: int, required: tuple[int, ...], optional: tuple[int | None, ...]) -> list[int]:
    """Return the optional degrees; one that is None becomes what fits the others if any does, else 1.

    A degree left out (1) or linked looks alike here.
    """
    known = [*required, *(degree for degree in optional if degree is not None)]
    missing = 1
    if all(isinstance(value, int) and value > 0 for value in (gpus, *known)):
        quotient, rest = divmod(gpus, math.prod(known))
        missing = quotient if quotient and not rest else 1
    found = []
    for degree in optional:
        found.append(missing if degree is None else degree)
        missing = 1 if degree is None else missing
    return found


class ParallelModel(io.ComfyNode):
    """Make a MODEL compute on several GPUs, for any sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="FerryParallelModel",
            display_name="Parallel Model",
            category="ferry/parallel",
            description="Runs the model on several GPUs at once. Put it after LoRAs, before any sampler.",
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model, with its LoRAs applied."),
                *degree_inputs(),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The same model, computed in parallel.")],
            **known(
                io.Schema, search_aliases=["multi gpu", "multigpu", "ulysses", "sequence parallel", "xdit"]
            ),
        )

    @classmethod
    def validate_inputs(
        cls,
        gpus: int | None = None,
        cfg_degree: int | None = None,
        ulysses_degree: int | None = None,
        ring_degree: int | None = None,
        tensor_parallel_degree: int | None = None,
        batch_degree: int | None = None,
        ray_address: str | None = "",
        acceleration: str | None = None,
    ) -> bool | str:
        """Refuse degrees that do not fit before the prompt starts."""
        return degree_problem(
            gpus,
            cfg_degree,
            ulysses_degree,
            ring_degree,
            tensor_parallel_degree,
            batch_degree,
            ray_address,
            acceleration,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        """Make the MODEL anew when other GPUs were chosen in the settings."""
        return settings_version("gpus")

    @classmethod
    def execute(cls, model: Any, **settings: Any) -> io.NodeOutput:
        """Return the parallel MODEL."""
        return io.NodeOutput(make_parallel(model, **settings))
