"""Propose degrees for a sampling: its first denoiser call is caught and counted instead of computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import RequestError
from ..parallel import (
    DegreePlan,
    ModelPlan,
    ParallelDims,
    ParallelMethod,
    batch_size,
    choose_degrees,
    count_work,
    head_count,
    refuse_inputs,
)
from ..plans import find_plan
from .empty_model import build_empty_model
from .gpu_speed import describe_machine
from .model_export import class_path, describe_model, innermost_forward
from .nested import map_tensors
from .parallel_model import ParallelPatcher, attach_run
from .quantized_parts import max_cut
from .sampling import check_conditioning, check_latent


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
        moved = map_tensors(arguments | {"transformer_options": options}, lambda tensor: tensor.to("meta"))
        return getattr(empty, innermost_forward(empty))(**moved)

    try:
        work = count_work(empty, plan, call, conditionings=conditionings)
        work = replace(work, samples=batch_size(arguments["x"]))
    except (NotImplementedError, RuntimeError) as error:
        raise RequestError(
            f"degrees for {plan.name} were asked, but with these inputs it cannot be counted: {error}",
            limit="The model's code decides by values, which are not computed here",
            way_out="Set the degrees yourself: cfg_degree 2 if cfg is above 1, the rest to ulysses_degree",
        ) from error
    given = {
        name for _, options in (*positive, *negative) for name, value in options.items() if value is not None
    }
    chosen = choose_degrees(
        work,
        machine,
        methods=_methods_for(plan, empty, given),
        max_ulysses=head_count(plan, empty),
        max_tp=max_cut(model.model.diffusion_model, plan, most=machine.gpus),
    )
    return DegreeAdvice(chosen.dims.world_size, chosen.dims, _text(chosen))


def _methods_for(plan: ModelPlan, module: nn.Module, given: set[str]) -> frozenset[ParallelMethod]:
    """Return the plan's methods, without those of a shared sequence where an input is refused by these."""
    try:
        refuse_inputs(plan, module, given)
    except RequestError:
        return plan.methods - {ParallelMethod.ULYSSES, ParallelMethod.RING}
    return plan.methods


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


def _text(chosen: DegreePlan) -> str:
    lines = [chosen.reason, "", "Predicted seconds a step (waiting for links), GiB on each GPU:"]
    for one in chosen.predictions[:8]:
        memory = f"{one.memory_bytes / 2**30:.1f}"
        lines.append(f"{one.dims.text or 'one GPU'}: {one.step_s:.3g} s ({one.exchange_s:.2g} s), {memory}")
    return "\n".join(lines)
