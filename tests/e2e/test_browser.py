"""A person's way in: drop the workflow file on the canvas, press Run, see progress and the picture."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ferry_support.comfy_server import PACK, ComfyServer, comfyui_version

pytestmark = [pytest.mark.comfy, pytest.mark.e2e, pytest.mark.timeout(300)]

_FLAGS = [
    "--no-sandbox",  # tests run as root in CI
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
_READY = """() => window.app?.graph && window.app.extensionManager && document.querySelector('canvas')
    && 'FerryParallelSampler' in (window.LiteGraph?.registered_node_types ?? {})"""
_DROP = """([name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name, {type: 'application/json'}));
    const canvas = document.querySelector('#graph-canvas') ?? document.querySelector('canvas');
    const box = canvas.getBoundingClientRect();
    for (const kind of ['dragenter', 'dragover', 'drop'])
        canvas.dispatchEvent(new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true,
            clientX: box.x + 400, clientY: box.y + 300}));
}"""
_LISTEN = """() => {
    window.ferryEvents = [];
    for (const kind of ['progress', 'executed', 'execution_success', 'execution_error'])
        app.api.addEventListener(kind, event => window.ferryEvents.push({kind, detail: event.detail}));
}"""
_PICTURES = """() => Object.fromEntries(app.graph._nodes.filter(n => n.type === 'SaveImage').map(n =>
    [n.widgets.find(w => w.name === 'filename_prefix').value, app.nodeOutputs[n.id]?.images?.[0]]))"""
_FIT_VIEW = "() => app.extensionManager.command.execute('Comfy.Canvas.FitView')"
# While the page starts, a mask over everything swallows clicks; its animation has to end.
_UNCOVERED = "() => !document.querySelector('.p-blockui-mask, .p-progressspinner')"


@pytest.fixture
def page(server: ComfyServer) -> Iterator[Any]:
    """ComfyUI's page in headless Chromium, ready for input."""
    found = [
        path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))
    ]
    if not found:
        if os.environ.get("CI") == "true":
            pytest.fail("no Chromium in CI: the browser test has to run there")
        pytest.skip("no Chromium (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], headless=True, args=_FLAGS)
        try:
            opened = browser.new_context(viewport={"width": 1920, "height": 1080}, locale="en-US").new_page()
            opened.goto(f"{server.url}/", wait_until="domcontentloaded")
            opened.wait_for_function(_READY, timeout=60_000)
            opened.wait_for_function(_UNCOVERED, timeout=60_000)
            yield opened
        finally:
            browser.close()


@pytest.fixture
def screenshots(comfyui_path: Path) -> Path:
    """Where this version's screenshots go, outside git, to be looked at."""
    folder = PACK / ".demo" / "screenshots" / comfyui_version(comfyui_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_drop_the_workflow_press_run_see_the_picture(
    page: Any, workflow: dict[str, Any], server: ComfyServer, screenshots: Path
) -> None:
    page.evaluate(_DROP, ["train_and_sample.json", json.dumps(workflow)])
    page.wait_for_function(f"() => app.graph._nodes.length === {len(workflow['nodes'])}", timeout=20_000)
    unknown = page.evaluate("() => app.graph._nodes.filter(n => n.has_errors).map(n => n.type)")
    assert unknown == []
    page.evaluate(_FIT_VIEW)
    page.wait_for_timeout(1000)
    page.screenshot(path=screenshots / "1_dropped.png")

    page.evaluate(_LISTEN)
    page.locator('[data-testid="queue-button"]').first.click()
    page.wait_for_function("() => window.ferryEvents.some(e => e.kind === 'progress')", timeout=60_000)
    page.screenshot(path=screenshots / "2_running.png")
    page.wait_for_function(
        "() => window.ferryEvents.some(e => e.kind === 'execution_success' || e.kind === 'execution_error')",
        timeout=200_000,
    )
    failed = page.evaluate(
        "() => window.ferryEvents.filter(e => e.kind === 'execution_error').map(e => e.detail)"
    )
    assert failed == [], server.explain("the workflow failed in the browser")
    page.evaluate(_FIT_VIEW)
    page.wait_for_timeout(1500)
    page.screenshot(path=screenshots / "3_done.png")

    shown = page.evaluate(_PICTURES)
    assert set(shown) == {"ferry/with_lora", "ferry/without_lora"}
    for prefix, image in shown.items():
        assert image is not None, f"no picture in the node that saves {prefix}"
        size = page.evaluate(
            """image => new Promise((resolve, reject) => { const element = new Image();
                element.onload = () => resolve([element.naturalWidth, element.naturalHeight]);
                element.onerror = () => reject(new Error('the picture does not load'));
                element.src = app.api.apiURL('/view?' + new URLSearchParams(image)); })""",
            image,
        )
        assert size == [256, 256]  # 64 pixels, drawn 4 times as large


_ADD_NODE = """type => { const node = LiteGraph.createNode(type); app.graph.add(node); return node.id; }"""
_SET = """([id, name, value]) => {
    const widget = app.graph.getNodeById(id).widgets.find(w => w.name === name);
    widget.value = value; widget.callback?.(value); }"""
_DRAWN = """canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
    .data.some(value => value)"""
# The node's frame goes round the panel.
_PANEL_INSIDE = """() => { const node = app.graph._nodes[0];
    const panel = node.widgets.find(widget => widget.type === 'ferry_panel');
    return panel.y + panel.computedHeight <= node.size[1] + 1; }"""
_SAVED_WIDGETS = "() => app.graph.serialize().nodes.map(node => node.widgets_values.length)"


def test_the_gpu_map_checks_degrees_as_one_types_and_offers_a_fix(page: Any, screenshots: Path) -> None:
    page.evaluate("() => app.graph.clear()")
    node = page.evaluate(_ADD_NODE, "FerryParallelModel")
    shown = page.locator(".ferry-gpu-map")
    page.wait_for_function("() => document.querySelectorAll('.ferry-gpu').length === 2", timeout=10_000)

    page.evaluate(_FIT_VIEW)
    page.wait_for_timeout(1000)
    assert page.evaluate(_PANEL_INSIDE)
    page.screenshot(path=screenshots / "4_gpu_map.png")
    page.evaluate(_SET, [node, "cfg_degree", 2])
    assert "gpus is 2, but the degrees multiply to 4" in shown.inner_text()
    page.screenshot(path=screenshots / "5_degrees.png")
    page.evaluate("() => document.querySelector('.ferry-gpu-map button').click()")
    assert (
        page.evaluate(f"() => app.graph.getNodeById({node}).widgets.find(w => w.name === 'gpus').value") == 4
    )
    assert page.locator(".ferry-gpu").count() == 4
    titles = page.locator(".ferry-gpu").evaluate_all("boxes => boxes.map(box => box.title)")
    assert titles[1] == "CFG 1 of 2, Ulysses 2 of 2"
    assert titles[2] == "CFG 2 of 2, Ulysses 1 of 2"
    page.evaluate(_SET, [node, "ulysses_degree", 0])
    assert "A degree is 1 or more" in shown.inner_text()
    assert page.evaluate(_SAVED_WIDGETS) == [5]  # the map is no part of the workflow


def test_the_training_panel_shows_what_a_training_tells(page: Any, screenshots: Path) -> None:
    page.evaluate("() => app.graph.clear()")
    node = page.evaluate(_ADD_NODE, "FerryTrainLoraOffload")
    page.evaluate("""() => { app.canvas.ds.scale = 1; app.graph._nodes[0].pos = [300, 50]; }""")
    told = {"prompt_id": "some-prompt", "node_id": str(node), "steps": 20, "average_loss": 0.5}
    for step in range(1, 6):
        told |= {"step": step, "loss": 1 / step, "seconds_per_step": 0.25, "seconds_left": 65.0}
        page.evaluate(
            "told => app.api.dispatchEvent(new CustomEvent('ferry.training', {detail: told}))", told
        )
    text = page.locator(".ferry-lines").inner_text()
    assert "Step 5 of 20, loss 0.2000 (average 0.5000)" in text
    assert "0.250 s a step, 1:05 left" in text
    drawn = (
        "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(v => v)"
    )
    assert page.locator(".ferry-training canvas").evaluate(drawn)
    page.wait_for_timeout(500)
    page.screenshot(path=screenshots / "6_training.png")
    # No such training runs here, and the server says so.
    page.evaluate("() => document.querySelector('.ferry-training button').click()")
    page.wait_for_function(
        "() => document.querySelector('.ferry-lines').textContent.includes('no training of this prompt')",
        timeout=10_000,
    )
