"""Choose degrees for a denoiser, a number of GPUs and their links, and say why.

Every product of degrees that the model and the memory allow is predicted (``cost_model``); the fastest
wins. Within a few percent simpler ways win over others, in the order CFG and batch, Ulysses, Ring,
tensor parallel, and fewer GPUs over more: a GPU that gains nothing is better left to other work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RequestError
from .cost_model import DenoiserWork, Machine, Prediction, predict
from .mesh import ParallelDims
from .plan import ParallelMethod

_GIB = 2**30


@dataclass(frozen=True)
class DegreePlan:
    """The chosen degrees.

    Args:
        best: The chosen one.
        alone: One GPU by itself, whether or not the model fits there.
        predictions: Of all degrees that were possible, fastest first.
        reason: One sentence for the user.
    """

    best: Prediction
    alone: Prediction
    predictions: tuple[Prediction, ...]
    reason: str

    @property
    def dims(self) -> ParallelDims:
        """The chosen degrees."""
        return self.best.dims


def choose_degrees(
    work: DenoiserWork,
    machine: Machine,
    *,
    methods: Iterable[ParallelMethod],
    max_ulysses: int,
    max_tp: int,
    min_gain: float = 0.05,
) -> DegreePlan:
    """Return the degrees for ``work`` on ``machine``.

    Args:
        work: One evaluation of the denoiser, at the size that will be sampled.
        machine: The GPUs.
        methods: What the model's plan is proven for.
        max_ulysses: The model's attention heads; Ulysses has no use for more ranks.
        max_tp: The most ranks its weights can be dealt out to.
        min_gain: Share of the step that another GPU, or a less simple method, must save to be used.

    Raises:
        RequestError: If the model fits in no way.
    """
    possible = [
        predict(work, machine, dims)
        for dims in all_degrees(
            machine.gpus, methods=methods, conditionings=work.conditionings, samples=work.samples
        )
        if dims.ulysses * dims.tp <= max_ulysses and dims.tp <= max_tp
    ]
    alone = predict(work, machine, ParallelDims())
    fitting = [one for one in possible if one.memory_bytes <= machine.memory_bytes]
    if not fitting:
        least = min(possible, key=lambda one: one.memory_bytes)
        needed = f"{least.memory_bytes / _GIB:.1f} GiB on each of {machine.gpus} GPUs"
        raise RequestError(
            f"a model that needs {needed} was given",
            limit=f"The smallest GPU has {machine.memory_bytes / _GIB:.1f} GiB free",
            way_out="Use more GPUs, a quantized model, or a smaller picture",
        )
    fastest = min(one.step_s for one in fitting)
    close = [one for one in fitting if one.step_s <= fastest * (1 + min_gain)]
    best = min(close, key=_simplicity)
    ordered = tuple(sorted(possible, key=lambda one: one.step_s))
    return DegreePlan(best, alone, ordered, _reason(best, alone, machine))


def all_degrees(
    gpus: int, *, methods: Iterable[ParallelMethod], conditionings: int, samples: int = 1
) -> list[ParallelDims]:
    """Return every product of degrees on up to ``gpus`` GPUs.

    Args:
        gpus: How many there are.
        methods: Those with a degree above 1.
        conditionings: Evaluations a step: more CFG branches than these would stand idle.
        samples: Of the batch, likewise.
    """
    allowed = frozenset(methods)
    limits = {method: gpus if method in allowed else 1 for method in ParallelMethod}
    limits[ParallelMethod.CFG] = min(limits[ParallelMethod.CFG], conditionings)
    limits[ParallelMethod.BATCH] = min(limits[ParallelMethod.BATCH], samples)
    ranges = [range(1, limits[method] + 1) for method in ParallelMethod]
    names = [method.value for method in ParallelMethod]
    found = (ParallelDims(**dict(zip(names, degrees, strict=True))) for degrees in itertools.product(*ranges))
    return [dims for dims in found if dims.world_size <= gpus]


def _simplicity(prediction: Prediction) -> tuple[float, ...]:
    dims = prediction.dims
    return (dims.world_size, dims.tp, dims.ring, dims.ulysses, prediction.step_s)


def _reason(best: Prediction, alone: Prediction, machine: Machine) -> str:
    if best.dims == ParallelDims():
        return (
            f"One GPU, {best.step_s:.3g} s a step predicted: more of the {machine.gpus} would not be faster."
            if machine.gpus > 1
            else f"One GPU, {best.step_s:.3g} s a step predicted."
        )
    chosen = f"{best.dims.world_size} of {machine.gpus} GPUs, {best.dims.text}"
    text = f"{chosen}: {best.step_s:.3g} s a step predicted"
    if alone.memory_bytes > machine.memory_bytes:
        return f"{text}; one GPU cannot hold the model."
    exchanged = 100 * best.exchange_s / best.step_s
    return f"{text}, {alone.step_s / best.step_s:.2f}x one GPU; {exchanged:.0f} % of it waiting for links."
