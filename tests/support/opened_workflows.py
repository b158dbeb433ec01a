"""Open workflow files in a ComfyUI page and run what its Run button would send."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .comfy_server import PACK, ComfyServer
from .graph_to_prompt import graph_to_prompt
from .prompt_run import PromptResult, run_prompt
from .tiny_models import is_newer_comfyui
from .workflow_models import MODELS
from .workflow_runs import Prompt, shrink

NAMES = tuple(
    f"{model.key}_{mode}"
    for model in MODELS
    for mode in ("train", "low_vram", "parallel")
    if mode != "train" or model.trainable
)
"""The files with models of their own; train_and_sample and pictures_to_lora have tests of their own."""

_NEWER_ONLY = tuple(f"{model.key}_" for model in MODELS if model.newer_only)
_OPEN = """async graph => {
    await app.loadGraphData(graph);
    const failed = app.graph._nodes.filter(node => node.has_errors
        || !(node.type in LiteGraph.registered_node_types)).map(node => node.type);
    return [failed, (await app.graphToPrompt()).output]; }"""
# Nodes that overlap, or that are only partly within a group's frame; a node's title is 30 pixels above it.
_MISPLACED = """async () => {
    await new Promise(done => setTimeout(done));  // panels have made their nodes fit
    app.canvas.draw(true, true);
    const box = item => [item.pos[0], item.pos[1], item.pos[0] + item.size[0], item.pos[1] + item.size[1]];
    const boxes = app.graph._nodes.map(node => [`${node.type} ${node.id}`, box(node)]);
    for (const [, edges] of boxes) edges[1] -= 30;
    const meet = (one, other) =>
        one[0] < other[2] && other[0] < one[2] && one[1] < other[3] && other[1] < one[3];
    const overlaps = boxes.flatMap(([name, one], index) => boxes.slice(index + 1)
        .filter(([, other]) => meet(one, other)).map(([other]) => `${name} overlaps ${other}`));
    const parted = app.graph._groups.flatMap(group => { const frame = box(group); return boxes
        .filter(([, edges]) => meet(edges, frame) && !(edges[0] >= frame[0] && edges[1] >= frame[1]
            && edges[2] <= frame[2] && edges[3] <= frame[3])).map(([name]) => `${name}: ${group.title}`); });
    return [...overlaps, ...parted]; }"""
_STREAMING = """() => app.graph._nodes.filter(node => node.type === 'FerryLoadDiffusionModelOffload')
    .map(node => node.widgets.find(widget => widget.name === 'ferry_offload').element)
    .map(panel => panel.firstChild.getAttribute('aria-label') + '\\n' + panel.lastChild.textContent)"""
_ALL_STREAMED = f"() => ({_STREAMING})().every(told => told.includes(' streamed'))"


def path_of(name: str) -> Path:
    """Return the file of that name in ``workflows``."""
    return PACK / "workflows" / f"{name}.json"


def runs_here(name: str) -> bool:
    """Return whether the ComfyUI under test has the model and its nodes."""
    return is_newer_comfyui() or not name.startswith(_NEWER_ONLY)


@dataclass
class Canvas:
    """A page and its server.

    Attributes:
        server: With tiny models in place of the files (see ``tiny_loader_node.py``).
        page: From ``open_page``.
    """

    server: ComfyServer
    page: Any

    def open(self, path: Path) -> Prompt:
        """Return the prompt of a file, made by the front-end.

        Raises:
            AssertionError: If the front-end knows one of the nodes not.
        """
        failed, prompt = self.page.evaluate(_OPEN, json.loads(path.read_text(encoding="utf-8")))
        assert failed == [], f"{path.name}: {failed}"
        return prompt

    def check(self, path: Path, definitions: dict[str, Any]) -> Prompt:
        """Open a file, compare every value and link with what it says, and return the front-end's prompt.

        Args:
            path: The file.
            definitions: The server's ``/object_info``.

        Raises:
            AssertionError: If the front-end reads another value than the file's author wrote.
        """
        prompt = self.open(path)
        graph = json.loads(path.read_text(encoding="utf-8"))
        # 0.33's SaveVideo has nested choices, which only the front-end knows.
        graph["nodes"] = [node for node in graph["nodes"] if node["type"] != "SaveVideo"]
        for node_id, node in graph_to_prompt(graph, definitions).items():
            assert prompt[node_id]["inputs"] == node["inputs"], f"{path.name}: {node['class_type']}"
        videos = [node["inputs"] for node in prompt.values() if node["class_type"] == "SaveVideo"]
        assert all(inputs["format"] == "auto" for inputs in videos), path.name
        return prompt

    def misplaced(self) -> list[str]:
        """Return which nodes of the open file overlap, or stick out of a frame."""
        return self.page.evaluate(_MISPLACED)

    def run(self, name: str, **values: Any) -> PromptResult:
        """Open a shipped file and run it; see `execute`."""
        return self.execute(name, self.open(path_of(name)), **values)

    def execute(self, name: str, prompt: Prompt, **values: Any) -> PromptResult:
        """Run what a shipped file gave, on small sizes with few steps.

        Args:
            name: The file's.
            prompt: What the front-end made of it.
            **values: For every node that has inputs of these names, in place of the file's.

        Raises:
            AssertionError: If no picture came of it.
        """
        prompt = shrink(prompt)
        for node in prompt.values():
            node["inputs"] |= {key: value for key, value in values.items() if key in node["inputs"]}
        with ThreadPoolExecutor(1) as executor:  # the page keeps an event loop in this thread
            result = executor.submit(run_prompt, self.server, prompt, limit_s=200).result()
        assert any("images" in output for output in result.outputs.values()), (name, result.outputs)
        return result

    def streaming(self) -> list[str]:
        """Return what the panel of each loader tells, once all have run: the bar's label, then the lines."""
        self.page.wait_for_function(_ALL_STREAMED, timeout=10_000)
        return self.page.evaluate(_STREAMING)
