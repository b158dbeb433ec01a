"""Models that bring a ``_cp_plan`` dictionary: those of diffusers as they are, and one made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import PlanError
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.parallel import CpPlanHandle, ParallelDims, cp_plan, parallelize_cp_plan
from ferry_support.parity import TOLERANCE, layouts_of, relative_error, sequence_group, world_sequence
from ferry_support.ranks import run_ranks
from ferry_support.tiny_models import Inputs, noise, randomize
from torch import nn
from torch.nn import functional as F


def flux() -> tuple[nn.Module, Inputs]:
    """Splits the inputs of the whole model, positions among them."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=20, pooled_projection_dim=12, axes_dims_rope=(4, 6, 6), guidance_embeds=True,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(2, 35, 4), "encoder_hidden_states": noise(2, 11, 20),
        "pooled_projections": noise(2, 12), "timestep": torch.tensor([0.7, 0.3]),
        "guidance": torch.tensor([3.5, 3.5]), "img_ids": torch.arange(105.0).view(35, 3) % 7,
        "txt_ids": torch.zeros(11, 3),
    }  # fmt: skip
    return model, inputs


def wan() -> tuple[nn.Module, Inputs]:
    """Splits tokens in the first block and what the position layer gives; keys of the text are whole."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=20,
        freq_dim=16, ffn_dim=40, num_layers=2, cross_attn_norm=True,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(1, 4, 3, 10, 6), "timestep": torch.tensor([700]),
        "encoder_hidden_states": noise(1, 11, 20),
    }  # fmt: skip
    return model, inputs


def ltx() -> tuple[nn.Module, Inputs]:
    """Splits the text too, and a mask of its keys, which video tokens attend to."""
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=16, cross_attention_dim=48,
        num_layers=2, caption_channels=20,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(2, 30, 4), "encoder_hidden_states": noise(2, 11, 20),
        "timestep": torch.tensor([700, 300]), "num_frames": 3, "height": 5, "width": 2,
        "encoder_attention_mask": torch.tensor([[1] * 7 + [0] * 4, [1] * 11]),
    }  # fmt: skip
    return model, inputs


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {"flux": flux, "wan": wan, "ltx": ltx}


def errors_of_rank(models: dict[str, tuple[nn.Module, Inputs]], dims: list[ParallelDims]) -> dict[str, float]:
    """Return the worst error of each model in these layouts; a forward runs twice, the second one cached."""
    worst = {}
    for name, (model, inputs) in models.items():
        with torch.inference_mode():
            expected = model(**inputs, return_dict=False)[0]
            for layout in dims:
                handle = parallelize_cp_plan(model, group=sequence_group(layout))
                outputs = [handle.run(model, **inputs, return_dict=False)[0] for _ in range(2)]
                handle.remove()
                seen = max(relative_error(output, expected) for output in outputs)
                worst[name] = max(worst.get(name, 0.0), seen)
            assert torch.equal(model(**inputs, return_dict=False)[0], expected)
        assert not any(hook_names(module) for module in model.modules())
    return worst


@pytest.mark.parametrize("world_size", [3, 4])
def test_diffusers_models_equal_one_rank(world_size: int) -> None:
    """By their own dictionaries; 35, 45 and 30 tokens and three heads, so nothing divides by four."""
    torch.set_num_threads(1)
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
        cp_plan._attend = lambda handle, *args, **options: F.scaled_dot_product_attention(*args, **options)
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

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
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
        for length in (7, 4, 7):
            x, mask = noise(2, length, 6), noise(2, length) > -0.7
            errors += [
                relative_error(mixed(handle, model, x=x, mask=mask), model(x, mask)),
                relative_error(mixed(handle, model, x=x), model(x)),
            ]
        return max(errors)

    with torch.inference_mode():
        assert max(run_ranks(body, 3)) <= TOLERANCE


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": noise(1, 1, 6)}, "Mixer: 1 rows cannot be split over 2 ranks"),
        ({"x": noise(1, 5, 6), "is_causal": True}, "causal"),
        ({"x": noise(1, 5, 6), "attn_mask": torch.ones(5, 5) > 0}, "is not one of this rank's"),
    ],
    ids=["too short", "causal", "whole mask"],
)
def test_what_a_dictionary_cannot_say_is_refused(inputs: Inputs, message: str) -> None:
    def body() -> str:
        model = Mixer()
        handle = parallelize_cp_plan(model, group=world_sequence())
        with pytest.raises(PlanError) as caught:
            mixed(handle, model, **inputs)
        return str(caught.value)

    assert all(message in seen for seen in run_ranks(body, 2))


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
