"""A person's way in: drop the workflow file on the canvas, press Run, see progress and the picture."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ferry_support.browser import FIT_VIEW, load, open_page, page_beside
from ferry_support.comfy_server import PACK, ComfyServer, comfyui_version
from ferry_support.opened_workflows import NAMES, Canvas, path_of, runs_here
from ferry_support.tiny_models import is_newer_comfyui
from ferry_support.workflow_models import MODELS

pytestmark = [pytest.mark.comfy, pytest.mark.e2e, pytest.mark.timeout(500)]

EVERY_WORKFLOW = True

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
    for (const kind of ['progress', 'executed', 'execution_success', 'execution_error', 'ferry.workers'])
        app.api.addEventListener(kind, event => window.ferryEvents.push({kind, detail: event.detail}));
}"""
_PICTURES = """() => Object.fromEntries(app.graph._nodes.filter(n => n.type === 'SaveImage').map(n =>
    [n.widgets.find(w => w.name === 'filename_prefix').value, app.nodeOutputs[n.id]?.images?.[0]]))"""
_MAP_TEXT = """() => app.graph._nodes.find(node => node.type === 'FerryParallelSampler')
    .widgets.find(widget => widget.name === 'ferry_gpu_map').element.textContent"""


@pytest.fixture(scope="module")
def opened(server: ComfyServer, chromium: None) -> Iterator[Any]:
    """ComfyUI's page in headless Chromium, for all tests: it takes long to load."""
    with open_page(server.url) as loaded:
        yield loaded


@pytest.fixture
def page(opened: Any) -> Any:
    """ComfyUI's page with an empty graph, ready for input."""
    opened.evaluate("() => app.graph.clear()")
    return opened


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
    # What all of its steps learn is for the test over HTTP.
    training = page.evaluate("() => app.graph._nodes.find(n => n.type === 'FerryTrainLoraOffload').id")
    page.evaluate(_SET, [training, "steps", 12])
    page.evaluate(FIT_VIEW)
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
    page.evaluate(FIT_VIEW)
    page.wait_for_timeout(1500)
    page.screenshot(path=screenshots / "3_done.png")

    assert "s an evaluation of the model" in page.evaluate(_MAP_TEXT)
    told = page.evaluate(
        "() => window.ferryEvents.filter(e => e.kind === 'ferry.workers').map(e => e.detail.kind)"
    )
    assert told == ["starting", "started"]

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
_ADD_AT = """([type, x]) => { const node = LiteGraph.createNode(type); node.pos = [x, 0]; app.graph.add(node);
    return node.id; }"""
_SET = """([id, name, value]) => {
    const widget = app.graph.getNodeById(id).widgets.find(w => w.name === name);
    widget.value = value; widget.callback?.(value); }"""
_DRAWN = """canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
    .data.some(value => value)"""
# The node's frame goes round the panel.
_PANEL_INSIDE = """() => { const node = app.graph._nodes[0];
    const panel = node.widgets.find(widget => widget.type === 'ferry_panel');
    return panel.y + panel.computedHeight <= node.size[1] + 1; }"""
_VALUES = """id => Object.fromEntries(app.graph.getNodeById(id).widgets
    .filter(({name}) => /^gpus$|^(cfg|ulysses|ring|tensor_parallel)_degree$/.test(name))
    .map(({name, value}) => [name, value]))"""
_UNUSED = {"ring_degree": 1, "tensor_parallel_degree": 1}
_NODES_2_0 = "Comfy.VueNodes.Enabled"
_NO_SETTINGS = {"Ferry.Gpus": [], "Ferry.VramBudgetGb": 0, "Ferry.RamBudgetGb": 0, _NODES_2_0: False}
_PANELS_SAVED = """() => app.graph.serialize().nodes.some((saved, index) => saved.widgets_values.length
    > app.graph._nodes[index].widgets.filter(widget => widget.type !== 'ferry_panel').length)"""


_TELL = "([event, detail]) => app.api.dispatchEvent(new CustomEvent(event, {detail}))"
# What the server of a machine with four GPUs answers.
_FOUR_GPUS = {
    "kind": "cuda",
    "devices": [{"index": index, "name": "H200", "memory_bytes": 150 * 10**9} for index in range(4)],
    "chosen": [0, 1, 2, 3],
}
_MEASURED = {
    "degrees": {"cfg": 2, "tp": 1, "ring": 1, "ulysses": 2},
    "devices": [0, 1, 2, 3],
    "ranks": [{"computes": 0.7, "waits": 0.12, "memory_bytes": 24 * 10**9}] * 4,
    "evaluation_s": 0.33,
    "exchange_share": 0.12,
    "one_gpu_s": 1.1,
    "ideal_speed_up": 4,
    "speed_up": 3.33,
}


def test_the_gpu_map_checks_degrees_as_one_types_and_offers_a_fix(page: Any, screenshots: Path) -> None:
    node = page.evaluate(_ADD_NODE, "FerryParallelModel")
    shown = page.locator(".ferry-gpu-map")
    page.wait_for_function("() => document.querySelectorAll('.ferry-gpu').length === 2", timeout=10_000)

    page.evaluate(FIT_VIEW)
    page.wait_for_timeout(1000)
    assert page.evaluate(_PANEL_INSIDE)
    page.screenshot(path=screenshots / "4_gpu_map.png")
    page.evaluate(_SET, [node, "cfg_degree", 2])
    assert "gpus is 2, but the degrees multiply to 4" in shown.inner_text()
    page.screenshot(path=screenshots / "5_degrees.png")
    # By the keyboard: the fix, then the boxes in order.
    page.locator(".ferry-gpu-map button").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate(_VALUES, node) == {"gpus": 4, "cfg_degree": 2, "ulysses_degree": 2} | _UNUSED
    boxes = page.locator(".ferry-gpu")
    assert boxes.count() == 4
    assert page.evaluate("() => document.activeElement.textContent") == boxes.first.inner_text().replace(
        "\n", ""
    )
    page.keyboard.press("Tab")
    labels = boxes.evaluate_all("boxes => boxes.map(box => box.getAttribute('aria-label'))")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == labels[1]
    assert "CFG 1 of 2, Ulysses 2 of 2" in labels[1]
    assert "CFG 2 of 2, Ulysses 1 of 2" in labels[2]

    page.evaluate(_TELL, ["ferry.parallel", _MEASURED | {"node_id": str(node), "running": True}])
    figures = page.locator(".ferry-figures").inner_text()
    assert "12 % of a call is communication. Speed-up 3.33 of ideally 4 (one GPU: 1.10 s)" in figures
    assert "computes 70 % of the time, waits for other GPUs 12 %, holds 24.0 GB" in (
        boxes.first.get_attribute("aria-label")
    )
    # They belong to other degrees than these, and an unknown speed-up is not made up.
    page.evaluate(_SET, [node, "gpus", 2])
    page.evaluate(_SET, [node, "cfg_degree", 1])
    assert page.locator(".ferry-use").count() == 0
    alone = {"degrees": {"cfg": 1, "tp": 1, "ring": 1, "ulysses": 2}, "one_gpu_s": None, "speed_up": None}
    page.evaluate(_TELL, ["ferry.parallel", _MEASURED | alone | {"node_id": str(node), "ideal_speed_up": 2}])
    assert "run once with gpus 1 to measure" in page.locator(".ferry-figures").inner_text()
    page.evaluate(_SET, [node, "ulysses_degree", 0])
    assert "A degree is 1 or more" in shown.inner_text()
    page.evaluate(_SET, [node, "gpus", 64])
    page.locator(".ferry-gpu-map button").first.click()
    assert "A degree is 1 or more" not in shown.inner_text()
    assert "but " in shown.inner_text()  # more than there are
    page.locator(".ferry-gpu-map button").first.click()
    fitted = page.evaluate(_VALUES, node)
    assert fitted["gpus"] == fitted["ulysses_degree"] >= 8
    assert not page.evaluate(_PANELS_SAVED)  # the map is no part of the workflow

    # A message of what went wrong has the reason and the remedy, and stays until a key closes it.
    lost = {"kind": "killed", "workers": 2, "reason": "rank 1 got signal 9", "remedy": "Use fewer GPUs."}
    page.evaluate(_TELL, ["ferry.workers", lost])
    message = page.locator(".p-toast-message").filter(has_text="Ferry: A worker was killed")
    message.wait_for(timeout=10_000)
    assert all(lost[key] in message.inner_text() for key in ("reason", "remedy"))
    message.locator("button").focus()
    page.keyboard.press("Enter")
    message.wait_for(state="detached", timeout=10_000)


def test_settings_decide_what_auto_means_in_chinese_with_light_nodes_2_0(
    opened: Any, server: ComfyServer, screenshots: Path
) -> None:
    """On a machine that seems to have four GPUs; the server itself computes on the CPU."""
    words = json.loads((PACK / "locales" / "zh" / "main.json").read_text(encoding="utf-8"))["ferry"]
    page = page_beside(opened)
    page.route("**/ferry/machine", lambda route: route.fulfill(json=_FOUR_GPUS))
    server.post("/settings", {"Comfy.Locale": "zh", "Comfy.ColorPalette": "light", _NODES_2_0: True})
    try:
        load(page, server.url)
        page.evaluate("() => app.graph.clear()")
        node = page.evaluate(_ADD_NODE, "FerryParallelModel")
        page.evaluate(_ADD_AT, ["FerryOffloadModel", 400])
        training = page.evaluate(_ADD_AT, ["FerryTrainLoraOffload", 800])
        # A new node suits the machine.
        assert page.evaluate(_VALUES, node) == {"gpus": 4, "cfg_degree": 1, "ulysses_degree": 4} | _UNUSED
        assert page.evaluate("id => app.graph.getNodeById(id).title", node) == "并行模型"
        assert words["VRAM: auto is what is free."] in page.locator(".ferry-budget").first.inner_text()
        shown = page.locator(f"[data-node-id='{training}']")
        shown.get_by_text("resume_from").wait_for(timeout=10_000)
        assert shown.get_by_text("weight_decay").count() == 0
        assert (
            page.evaluate("id => app.graph.getNodeById(id).size[1]", training) < 1100
        )  # no room left for it
        fold = shown.locator(".ferry-fold button")
        assert fold.count() == (0 if is_newer_comfyui() else 1)  # 0.33 folds by itself
        if fold.count():
            fold.evaluate("button => button.click()")  # it then lies below the window
            shown.get_by_text("weight_decay").wait_for(timeout=10_000)
            fold.evaluate("button => button.click()")
            shown.get_by_text("weight_decay").wait_for(state="detached", timeout=10_000)
        page.evaluate(FIT_VIEW)
        page.evaluate(
            _TELL,
            ["ferry.workers", {"kind": "out_of_memory", "workers": 4, "reason": "rank 1", "remedy": "-"}],
        )
        page.get_by_text("Ferry: GPU 显存不足").wait_for(timeout=10_000)
        page.wait_for_timeout(500)
        page.screenshot(path=screenshots / "7_chinese_light.png")
        page.get_by_role("alert").get_by_role("button").first.click()

        page.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
        dialog = page.get_by_role("dialog")
        dialog.get_by_text("Ferry", exact=True).first.click()
        dialog.locator(".ferry-gpu-choice input").nth(1).check()
        budget = dialog.get_by_role("spinbutton").first
        budget.click()
        page.keyboard.press("Control+A")
        page.keyboard.type("7.5")
        page.keyboard.press("Tab")
        page.screenshot(path=screenshots / "8_settings.png")
        page.keyboard.press("Escape")
        page.wait_for_function("() => document.querySelector('.ferry-budget').textContent.includes('7.5')")
        too_many = words["gpus is {gpus}, but {usable} can be used."].format(gpus=4, usable=1)
        assert too_many in page.locator(".ferry-gpu-map").inner_text()
        # The server goes by it, too.
        until = time.monotonic() + 10
        while (chosen := server.get("/ferry/machine")["chosen"]) != [1] and time.monotonic() < until:
            time.sleep(0.1)
        assert chosen == [1]
        if is_newer_comfyui():  # 0.3.75's Nodes 2.0 moves the nodes of every file
            canvas = Canvas(server, page)
            canvas.open(path_of("train_and_sample"))
            page.wait_for_timeout(500)  # the nodes are measured once they are drawn
            assert canvas.misplaced() == []
    finally:
        page.context.close()
        server.post("/settings", {"Comfy.Locale": "en", "Comfy.ColorPalette": "dark"} | _NO_SETTINGS)


_HIDDEN = "() => app.graph._nodes[0].widgets.filter(({hidden}) => hidden).map(({name}) => name)"
_HEIGHT = "() => app.graph._nodes[0].size[1]"


def test_the_training_panel_shows_what_a_training_tells(page: Any, screenshots: Path) -> None:
    node = page.evaluate(_ADD_NODE, "FerryTrainLoraOffload")
    page.evaluate("""() => { app.canvas.ds.scale = 1; app.graph._nodes[0].pos = [300, 50]; }""")
    # What has a good default is folded away, but nothing that somebody chose.
    fold = page.locator(".ferry-fold button")
    page.wait_for_function(f"() => ({_HIDDEN})().length > 20", timeout=10_000)
    height = page.evaluate(_HEIGHT)
    fold.focus()
    page.keyboard.press("Enter")
    assert page.evaluate(_HIDDEN) == [] and page.evaluate(_HEIGHT) > height + 500
    page.evaluate(_SET, [node, "batch_size", 2])
    page.keyboard.press("Enter")
    hidden = page.evaluate(_HIDDEN)
    assert fold.inner_text() == f"More inputs ({len(hidden)})"
    assert "grad_accumulation_steps" in hidden and not {"batch_size", "steps"} & set(hidden)
    told = {"prompt_id": "some-prompt", "node_id": str(node), "steps": 20, "average_loss": 0.5}
    told |= {"gpu_bytes": 5.1e9, "gpu_total_bytes": 24e9, "gpu_peak_bytes": 7.9e9, "gpu_planned_bytes": 7.8e9}
    told |= {"pinned_bytes": 41e9, "stalled_share": 0.125, "predicted_seconds": 0.24}
    told |= {"plan": "keeps 3 of 60 blocks"}
    for step in range(1, 6):
        told |= {"step": step, "loss": 1 / step, "seconds_per_step": 0.25, "seconds_left": 65.0}
        page.evaluate(
            "told => app.api.dispatchEvent(new CustomEvent('ferry.training', {detail: told}))", told
        )
    text = page.locator(".ferry-lines").inner_text()
    assert "Step 5 of 20, loss 0.2000 (average 0.5000)" in text
    assert "0.250 s a step (predicted 0.240), 1:05 left" in text
    assert "VRAM 5.1 GB of 24.0 GB (peak 7.9 GB, planned 7.8 GB), pinned RAM 41.0 GB" in text
    assert "13 % waiting for weights" in text
    assert "Plan: keeps 3 of 60 blocks" in text
    assert page.locator(".ferry-training canvas").evaluate(_DRAWN)
    page.wait_for_timeout(500)
    page.screenshot(path=screenshots / "6_training.png")
    # No such training runs here, and the server says so.
    page.evaluate("() => document.querySelector('.ferry-training button').click()")
    page.wait_for_function(
        "() => document.querySelector('.ferry-lines').textContent.includes('no training of this prompt')",
        timeout=10_000,
    )


_SHIPPED = sorted((PACK / "workflows").glob("*.json"))
_SAVED_BEFORE = sorted((PACK / "tests" / "data" / "saved_workflows").glob("*/*.json"))
_OWN_TESTS = ("train_and_sample", "pictures_to_lora")  # are executed above and in test_http.py


@pytest.fixture(scope="module")
def definitions(server: ComfyServer) -> dict[str, Any]:
    """The server's nodes."""
    return server.get("/object_info")


@pytest.mark.parametrize("model", [model.key for model in MODELS])
def test_every_workflow_opens_as_it_was_written_and_runs_with_tiny_models(
    page: Any, server: ComfyServer, definitions: dict[str, Any], model: str
) -> None:
    names = [name for name in NAMES if name.removeprefix(model) in ("_train", "_low_vram", "_parallel")]
    if not any(map(runs_here, names)):
        pytest.skip("this ComfyUI lacks the model")
    canvas = Canvas(server, page)
    for name in names:
        prompt = canvas.check(path_of(name), definitions)
        assert canvas.misplaced() == [], name
        canvas.execute(name, prompt)


def test_workflows_with_tests_of_their_own_and_saved_ones_open_as_they_were_written(
    page: Any, server: ComfyServer, definitions: dict[str, Any]
) -> None:
    canvas = Canvas(server, page)
    assert {path.stem for path in _SHIPPED} == {*NAMES, *_OWN_TESTS}
    for name in _OWN_TESTS:
        canvas.check(path_of(name), definitions)
        assert canvas.misplaced() == [], name
    for path in _SAVED_BEFORE:
        if runs_here(path.stem):
            canvas.check(path, definitions)


def test_a_budget_for_two_experts_is_shared_and_told(page: Any, server: ComfyServer) -> None:
    # Each expert has two blocks. The budget holds one expert; the second gets what the first's rim leaves.
    canvas = Canvas(server, page)
    expert = server.base / "models/diffusion_models/wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors"
    canvas.run("wan22_i2v_low_vram", vram_budget_gb=1.2 * expert.stat().st_size / 2**30, prefetch_depth=0)
    told = canvas.streaming()
    assert "2 of 2 blocks stay in VRAM\n2 blocks resident, 0 streamed\nVRAM 0.3 MB, RAM 0.3 MB\n" in told[0]
    streams = "0 of 2 blocks stay in VRAM\n0 blocks resident, 2 streamed: 0.2 MB a pass\n"
    assert f"{streams}VRAM 0.3 MB, RAM 0.3 MB\n" in told[1]
    assert all(re.search(r"\n\d+ % of \d\S* s waiting for weights: \w+-bound$", text) for text in told), told
