"""The table of models in README.md, made of docs/models.md, which the parity tests write, and the workflows.

python -m support.readme_matrix    # in the folder `tests`, after a change of either
"""

from __future__ import annotations

import re
from pathlib import Path

from .workflow_models import MODELS, WorkflowModel

ROOT = Path(__file__).resolve().parent.parent.parent
README, MATRIX = ROOT / "README.md", ROOT / "docs" / "models.md"
_PLACE = re.compile(r"(<!-- models -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMNS = ("CFG", "Ulysses", "Ring", "tensor")
# Row of docs/models.md -> what its workflows' files begin with, where that is not its name.
_KEYS = {
    "Qwen-Image-Edit-2509, 2511": ("qwen_image_edit_2509", "qwen_image_edit_2511"),
    "FLUX.2-klein": ("flux2_klein", "flux2_klein_edit"),
    "FLUX.2-dev": ("flux2_dev", "flux2_dev_edit"),
    "FLUX.1-Kontext-dev": ("flux1_kontext",),
    "Stable Diffusion 3.5 large": ("sd35_large",),
    "Stable Diffusion 3.5 medium": ("sd35_medium",),
    "Wan2.2 T2V-A14B": ("wan22_t2v",),
    "Wan2.2 I2V-A14B": ("wan22_i2v",),
    "Wan2.2 TI2V-5B": ("wan22_5b",),
    "Wan2.1 I2V": ("wan21_i2v",),
    "HunyuanVideo 1.5": ("hunyuan_video_15", "hunyuan_video_15_i2v"),
    "LTX-Video": ("ltx_video", "ltx_video_i2v"),
    "LTX-2.x (video and audio)": ("ltx2",),
    "Stable Diffusion XL": ("sdxl",),
    "Lumina 2": ("lumina2",),
}
_TASKS = {
    "text to image": "T2I",
    "edit": "edit",
    "edit with two references": "edit",
    "picture to layers": "layers",
    "text to video": "T2V",
    "text to video with sound": "T2V",
    "picture to video": "I2V",
}


def read_matrix() -> dict[str, dict[str, str]]:
    """Return model -> column -> cell of the first table of docs/models.md."""
    lines = iter(MATRIX.read_text(encoding="utf-8").splitlines())
    head = next(line for line in lines if line.startswith("| model |"))
    names, table = _cells(head), {}
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return table
        cells = dict(zip(names, _cells(line), strict=True))
        table[cells["model"]] = cells
    return table


def workflows_of(row: str) -> list[WorkflowModel]:
    """Return what has workflows of a row's model."""
    keys = _KEYS.get(row, (re.sub(r"[-. ]", "_", row.lower()).replace("flux_1", "flux1"),))
    return [next(model for model in MODELS if model.key == key) for key in keys]


def render() -> str:
    """Return README.md with the table as it has to be."""
    lines = ["| model | train | low VRAM | parallel | CFG | Ulysses | Ring | tensor | ComfyUI |"]
    lines.append("|---" + "|:---:" * 8 + "|")
    for row, cells in read_matrix().items():
        models = workflows_of(row)
        links = [_links(models, mode) for mode in ("train", "low_vram", "parallel")]
        # Numbers of ranks become a word; (d) stays.
        seen = [re.sub(r"^[\d, ]+", "yes ", cells[column]).strip() for column in _COLUMNS]
        lines.append(f"| {' | '.join([row, *links, *seen, _versions(models)])} |")
    text = README.read_text(encoding="utf-8")
    return _PLACE.sub(lambda match: f"{match[1]}{chr(10).join(lines)}\n{match[2]}", text)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _links(models: list[WorkflowModel], mode: str) -> str:
    shipped = [model for model in models if mode != "train" or model.trainable]
    return ", ".join(f"[{_label(model)}](workflows/{model.key}_{mode}.json)" for model in shipped)


def _label(model: WorkflowModel) -> str:
    version = re.search(r"_(25\d\d)$", model.key)
    return version[1] if version else _TASKS[model.task]


def _versions(models: list[WorkflowModel]) -> str:
    """Return the ComfyUI that the workflows need at least."""
    newer = [model for model in models if model.newer_only]
    if not newer or len(newer) == len(models):
        return "0.33" if newer else "0.3.75"
    return f"0.3.75; {', '.join(map(_label, newer))}: 0.33"


if __name__ == "__main__":
    README.write_text(render(), encoding="utf-8")
