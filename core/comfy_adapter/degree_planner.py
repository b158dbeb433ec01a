"""Propose degrees for a sampling: its first denoiser call is caught and counted instead of computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RequestError
from ..parallel import (
    DegreePlan,
    ModelPlan,
    ParallelDims,
    ParallelMethod,
    TensorShards,
    choose_degrees,
    count_work,
    head_count,
)
from ..plans import find_plan
from .gpu_speed import describe_machine
from .model_export import class_path, describe_model, innermost_forward
from .parallel_model import ParallelPatcher, attach_run
from .quantized import can_cut
from .sampling import check_conditioning, check_latent
from .worker_model import build_empty_model


@dataclass(frozen=True)
class DegreeAdvice:
    """What ``plan_degrees`` proposes.

    Args:
        gpus: How many GPUs are worth using.
        dims: Their degrees.
        text: Why, and what else was considered; for people.
    """

    gpus: int
    dims: ParallelDims
    text: str


def plan_degrees(
    model: Any, *, positive: list, negative: list, latent: dict[str, Any], cfg: float, max_gpus: int
) -> DegreeAdvice:
    """Return the degrees for sampling ``latent``; starts no worker and loads no weights.

    Args:
        model: A MODEL with its LoRAs, not parallel.
        positive: CONDITIONING.
        negative: CONDITIONING; counts unless ``cfg`` is 1.
        latent: LATENT of the size that will be sampled.
        cfg: Guidance scale.
        max_gpus: The most GPUs to use.

    Raises:
        RequestError: If the model has no plan, holds what workers cannot honour, fits in no way, or reads
            values where it could be counted.
    """
    check_latent(latent)
    check_conditioning(positive, name="positive")
    check_conditioning(negative, name="negative")
    machine = describe_machine(max_gpus)
    plan = find_plan(class_path(model.model.diffusion_model))
    arguments = _first_call(model, positive[:1], latent)
    empty = build_empty_model(describe_model(model.model)).to("meta")
    conditionings = len(positive) + (0 if cfg == 1.0 else len(negative))

    def call(override: Any) -> Any:
        options = {**(arguments.get("transformer_options") or {}), "optimized_attention_override": override}
        moved = {name: _to_meta(value) for name, value in arguments.items()}
        return getattr(empty, innermost_forward(empty))(**moved | {"transformer_options": options})

    try:
        work = count_work(empty, plan, call, conditionings=conditionings)
    except (NotImplementedError, RuntimeError) as error:
        raise RequestError(
            f"degrees for {plan.name} were asked, but with these inputs it cannot be counted: {error}",
            limit="The model's code decides by values, which are not computed here",
            way_out="Set the degrees yourself: cfg_degree 2 if cfg is above 1, the rest to ulysses_degree",
        ) from error
    heads = head_count(plan, empty)
    chosen = choose_degrees(
        work,
        machine,
        methods=plan.methods,
        max_ulysses=heads,
        max_tp=_max_tensor_degree(empty, plan, max_gpus) if can_cut(model.model.diffusion_model) else 1,
    )
    return DegreeAdvice(chosen.dims.world_size, chosen.dims, _text(chosen))


class _Caught(Exception):  # noqa: N818 - no error
    """Ends a sampling at its first denoiser call."""


class _CatchingRun:
    """Takes the place of ``ParallelRun``: keeps the first call instead of sending it."""

    dims = ParallelDims()

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def load(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def end_sampling(self) -> None:
        """Keep nothing for the next one."""

    def forward(self, arguments: dict[str, Any]) -> Any:
        """Keep the call.

        Raises:
            _Caught: Always.
        """
        self.arguments = arguments
        raise _Caught


class _PlanningPatcher(ParallelPatcher):
    """A parallel MODEL without workers."""

    def get_nested_additional_models(self) -> list:
        """Return none: no worker holds a copy."""
        return []


def _first_call(model: Any, positive: list, latent: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the first denoiser call of a sampling, tensors on the CPU."""
    run = _CatchingRun()
    planning = attach_run(model, run, _PlanningPatcher)
    import nodes  # ComfyUI's; imported late, because it pulls in every core node

    try:
        # At guidance 1 ComfyUI evaluates the positive prompt alone.
        nodes.common_ksampler(planning, 0, 1, 1.0, "euler", "simple", positive, positive, latent)  # pyright: ignore[reportAttributeAccessIssue]
    except _Caught:
        return run.arguments
    raise RuntimeError("the sampling ended without a denoiser call")


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_meta(item) for item in value)
    return value


def _max_tensor_degree(model: torch.nn.Module, plan: ModelPlan, gpus: int) -> int:
    """Return the most ranks, up to ``gpus``, that the model's weights can be dealt out to."""
    if ParallelMethod.TENSOR not in plan.methods:
        return 1
    for degree in range(gpus, 1, -1):
        try:
            TensorShards(model, plan, degree=degree, rank=degree - 1)
        except RequestError:
            continue
        return degree
    return 1


def _text(chosen: DegreePlan) -> str:
    lines = [chosen.reason, "", "Predicted seconds a step (waiting for links), GiB on each GPU:"]
    for one in chosen.predictions[:8]:
        degrees = " x ".join(f"{axis} {degree}" for axis, degree in one.dims.degrees.items() if degree > 1)
        memory = f"{one.memory_bytes / 2**30:.1f}"
        lines.append(f"{degrees or 'one GPU'}: {one.step_s:.3g} s ({one.exchange_s:.2g} s), {memory}")
    return "\n".join(lines)
