"""The table of models and parallel methods: made from what the parity tests saw, for people to read.

The first part of ``docs/models.md`` is this module's output. A cell holds the numbers of ranks on which every
case of the row passed; a cell is never written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from comfyui_ferry.core.parallel import ParallelDims

from .tiny_cases import CASES

# Case -> layout -> relative error.
Results = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Row:
    """One model that people know by name.

    Args:
        model: Its name.
        cases: Parity cases that run its class with its configuration and inputs.
        distilled: Whether guidance is distilled into it, so that it runs at cfg 1.0.
    """

    model: str
    cases: tuple[str, ...]
    distilled: bool = False


ROWS = (
    Row("LongCat-Image", ("longcat",)),
    Row("LongCat-Image-Edit", ("longcat-edit",)),
    Row("Ovis-Image", ("ovis",)),
    Row("Qwen-Image", ("qwen", "qwen text mask, batch 2", "qwen short text")),
    Row("Qwen-Image-Edit", ("qwen edit, control",)),
    Row("Qwen-Image-Edit-2509, 2511", ("qwen edit-2509", "qwen edit-2511")),
    Row("Qwen-Image-Layered", ("qwen layered",)),
    Row("Z-Image", ("z-image", "z-image batch 2", "z-image references")),
    Row("Z-Image-Turbo", ("z-image", "z-image batch 2"), distilled=True),
    Row("Stable Diffusion 3.5 large", ("sd3.5-large",)),
    Row("Stable Diffusion 3.5 medium", ("sd3.5-medium batch 2", "sd3.5-medium short text, control")),
    Row("FLUX.2-klein", ("flux2-klein", "flux2 timestep zero"), distilled=True),
    Row("FLUX.2-dev", ("flux2-dev refs",), distilled=True),
    Row(
        "FLUX.1-dev",
        ("flux1-dev", "flux1-dev batch 2", "flux1-dev full mask", "flux1-dev short text"),
        distilled=True,
    ),
    Row("FLUX.1-Kontext-dev", ("flux1-kontext control",), distilled=True),
    Row("Wan2.2 T2V-A14B", ("wan t2v", "wan t2v batch 2")),
    Row("Wan2.2 I2V-A14B", ("wan i2v",)),
    Row("Wan2.2 TI2V-5B", ("wan ti2v",)),
    Row("Wan2.1 I2V", ("wan2.1 i2v clip", "wan reference, frame timesteps")),
    Row("HunyuanVideo 1.5", ("hunyuan-1.5", "hunyuan-1.5 text mask", "hunyuan-1.5 guiding frame")),
    Row("LTX-Video", ("ltxv, text mask, batch 2", "ltxv token times", "ltxv guide")),
    Row(
        "LTX-2.x (video and audio)",
        ("ltx2", "ltx2 frame times, batch 2", "ltx2 token times, perturbed attention", "ltx2 video alone"),
    ),
    Row("Stable Diffusion XL", ("sdxl", "sdxl batch 2", "sdxl control")),
    Row("Lumina 2", ("lumina 2",)),
)

_COLUMNS = {
    "CFG": ("cfg 2 x ulysses 2",),
    "Ulysses": ("ulysses 2", "ulysses 3", "ulysses 4"),
    "Ring": ("ring 2", "ring 3", "ring 4"),
    "Ulysses x Ring": ("ring 2 x ulysses 2",),
    "tensor": ("tp 2", "tp 3", "tp 4"),
    "tensor x Ulysses": ("tp 2 x ulysses 2",),
    "tensor x Ring": ("tp 2 x ring 2",),
}

_INTRO = """\
# Models

Written by the tests (`FERRY_WRITE_DOCS=1 python -m pytest tests/core/plans`, ComfyUI 0.33). A test fails if
this page is not what they saw.

Each row is a tiny model of the class and configuration that ComfyUI builds for it, with random weights. One
process evaluates it, and so do several (real processes, gloo, fp32); a number of ranks stands in the table if
no value of any case differs by more than 1e-5 of the largest. Token counts never divide by the ranks, heads
rarely. Taking the parallel model apart again gives the same bits as before.

"""

_LEGEND = """
- **CFG**: two conditionings on two groups of two ranks. (d): guidance is distilled into this model. It is
  meant for cfg 1.0, where there is one conditioning and so nothing to share; with a negative prompt it works
  as for the others.
- **tensor**: weights cut by attention heads. A model with fewer heads than ranks is refused; most tiny ones
  have three, Z-Image five, Stable Diffusion XL two at one level, and Lumina 2 two groups of heads.
- **batch**: whether a case holds two samples with prompts of their own. Its samples one by one
  give the same (`tests/core/plans/test_batch_split.py`), so `batch_degree` may share them out over GPUs.
- **ComfyUI**: the older of the two tested versions (0.3.75, 0.33) that has the model; cases in *italics* need
  0.33.
"""


def layout_name(dims: ParallelDims) -> str:
    """Return for example ``tp 2 x ulysses 2``."""
    return " x ".join(f"{axis} {degree}" for axis, degree in dims.degrees.items() if degree > 1)


def render_page(results: Results) -> str:
    """Return the first part of ``docs/models.md``."""
    names = ["model", *_COLUMNS, "batch", "ComfyUI"]
    lines = [f"| {' | '.join(names)} |", "|---" + "|:---:" * (len(names) - 1) + "|"]
    lines += render_rows(results).values()
    cases = ["", "What the cases of each row hold:", ""]
    for row in ROWS:
        held = [f"*{name}*" if CASES[name].newer_only else name for name in row.cases]
        cases.append(f"- {row.model}: {'; '.join(held)}")
    return _INTRO + "\n".join(lines) + "\n" + _LEGEND + "\n".join(cases) + "\n"


def render_rows(results: Results) -> dict[str, str]:
    """Return the line of each model with a case in ``results``."""
    lines = {}
    for row in ROWS:
        seen = [name for name in row.cases if name in results]
        if not seen:
            continue
        cells = [_cell(column, row, [results[name] for name in seen]) for column in _COLUMNS]
        cells.append("yes" if any(_batch_size(name) > 1 for name in row.cases) else "")
        cells.append("0.33" if all(CASES[name].newer_only for name in row.cases) else "0.3.75")
        lines[row.model] = f"| {row.model} | {' | '.join(cells)} |"
    return lines


def summary(results: Results) -> str:
    """Return the table for a terminal, with the largest error of each row."""
    lines = []
    for row in ROWS:
        seen = [results[name] for name in row.cases if name in results]
        if seen:
            worst = max(error for errors in seen for error in errors.values())
            cells = [f"{_cell(column, row, seen):^8}" for column in _COLUMNS]
            lines.append(f"{row.model:<28}{' '.join(cells)} {worst:8.1e}")
    head = " ".join(f"{name:^8.8}" for name in _COLUMNS)
    return "\n".join([f"{'':<28}{head}  largest", *lines])


def _cell(column: str, row: Row, seen: list[Mapping[str, float]]) -> str:
    layouts = [name for name in _COLUMNS[column] if all(name in errors for errors in seen)]
    ranks = [str(_num_ranks(name)) for name in layouts]
    return ", ".join(ranks) + (" (d)" if column == "CFG" and row.distilled and ranks else "")


def _num_ranks(layout: str) -> int:
    product = 1
    for factor in layout.split(" x "):
        product *= int(factor.split()[1])
    return product


def _batch_size(name: str) -> int:
    x = CASES[name].inputs()["x"]
    return (x[0] if isinstance(x, list) else x).shape[0]
