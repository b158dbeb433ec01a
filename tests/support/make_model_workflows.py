"""Write the workflow of every model and mode: ``python -m support.make_model_workflows`` in ``tests``.

They follow from the tables in ``workflow_models.py``, so that all of them say and do the same in the same
way. Needs both ComfyUI versions: the nodes are those of the older one, and the newer one's where it alone
has them.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from .comfy_server import PACK
from .node_definitions import read_definitions
from .workflow_graphs import SAMPLERS, Mode, load, save, shift_and_norm
from .workflow_models import MODELS, WorkflowModel
from .workflow_notes import sampling_note, training_note
from .workflow_recipes import RECIPES
from .workflow_sheet import Sheet

FOLDER = PACK / "workflows"
PAGE = PACK / "docs" / "workflows.md"
OLDER, NEWER = "0.3.75", "0.33.0"
# What the two data nodes are set to, by kind of examples.
_DATA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pictures": ({"folder": "my_pictures"}, {}),
    "pairs": ({"folder": "my_pictures", "control_folder": "my_originals"}, {}),
    "videos": ({"folder": "my_videos"}, {"start_image": "first frame"}),
}
_INTRO = """\
# Workflows

Written by `python -m support.make_model_workflows` (in `tests`), with the files in `workflows/`. Drag a file
onto ComfyUI's canvas, or open them from *Templates* under *ComfyUI-Ferry*. The note on each says which files
it needs and links to them; ComfyUI offers to download those that are missing.

`./run test` opens each in the real front-end of both ComfyUI versions, compares every value with the file,
and executes it with tiny models of the same classes on small sizes. **None has been run with the published
files by the project**: those need GPUs and hundreds of GB. On several GPUs, files in scaled fp8 and other
quantized formats need ComfyUI 0.33 (see [parallel.md](parallel.md)).

File names, addresses and folders agree with those of the templates that ComfyUI brings
(comfyui-workflow-templates 0.11.44), which has none of Lumina 2 and Stable Diffusion 3.5 medium. Samplers'
settings were compared where a template loads the same file; some templates use another variant of a model,
with others.

| model | task | train | low VRAM | parallel | ComfyUI |
|---|---|:---:|:---:|:---:|:---:|
"""


def sampling_graph(object_info: dict[str, Any], model: WorkflowModel, mode: Mode) -> dict[str, Any]:
    """Return the graph that samples with ``model``."""
    sheet = Sheet(object_info)
    sheet.column(1)
    parts = load(sheet, model, mode)
    sheet.column(2)
    RECIPES[model.recipe](sheet, model, parts)
    sheet.column(3)
    shift_and_norm(sheet, model, parts)
    samples = SAMPLERS[model.noise](sheet, model, parts, mode)
    sheet.column(4)
    save(sheet, model, parts, samples)
    sheet.column(0)
    sheet.note(sampling_note(model, mode), 640)
    sheet.arrange()
    for column, title in enumerate(("Models", "Prompt", "Sampling", "Result"), start=1):
        sheet.group(title, column, column, "#3f789e" if column < 3 else "#3f7a4f")
    return sheet.builder.graph()


def training_graph(object_info: dict[str, Any], model: WorkflowModel) -> dict[str, Any]:
    """Return the graph that trains a LoRA for ``model``."""
    sheet = Sheet(object_info)
    sheet.column(1)
    parts = load(sheet, model, None)
    sheet.column(2)
    folders, encoding = _DATA[model.examples]
    (pictures,) = sheet.add(
        "FerryLoadTrainingFolder", **folders, resolution=model.resolution, caption_dropout=0.05
    )
    (data,) = sheet.add(
        "FerryCacheTrainingData", training_set=pictures, clip=parts.clip, vae=parts.vae, **encoding
    )
    names = [""] if len(parts.models) == 1 else ["_high", "_low"]
    trained = []
    for column, (name, loaded) in enumerate(zip(names, parts.models, strict=True), start=3):
        sheet.column(column)
        _lora, losses, _steps = sheet.add(
            "FerryTrainLoraOffload",
            model=loaded,
            training_data=data,
            steps=1000,
            save_prefix=f"loras/{model.key}{name}",
            **({"noise_range": name.strip("_")} if name else {}),
        )
        trained.append((name, losses))
    last = 3 + len(names)
    sheet.column(last)
    for name, losses in trained:
        sheet.add("LossGraphNode", loss=losses, filename_prefix=f"loss_{model.key}{name}")
    sheet.column(0)
    sheet.note(training_note(model), 760)
    sheet.arrange()
    for title, first, final in (
        ("Models", 1, 1),
        ("Pictures", 2, 2),
        ("Training", 3, last - 1),
        ("Loss", last, last),
    ):
        sheet.group(title, first, final, "#8a6d3b")
    return sheet.builder.graph()


def build_all(object_info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return file name -> graph of every model and mode."""
    graphs = {}
    for model in MODELS:
        for mode in Mode:
            graphs[f"{model.key}_{mode.value}.json"] = sampling_graph(object_info, model, mode)
        if model.trainable:
            graphs[f"{model.key}_train.json"] = training_graph(object_info, model)
    for name, graph in graphs.items():
        graph["id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, f"comfyui-ferry/{name}"))
    return graphs


def render_page() -> str:
    """Return the text of ``docs/workflows.md``."""
    rows = []
    for model in MODELS:
        names = [f"{model.key}_{mode}" for mode in ("train", "low_vram", "parallel")]
        cells = [f"[{name}](../workflows/{name}.json)" for name in names]
        if not model.trainable:
            cells[0] = ""
        cells = [model.title, model.task, *cells, "0.33" if model.newer_only else "0.3.75"]
        rows.append(f"| {' | '.join(cells)} |")
    return _INTRO + "\n".join(rows) + "\n"


def definitions() -> dict[str, Any]:
    """Return the nodes of both versions, the older one's where both have it."""
    return read_definitions(NEWER) | read_definitions(OLDER)


def dump(graph: dict[str, Any]) -> str:
    """Return a graph as the text of its file: a line for each node, link and group."""
    lines = []
    for key, value in graph.items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {json.dumps(item)}" for item in value)
            lines.append(f"{json.dumps(key)}: [\n{items}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def main() -> None:
    """Write the files and the page."""
    for name, graph in build_all(definitions()).items():
        (FOLDER / name).write_text(dump(graph), encoding="utf-8")
    PAGE.write_text(render_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
