"""What ``./run demo`` does: the workflow of ``workflows/train_and_sample.json`` on a real ComfyUI server.

It is a person's first look and the end-to-end test's twin: the same server, the same file, the same
way in over HTTP.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

from .comfy_server import PACK, ComfyServer, ServerError, comfyui_version, find_comfyui
from .graph_to_prompt import GraphError, graph_to_prompt
from .prompt_run import Progress, PromptError, PromptResult, run_prompt
from .tiny_checkpoint.make import ensure_checkpoint, link_checkpoint
from .tiny_text_encoder import write_text_encoder

WORKFLOW = PACK / "workflows" / "train_and_sample.json"
_BAR_CELLS = 30
_INTERRUPTED = 130


class ProgressBar:
    """One line on the terminal a node: its title, a bar, the steps, and what the node says."""

    def __init__(self, prompt: dict[str, Any]) -> None:
        self._titles = {node_id: node["_meta"]["title"] for node_id, node in prompt.items()}
        self._node_id, self._text, self._fraction, self._line = "", "", "", ""
        self._started_s = time.monotonic()
        self._live = sys.stdout.isatty()

    def report(self, progress: Progress) -> None:
        """Show one message."""
        if progress.node_id != self._node_id:
            self.finish()
            self._node_id, self._text, self._fraction = progress.node_id, "", ""
            self._started_s = time.monotonic()
        if progress.text:
            self._text = progress.text.splitlines()[0]
        if progress.maximum:
            filled = round(_BAR_CELLS * progress.value / progress.maximum)
            bar = "#" * filled + "." * (_BAR_CELLS - filled)
            self._fraction = f" [{bar}] {progress.value:.0f}/{progress.maximum:.0f}"
        title = self._titles.get(self._node_id, self._node_id)
        self._line = f"  {title:<34.34}{self._fraction} {self._text}".rstrip()
        if self._live:
            width = shutil.get_terminal_size().columns
            print(f"\r{self._line:<{width - 1}.{width - 1}}", end="", flush=True)

    def finish(self) -> None:
        """End the running node's line."""
        if self._line:
            seconds = f" ({time.monotonic() - self._started_s:.1f} s)"
            print(("\r" if self._live else "") + self._line + seconds, flush=True)
        self._line = ""


def main() -> int:
    """Run the demo and return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_INTERRUPTED))
    try:
        return _demo()
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the server is stopped", file=sys.stderr)
        return _INTERRUPTED
    except (ServerError, GraphError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
    except subprocess.CalledProcessError:
        print("\ndemo: the tiny model could not be trained; see above", file=sys.stderr)
    except subprocess.TimeoutExpired as error:
        print(
            f"\ndemo: the tiny model was not trained after {error.timeout:.0f} s. The machine is busy; "
            "run ./run demo again when it is quieter",
            file=sys.stderr,
        )
    return 1


def _demo() -> int:
    base = Path(os.environ.get("FERRY_DEMO_DIR", PACK / ".demo")).resolve()
    comfyui = find_comfyui()
    start_s = time.monotonic()
    print(f"ComfyUI {comfyui_version(comfyui)} from {comfyui}", flush=True)
    print("1. The tiny model (trained once, on handwritten digits: 2 minutes, more if busy) ...", flush=True)
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1) / 2
    link_checkpoint(ensure_checkpoint(base / "checkpoints", comfyui, threads=1 if is_busy else 2), base)
    write_text_encoder(base / "models" / "text_encoders")  # for pictures_to_lora.json
    print("2. Starting the server ...", flush=True)
    with ComfyServer(base, comfyui) as server:
        print(f"   {server.url}, log in {server.log_path}", flush=True)
        graph = json.loads(WORKFLOW.read_text(encoding="utf-8"))
        prompt = graph_to_prompt(graph, server.get("/object_info"))
        _forget_outputs(base)
        print(f"3. Running {WORKFLOW.relative_to(PACK)} ...", flush=True)
        bar = ProgressBar(prompt)
        try:
            result = run_prompt(server, prompt, report=bar.report)
        except PromptError as error:
            bar.finish()
            where = f" in {error.node_type}" if error.node_type else ""
            print(f"\ndemo: {server.explain(f'the workflow failed{where}: {error}')}", file=sys.stderr)
            return 1
        bar.finish()
        files = _collect_files(server, result)
    print(f"4. Done in {time.monotonic() - start_s:.0f} s:", flush=True)
    for kind, path in files:
        print(f"   {kind:<24} {path}")
    print("Expected: four digits 3 a picture, white on black without the LoRA, and in its colours with it.")
    print("The model is tiny: the colours are what it learns; many of its digits are hard to read.")
    print("To run it in your own ComfyUI, copy the small files there and drag a workflow onto the canvas:")
    print(f"   cp -rL {base}/models {base}/input YOUR_COMFYUI/")
    print(f"   {WORKFLOW}")
    print(f"   {WORKFLOW.with_name('pictures_to_lora.json')}")
    return 0


def _forget_outputs(base: Path) -> None:
    """Remove the last demo's outputs, so that what is printed is what this run made."""
    for folder in ("output/ferry", "output/loras"):
        shutil.rmtree(base / folder, ignore_errors=True)


def _collect_files(server: ComfyServer, result: PromptResult) -> list[tuple[str, Path]]:
    """Return ``(what it is, path)`` of everything the workflow made; previews are copied to the outputs."""
    output = server.base / "output"
    files = [("LoRA", path) for path in sorted((output / "loras").glob("*.safetensors"))]
    for node_output in result.outputs.values():
        for image in node_output.get("images", []):
            if image["type"] == "output":
                path = output / image["subfolder"] / image["filename"]
                kind = "without the LoRA" if "without" in path.name else "with the LoRA"
                files.append((f"picture {kind}", path))
            else:  # the loss plot is a preview, which ComfyUI deletes when it stops
                path = output / "ferry" / "loss_plot.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(server.download("/view?" + urllib.parse.urlencode(image)))
                files.append(("loss plot", path))
    return files


if __name__ == "__main__":
    sys.exit(main())
