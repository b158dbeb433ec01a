"""Nodes that stream a model's weights through a budget of VRAM."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..core.comfy_adapter import (
    WEIGHT_DTYPES,
    diffusion_model_names,
    load_offloaded,
    offload_model,
    settings_version,
)
from .schema import known


def budget_inputs() -> list[Any]:
    """Return the inputs that every streaming node has first."""
    return [
        io.Float.Input(
            "vram_budget_gb",
            default=0.0,
            min=0.0,
            max=1024.0,
            step=0.1,
            tooltip="GB of VRAM for weights: more is faster. 0: auto, the budget in Settings > Ferry if one "
            "is set there, else whatever ComfyUI has free.",
        ),
    ]


def streaming_inputs() -> list[Any]:
    """Return the inputs that every streaming node has last."""
    return [
        io.Int.Input(
            "prefetch_depth",
            default=1,
            min=0,
            max=16,
            tooltip="Blocks that are copied ahead while one computes. 1 is right for most; each more takes "
            "VRAM for one more block.",
            **known(io.Int.Input, advanced=True),
        ),
        io.Model.Input(
            "share_with",
            optional=True,
            tooltip="An offloaded MODEL that runs before or after this one (Wan 2.2: the other expert). Both "
            "then use one budget; give both nodes the same values.",
        ),
    ]


class OffloadModel(io.ComfyNode):
    """Stream a MODEL's weights through a budget of VRAM."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="FerryOffloadModel",
            display_name="Offload Model",
            category="ferry/low vram",
            description="Runs a model that is larger than the VRAM: its weights stay in RAM and stream in, "
            "block by block. Same picture.",
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model; LoRAs may come before or after."),
                *budget_inputs(),
                *streaming_inputs(),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The same model, with streamed weights.")],
            hidden=[io.Hidden.unique_id],
            **known(io.Schema, search_aliases=["low vram", "block swap", "offload", "stream", "vram budget"]),
        )

    @classmethod
    def fingerprint_inputs(cls, vram_budget_gb: float | None = None, **inputs: Any) -> str:
        """Take the budget anew when it is auto and the setting has changed."""
        return settings_version(vram=vram_budget_gb or 0.0)

    @classmethod
    def execute(
        cls, model: Any, vram_budget_gb: float, prefetch_depth: int, share_with: Any | None = None
    ) -> io.NodeOutput:
        """Return the streamed MODEL."""
        return io.NodeOutput(
            offload_model(
                model,
                vram_gb=vram_budget_gb,
                prefetch_depth=prefetch_depth,
                share_with=share_with,
                node_id=cls.hidden.unique_id if cls.hidden else None,
            )
        )


class LoadDiffusionModelOffload(io.ComfyNode):
    """Load a diffusion model with streamed weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node; its list is read from the folders each time ComfyUI asks."""
        return io.Schema(
            node_id="FerryLoadDiffusionModelOffload",
            display_name="Load Diffusion Model (Offload)",
            category="ferry/low vram",
            description="Loads a diffusion model that may be larger than VRAM and RAM: straight from file "
            "to RAM, then streamed block by block. Same picture.",
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=diffusion_model_names(),
                    tooltip="A file in models/diffusion_models, the index of a sharded model there, or the "
                    "diffusion model of a checkpoint.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    tooltip="As in Load Diffusion Model. fp8 halves what has to be copied, at some quality.",
                    **known(io.Combo.Input, advanced=True),
                ),
                *budget_inputs(),
                io.Float.Input(
                    "ram_budget_gb",
                    default=0.0,
                    min=0.0,
                    max=4096.0,
                    step=0.1,
                    tooltip="GB of RAM for weights; blocks above it are read from the file at every step. "
                    "0: auto, the budget in Settings > Ferry if one is set there, else the whole model.",
                    **known(io.Float.Input, advanced=True),
                ),
                *streaming_inputs(),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The model, with streamed weights.")],
            hidden=[io.Hidden.unique_id],
            **known(
                io.Schema, search_aliases=["low vram", "unet loader", "block swap", "offload", "vram budget"]
            ),
        )

    @classmethod
    def fingerprint_inputs(
        cls, vram_budget_gb: float | None = None, ram_budget_gb: float | None = None, **inputs: Any
    ) -> str:
        """Take the budgets anew when they are auto and the settings have changed."""
        return settings_version(vram=vram_budget_gb or 0.0, ram=ram_budget_gb or 0.0)

    @classmethod
    def execute(
        cls,
        unet_name: str,
        weight_dtype: str,
        vram_budget_gb: float,
        ram_budget_gb: float,
        prefetch_depth: int,
        share_with: Any | None = None,
    ) -> io.NodeOutput:
        """Return the streamed MODEL."""
        return io.NodeOutput(
            load_offloaded(
                unet_name,
                weight_dtype=weight_dtype,
                vram_gb=vram_budget_gb,
                ram_gb=ram_budget_gb,
                prefetch_depth=prefetch_depth,
                share_with=share_with,
                node_id=cls.hidden.unique_id if cls.hidden else None,
            )
        )
