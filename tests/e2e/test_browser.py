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
