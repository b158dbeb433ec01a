"""Nodes that keep an encoded prompt as a file, so that no text encoder has to be loaded."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..core.comfy_adapter import (
    conditioning_files,
    conditioning_version,
    load_conditioning,
    register_conditioning_folder,
    save_conditioning,
)
from .schema import known


class LoadConditioning(io.ComfyNode):
    """Load an encoded prompt from a file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node; its list is read from the folder each time ComfyUI asks."""
        register_conditioning_folder()
        return io.Schema(
            node_id="FerryLoadConditioning",
            display_name="Load Conditioning",
            category="ferry/conditioning",
            description="Loads a prompt that Save Conditioning wrote. No text encoder is needed.",
            inputs=[
                io.Combo.Input(
                    "conditioning_name",
                    options=conditioning_files(),
                    tooltip="A file in models/conditioning.",
                )
            ],
            outputs=[io.Conditioning.Output(display_name="conditioning", tooltip="The encoded prompt.")],
            **known(io.Schema, search_aliases=["prompt file", "embedding cache"]),
        )

    @classmethod
    def fingerprint_inputs(cls, conditioning_name: str) -> str:
        """Read the file again when it has changed."""
        return conditioning_version(conditioning_name)

    @classmethod
    def execute(cls, conditioning_name: str) -> io.NodeOutput:
        """Return the CONDITIONING."""
        return io.NodeOutput(load_conditioning(conditioning_name))


class SaveConditioning(io.ComfyNode):
    """Save an encoded prompt as a file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        register_conditioning_folder()
        return io.Schema(
            node_id="FerrySaveConditioning",
            display_name="Save Conditioning",
            category="ferry/conditioning",
            description="Saves an encoded prompt, so that later runs need no text encoder.",
            is_output_node=True,
            inputs=[
                io.Conditioning.Input(
                    "conditioning", tooltip="The encoded prompt: one entry, no ControlNet."
                ),
                io.String.Input("name", default="prompt", tooltip="The file's name in models/conditioning."),
                io.Boolean.Input("overwrite", default=False, tooltip="Replace a file of that name."),
            ],
            outputs=[],
            **known(io.Schema, search_aliases=["prompt file", "embedding cache"]),
        )

    @classmethod
    def execute(cls, conditioning: Any, name: str, overwrite: bool) -> io.NodeOutput:
        """Write the file."""
        save_conditioning(conditioning, name, overwrite=overwrite)
        return io.NodeOutput()
