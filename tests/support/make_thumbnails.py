"""Write the picture of each workflow's graph beside it: ``python -m support.make_thumbnails`` in ``tests``.

ComfyUI's template browser shows ``name.jpg`` for ``name.json``.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path

from PIL import Image

from .browser import FIT_VIEW, open_page
from .comfy_server import PACK, ComfyServer
from .workflow_models import MODELS

_WINDOW_PX, _LARGEST_PX, _MARGIN_PX, _QUALITY = (2000, 1300), (640, 420), 12, 60
_FOCUS = "() => app.extensionManager.command.execute('Workspace.ToggleFocusMode')"
_SETTINGS = """async () => { const set = (name, value) => app.extensionManager.setting.set(name, value);
    await set('LiteGraph.Canvas.MinFontSizeForLOD', 0); await set('Comfy.Graph.CanvasInfo', false);
    await set('Comfy.Minimap.Visible', false); app.canvas.low_quality_zoom_threshold = 0; }"""
_OPEN = "async graph => { await app.loadGraphData(graph, true, false); }"
_TINY_FILES = (
    "diffusion_models/ferry_tiny_wan", "vae/ferry_tiny_wan_vae", "conditioning/ferry_digit_3",
    "conditioning/ferry_empty", "text_encoders/umt5_xxl_fp8_e4m3fn_scaled",
)  # fmt: skip
_FOLDERS = ("my_pictures", "my_originals", "my_videos", "ferry_style")
_QUIET = """() => { const style = document.createElement('style'); style.textContent =
    '.p-dialog-mask, .p-toast, .p-panel, .p-buttongroup { display: none !important; }';
    document.head.append(style); }"""
# Left, top, right and bottom of the graph in the window.
_BOX = """() => { const scale = app.canvas.ds.scale, offset = app.canvas.ds.offset;
    const canvas = app.canvas.canvas.getBoundingClientRect();
    const boxes = [...app.graph._groups, ...app.graph._nodes].map(item =>
        [item.pos[0], item.pos[1] - 30, item.pos[0] + item.size[0], item.pos[1] + item.size[1]]);
    return [0, 1, 2, 3].map(side => { const values = boxes.map(box => box[side]);
        return (Math[side < 2 ? 'min' : 'max'](...values) + offset[side % 2]) * scale
            + (side % 2 ? canvas.top : canvas.left); }); }"""


def _name_files(base: Path) -> None:
    """Create empty files of every name, so that no loader is shown as lacking its file."""
    names = [f"{file.directory}/{file.name}" for model in MODELS for file in model.files]
    for name in (*names, *(f"{tiny}.safetensors" for tiny in _TINY_FILES)):
        path = base / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name in ("example.png", *(f"{folder}/one.png" for folder in _FOLDERS)):
        path = base / "input" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64)).save(path)


def main() -> None:
    """Open the named files, or all, and save a picture of each."""
    folder = PACK / "workflows"
    paths = [folder / name for name in sys.argv[1:]] or sorted(folder.glob("*.json"))
    with tempfile.TemporaryDirectory() as base:
        _name_files(Path(base))
        with ComfyServer(Path(base)) as server, open_page(server.url, size_px=_WINDOW_PX) as page:
            for script in (_FOCUS, _QUIET, _SETTINGS):
                page.evaluate(script)
            for path in paths:
                page.evaluate(_OPEN, json.loads(path.read_text(encoding="utf-8")))
                page.evaluate(FIT_VIEW)
                page.wait_for_timeout(600)  # the view moves there
                left, top, right, bottom = page.evaluate(_BOX)
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                edges = (left - _MARGIN_PX, top - _MARGIN_PX, right + _MARGIN_PX, bottom + _MARGIN_PX)
                picture = picture.crop(tuple(round(edge) for edge in edges))
                picture.thumbnail(_LARGEST_PX, Image.Resampling.LANCZOS)
                picture.save(path.with_suffix(".jpg"), quality=_QUALITY, optimize=True)


if __name__ == "__main__":
    main()
