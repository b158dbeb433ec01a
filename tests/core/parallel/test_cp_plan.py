"""Models that bring a ``_cp_plan`` dictionary: those of diffusers as they are, and one made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.parallel import CpPlanHandle, ParallelDims, cp_attention, parallelize_cp_plan
from ferry_support import diffusers_models
from ferry_support.diffusers_models import flux
from ferry_support.parity import TOLERANCE, layouts_of, relative_error, sequence_group, world_sequence
from ferry_support.ranks import run_ranks
from ferry_support.tiny_models import Inputs, noise, randomize
from torch import nn
from torch.nn import functional as F

# Every class of diffusers 0.42 that brings a dictionary.
NAMES = ("chronoedit", "flux", "flux2", "helios", "ltx", "ltx2", "minimax_h3", "qwen", "wan")
MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    name: getattr(diffusers_models, name) for name in NAMES
}


def outputs_of(returned: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return every output; those of video and audio have two."""
    return [value for value in returned if isinstance(value, torch.Tensor)]


def errors_of_rank(models: dict[str, tuple[nn.Module, Inputs]], dims: list[ParallelDims]) -> dict[str, float]:
    """Return the worst error of each model in these layouts; the first runs twice, once with sizes known."""
    worst = {}
    for name, (model, inputs) in models.items():
        with torch.inference_mode():
            expected = outputs_of(model(**inputs, return_dict=False))
            for layout in dims:
                handle = parallelize_cp_plan(model, group=sequence_group(layout))
                times = 2 if layout == dims[0] else 1
                outputs = [outputs_of(handle.run(model, **inputs, return_dict=False)) for _ in range(times)]
                handle.remove()
                seen = max(relative_error(output, expected) for output in outputs)
                worst[name] = max(worst.get(name, 0.0), seen)
            assert all(map(torch.equal, outputs_of(model(**inputs, return_dict=False)), expected))
        assert not any(hook_names(module) for module in model.modules())
    return worst


@pytest.mark.parametrize("world_size", [3, 4])
def test_diffusers_models_equal_one_rank(world_size: int) -> None:
    """By their own dictionaries; between 1 and 75 tokens and three heads, so nothing divides by four."""
    models = {name: build() for name, build in MODELS.items()}
    for model, _ in models.values():
        randomize(model)
    for worst in run_ranks(errors_of_rank, world_size, models, layouts_of(world_size)):
        # fp32: the same sums in another order.
        assert worst.keys() == models.keys()
        assert max(worst.values()) <= TOLERANCE, worst


def test_without_exchange_the_comparison_fails() -> None:
    model, inputs = flux()
    randomize(model)

    def body() -> float:
        cp_attention.attend = lambda handle, *args, **options: F.scaled_dot_product_attention(
            *args, **options
        )
        return errors_of_rank({"flux": (model, inputs)}, layouts_of(2))["flux"]

    assert min(run_ranks(body, 2)) > 1e-2


@dataclass(frozen=True)
class SplitInput:
    split_dim: int
    expected_dims: int | None = None
    split_output: bool = False


@dataclass(frozen=True)
class GatherOutput:
    gather_dim: int


class Mixer(nn.Module):
    """Attention with whatever the caller adds to the call."""

    _cp_plan = {"": {"x": SplitInput(1, 3), "mask": SplitInput(1, 2)}, "out": GatherOutput(1)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        history: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if history is not None:
            x = torch.cat([history, x], dim=1)
        heads = x.unflatten(-1, (3, 2)).transpose(1, 2)
        if mask is not None:
            options["attn_mask"] = mask[:, None, None]
        return self.out(
            F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2).flatten(2)
        )


def mixed(handle: CpPlanHandle, model: nn.Module, **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return handle.run(model, **inputs)


def test_masks_of_keys_are_exact_and_lengths_may_change() -> None:
    model = randomize(Mixer())

    def body() -> float:
        handle = parallelize_cp_plan(model, group=world_sequence())
        errors = []
        for length in (7, 2, 7):
            x, mask = noise(2, length, 6), noise(2, length) > -0.7
            errors += [
                relative_error(mixed(handle, model, x=x, mask=mask), model(x, mask)),
                relative_error(mixed(handle, model, x=x), model(x)),
                relative_error(mixed(handle, model, x=0 * x + 1), model(0 * x + 1)),  # tokens all alike
            ]
        return max(errors)

    with torch.inference_mode():
        assert max(run_ranks(body, 3)) <= TOLERANCE


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": noise(1, 5, 6), "is_causal": True}, "causal"),
        ({"x": noise(1, 5, 6), "attn_mask": torch.ones(5, 5) > 0}, "is not one of this rank's"),
        ({"x": noise(1, 5, 6), "history": noise(1, 2, 6, seed=1)}, "(5, 4) keys"),
        # As many in all as two streams of six that are both cut.
        ({"x": noise(1, 6, 6), "history": noise(1, 3, 6, seed=1)}, "(6, 6) keys"),
    ],
    ids=["causal", "whole mask", "whole history", "whole history as long as a part"],
)
def test_what_a_dictionary_cannot_say_is_refused(inputs: Inputs, message: str) -> None:
    def body() -> str:
        model = Mixer()
        handle = parallelize_cp_plan(model, group=world_sequence())
        with pytest.raises(PlanError) as caught:
            mixed(handle, model, **inputs)
        return str(caught.value)

    assert all(message in seen for seen in run_ranks(body, 2))


def test_what_a_module_cannot_compute_with_beside_its_part_is_refused() -> None:
    """Helios scales the keys of its history, which it finds by the picture's number of tokens.

    Wan cannot reshape the times of a rank that has none; the others would wait for it.
    """
    helios, inputs = diffusers_models.helios(is_amplify_history=True)
    wan, call = diffusers_models.wan()
    call |= {"timestep": torch.tensor([[700]])}

    def body() -> list[str]:
        seen = []
        for model, given in ((helios, inputs), (wan, call)):
            handle = parallelize_cp_plan(model, group=world_sequence())
            with pytest.raises(PlanError) as caught:
                mixed(handle, model, **given)
            seen.append(str(caught.value))
        return seen

    for counted, timed in run_ranks(body, 2):
        assert "blocks.0.attn1, original_context_length=45 is used" in counted
        assert "timestep: 1 times cannot be shared by 2 ranks" in timed


def test_dictionaries_that_do_not_fit_are_refused() -> None:
    def body() -> None:
        model, group = Mixer(), world_sequence()
        with pytest.raises(PlanError, match="no argument 'y'"):
            parallelize_cp_plan(model, {"out": {"y": SplitInput(1)}}, group=group)
        with pytest.raises(PlanError, match="neither splits nor gathers"):
            parallelize_cp_plan(model, {"out": "colwise"}, group=group)
        with pytest.raises(PlanError, match="Linear has no _cp_plan"):
            parallelize_cp_plan(nn.Linear(1, 1), group=group)
        parallelize_cp_plan(model, group=group)
        with pytest.raises(PlanError, match=r"call remove\(\) first"):
            parallelize_cp_plan(model, group=group)

    run_ranks(body, 1)
