"""Look the machine over."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ..core.workers import describe_findings, examine_machine
from .schema import known


class FerryDoctor(io.ComfyNode):
    """Report on GPUs, their links, memory and settings, with a remedy for each problem."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="FerryDoctor",
            display_name="Ferry Doctor",
            category="ferry/parallel",
            description="Looks the machine over for what breaks or slows parallel sampling. Changes nothing.",
            inputs=[
                io.Boolean.Input(
                    "refresh",
                    default=False,
                    tooltip="Try the links between the GPUs again, even if they were fine before.",
                ),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="One or two lines a finding.")],
            is_output_node=True,
            **known(io.Schema, search_aliases=["diagnose", "nccl", "p2p", "multi gpu check"]),
        )

    @classmethod
    def execute(cls, refresh: bool) -> io.NodeOutput:
        """Return the report, and show it on the node."""
        report = describe_findings(examine_machine(refresh=refresh))
        return io.NodeOutput(report, ui=ui.PreviewText(report))

    @classmethod
    def fingerprint_inputs(cls, refresh: bool) -> float:
        """Never take an earlier report for the present one."""
        return float("nan")
