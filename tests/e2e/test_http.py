"""The shipped workflow and its variations over HTTP, on a real server with real worker processes."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ferry_support.comfy_server import PACK, ComfyServer
from ferry_support.graph_to_prompt import graph_to_prompt
from ferry_support.prompt_run import PromptError, PromptResult, run_prompt
from PIL import Image
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.comfy, pytest.mark.e2e, pytest.mark.timeout(420)]

Prompt = dict[str, Any]


def only(prompt: Prompt, class_type: str) -> dict[str, Any]:
    """The inputs of the one node of that class."""
    found = [node["inputs"] for node in prompt.values() if node["class_type"] == class_type]
    assert len(found) == 1, f"{len(found)} nodes of class {class_type}"
    return found[0]


def node_id(prompt: Prompt, class_type: str) -> str:
    return next(key for key, node in prompt.items() if node["class_type"] == class_type)


def pictures(server: ComfyServer, prompt: Prompt, result: PromptResult) -> dict[str, np.ndarray]:
    """File name prefix of each SaveImage -> its first picture, (H, W, 3) in 0 to 1."""
    found = {}
    for key, node in prompt.items():
        if node["class_type"] == "SaveImage":
            image = result.outputs[key]["images"][0]
            path = server.base / "output" / image["subfolder"] / image["filename"]
            found[node["inputs"]["filename_prefix"]] = np.asarray(Image.open(path).convert("RGB")) / 255.0
    return found


def only_outputs_behind(prompt: Prompt, node: str) -> Prompt:
    """The part of the prompt that needs the node, with all that this part needs."""

    def sources(key: str) -> set[str]:
        return {value[0] for value in prompt[key]["inputs"].values() if isinstance(value, list)}

    behind = {node}
    while grown := {key for key in prompt if key not in behind and sources(key) & behind}:
        behind |= grown
    while grown := {source for key in behind for source in sources(key)} - behind:
        behind |= grown
    return {key: entry for key, entry in prompt.items() if key in behind}


def without_other_outputs(prompt: Prompt, node: str) -> Prompt:
    """The node and all that it needs."""
    needed, open_ends = {node}, [node]
    while open_ends:
        values = prompt[open_ends.pop()]["inputs"].values()
        found = {value[0] for value in values if isinstance(value, list)} - needed
        needed |= found
        open_ends += found
    return {key: entry for key, entry in prompt.items() if key in needed}


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def prompt(server: ComfyServer, workflow: dict[str, Any]) -> Prompt:
    """The shipped workflow as a prompt."""
    return graph_to_prompt(workflow, server.get("/object_info"))


def sampling_prompt(server: ComfyServer, **changes: Any) -> Prompt:
    """Parallel Sampler and KSampler on the same inputs, both latents saved."""
    width, height = changes.pop("width", 64), changes.pop("height", 64)
    lora = changes.pop("lora", None)
    parallel = {"gpus": 2, "cfg_degree": 1, "ulysses_degree": 2}
    parallel |= {key: changes.pop(key) for key in list(changes) if key in parallel}
    load = {
        "class_type": "UNETLoader",
        "inputs": {"unet_name": "ferry_tiny_wan.safetensors", "weight_dtype": "default"},
    }
    prompt: Prompt = {"model": load}
    if lora is not None:
        prompt["lora"] = {
            "class_type": "LoraLoaderModelOnly",
            "inputs": {"model": ["model", 0], "lora_name": lora, "strength_model": 1.0},
        }
    for name in ("ferry_digit_5", "ferry_empty"):
        prompt[name] = {
            "class_type": "FerryLoadConditioning",
            "inputs": {"conditioning_name": f"{name}.safetensors"},
        }
    prompt["latent"] = {
        "class_type": "EmptyHunyuanLatentVideo",
        "inputs": {"width": width, "height": height, "length": 1, "batch_size": 1},
    }
    shared = {
        "model": ["lora" if lora else "model", 0],
        "seed": 11,
        "steps": 4,
        "cfg": 2.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "positive": ["ferry_digit_5", 0],
        "negative": ["ferry_empty", 0],
        "latent_image": ["latent", 0],
        "denoise": 1.0,
    } | changes
    prompt["parallel"] = {"class_type": "FerryParallelSampler", "inputs": shared | parallel}
    prompt["single"] = {"class_type": "KSampler", "inputs": shared}
    for name in ("parallel", "single"):
        prompt[f"save_{name}"] = {
            "class_type": "SaveLatent",
            "inputs": {"samples": [name, 0], "filename_prefix": f"latents/{name}"},
        }
    return prompt


def saved_latents(server: ComfyServer, result: PromptResult) -> tuple[torch.Tensor, torch.Tensor]:
    latents = []
    for name in ("parallel", "single"):
        file = result.outputs[f"save_{name}"]["latents"][0]
        latents.append(
            load_file(server.base / "output" / file["subfolder"] / file["filename"])["latent_tensor"]
        )
    return latents[0], latents[1]


def assert_same_latents(server: ComfyServer, result: PromptResult) -> None:
    """<= 1e-5 of the largest value: fp32 sums in another order, over 4 steps and the CFG difference."""
    parallel, single = saved_latents(server, result)
    assert single.abs().max() > 0.1
    assert (parallel - single).abs().max() <= 1e-5 * single.abs().max()


def test_pictures_become_a_lora_and_a_second_run_encodes_nothing(server: ComfyServer) -> None:
    graph = json.loads((PACK / "workflows" / "pictures_to_lora.json").read_text(encoding="utf-8"))
    prompt = graph_to_prompt(graph, server.get("/object_info"))
    only(prompt, "FerryTrainLoraOffload")["steps"] = 3
    caching, training = (
        node_id(prompt, f"Ferry{name}") for name in ("CacheTrainingData", "TrainLoraOffload")
    )

    before = files_below(server.base / "output" / "loras")
    first = run_prompt(server, prompt)
    pictures = len(list((server.base / "input" / "ferry_style").glob("*.png")))
    # Each picture, the one caption that all share, and the empty one for dropped captions.
    assert first.outputs[caching]["text"][0].startswith(f"{pictures + 2} encoded, 0 found")
    assert "Wan 2.1 and 2.2: rank 32 (auto)" in first.outputs[training]["text"][0]
    (lora,) = files_below(server.base / "output" / "loras") - before
    assert "pictures" in lora.name

    only(prompt, "FerryLoadTrainingFolder")["repeats"] = 2
    second = run_prompt(server, only_outputs_behind(prompt, caching))
    assert second.outputs[caching]["text"][0].startswith(f"0 encoded, {pictures + 2} found")


def test_workflow_trains_a_lora_that_changes_the_picture(server: ComfyServer, prompt: Prompt) -> None:
    before = files_below(server.base / "output" / "loras")
    result = run_prompt(server, prompt)

    (lora,) = files_below(server.base / "output" / "loras") - before
    tensors = load_file(lora)
    ups = [tensor for name, tensor in tensors.items() if name.endswith("lora_up.weight")]
    assert ups and all(bool(up.any()) and bool(torch.isfinite(up).all()) for up in ups)

    plot = result.outputs[node_id(prompt, "LossGraphNode")]["images"][0]
    assert (
        server.download(f"/view?filename={plot['filename']}&type=temp&subfolder={plot['subfolder']}")[1:4]
        == b"PNG"
    )

    shown = pictures(server, prompt, result)
    plain, styled = shown["ferry/without_lora"], shown["ferry/with_lora"]
    # White on black against blue on yellow: the paper is dark without the LoRA and yellow with it.
    assert np.abs(plain - styled).mean() > 0.2
    assert plain.mean() < 0.4
    red, green, blue = styled.reshape(-1, 3).mean(axis=0)
    assert red > blue + 0.15 and green > blue + 0.1

    for class_type in ("FerryTrainLoraOffload", "FerryParallelSampler"):
        seen = [p for p in result.progress if p.node_id == node_id(prompt, class_type) and p.maximum]
        assert seen, f"no progress from {class_type}"
        assert [p.value for p in seen] == sorted(p.value for p in seen)
        assert seen[-1].value == seen[-1].maximum


def test_second_run_with_another_seed_size_and_strength(server: ComfyServer, prompt: Prompt) -> None:
    run_prompt(server, prompt)
    only(prompt, "FerryParallelSampler")["seed"] = 99
    only(prompt, "EmptyHunyuanLatentVideo").update(width=96, height=48)
    only(prompt, "LoraModelLoader")["strength_model"] = 0.5
    result = run_prompt(server, prompt)
    assert node_id(prompt, "FerryTrainLoraOffload") in result.cached
    shown = pictures(server, prompt, result)
    assert {picture.shape for picture in shown.values()} == {(4 * 48, 4 * 96, 3)}
    assert not np.array_equal(shown["ferry/with_lora"], shown["ferry/without_lora"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"width": 80, "height": 48, "seed": 12},  # 15 tokens: they do not divide by 2
        {"gpus": 2, "cfg_degree": 2, "ulysses_degree": 1},
        {"sampler_name": "dpmpp_2m", "scheduler": "normal", "steps": 5, "cfg": 1.0},
    ],
    ids=["ulysses", "uneven", "cfg", "another-sampler"],
)
def test_parallel_sampler_gives_ksamplers_latent(server: ComfyServer, changes: dict[str, Any]) -> None:
    result = run_prompt(server, sampling_prompt(server, **changes))
    assert_same_latents(server, result)


def test_parallel_sampler_honours_a_lora_from_a_file(server: ComfyServer, prompt: Prompt) -> None:
    def trained() -> list[Path]:
        return sorted((server.base / "output" / "loras").glob("ferry_style_*.safetensors"))

    if not trained():  # by a test before
        run_prompt(server, prompt)
    (server.base / "models" / "loras").mkdir(exist_ok=True)
    shutil.copyfile(trained()[0], server.base / "models" / "loras" / "trained.safetensors")

    plain = run_prompt(server, sampling_prompt(server))
    plain_latent, _ = saved_latents(server, plain)
    styled = run_prompt(server, sampling_prompt(server, lora="trained.safetensors"))
    assert_same_latents(server, styled)
    styled_latent, _ = saved_latents(server, styled)
    assert (styled_latent - plain_latent).abs().mean() > 0.05


def test_stock_save_lora_writes_what_the_node_trained(server: ComfyServer, prompt: Prompt) -> None:
    train = node_id(prompt, "FerryTrainLoraOffload")
    prompt[train]["inputs"] |= {"steps": 2, "save_prefix": ""}
    needed = {key: node for key, node in prompt.items() if node["class_type"] != "SaveImage"}
    needed["stock"] = {
        "class_type": "SaveLoRA",
        "inputs": {"lora": [train, 0], "prefix": "stock/lora", "steps": [train, 2]},
    }
    run_prompt(server, needed)
    (saved,) = (server.base / "output" / "stock").glob("lora_2_steps_*.safetensors")
    assert any(name.endswith("lora_up.weight") for name in load_file(saved))


def as_dropped(definitions: dict[str, Any], class_type: str, **inputs: Any) -> dict[str, Any]:
    """A node as the canvas makes it: each input's default or first choice, and what is connected."""
    values = {}
    for name, (kind, *options) in definitions[class_type]["input"].get("required", {}).items():
        options = options[0] if options else {}
        choices = kind if isinstance(kind, list) else options.get("options", [])
        if choices or "default" in options:
            values[name] = options.get("default", next(iter(choices), None))
    return {"class_type": class_type, "inputs": values | inputs}


def test_every_node_works_as_it_is_dropped(server: ComfyServer) -> None:
    definitions = server.get("/object_info")
    small = {"width": 64, "height": 64, "length": 1}
    cond = ["cond", 0]
    encoded = {"positive": cond, "negative": cond, "latent_image": ["latent", 0]}
    nodes: dict[str, tuple[str, dict[str, Any]]] = {
        "model": ("FerryLoadDiffusionModelOffload", {}),
        "plain": ("UNETLoader", {}),
        "vae": ("VAELoader", {}),
        "clip": ("CLIPLoader", {"type": "sd3"}),
        "cond": ("FerryLoadConditioning", {}),
        "latent": ("EmptyHunyuanLatentVideo", small),
        "saved": ("FerrySaveConditioning", {"conditioning": cond}),
        "streamed": ("FerryOffloadModel", {"model": ["plain", 0]}),
        "parallel": ("FerryParallelModel", {"model": ["plain", 0]}),
        "sampled 0": ("FerryParallelSampler", {"model": ["plain", 0], **encoded}),
        "plan": ("FerryPlanParallelDegrees", {"model": ["plain", 0], **encoded}),
        "folder": ("FerryLoadTrainingFolder", {"resolution": 64, "default_caption": "a digit"}),
        "images": ("FerryTrainingSetImages", {"training_set": ["folder", 0]}),
        "seen": ("PreviewImage", {"images": ["images", 0]}),
        "cache": ("FerryCacheTrainingData", {
            "training_set": ["folder", 0], "clip": ["clip", 0], "vae": ["vae", 0],
        }),
        "training": ("FerryTrainLoraOffload", {
            "model": ["plain", 0], "training_data": ["cache", 0], "steps": 2, "save_prefix": "loras/dropped",
        }),
        "losses": ("LossGraphNode", {"loss": ["training", 1]}),
        "decoder": ("FerryParallelVAE", {"vae": ["vae", 0]}),
        "decoded": ("VAEDecode", {"samples": ["sampled 0", 0], "vae": ["decoder", 0]}),
        "picture": ("PreviewImage", {"images": ["decoded", 0]}),
        "doctor": ("FerryDoctor", {}),
    }  # fmt: skip
    for number, model in enumerate(("model", "streamed", "parallel"), start=1):
        nodes[f"sampled {number}"] = ("KSampler", {"model": [model, 0], "steps": 2, **encoded})
        nodes[f"kept {number}"] = ("SaveLatent", {"samples": [f"sampled {number}", 0]})
    # A text encoder of a few thousand weights is not one that workers know.
    assert {name for name in definitions if name.startswith("Ferry") and "Test" not in name} == {
        kind for kind, _ in nodes.values() if kind.startswith("Ferry") and "Test" not in kind
    } | {"FerryParallelTextEncoder"}
    prompt = {name: as_dropped(definitions, kind, **inputs) for name, (kind, inputs) in nodes.items()}
    result = run_prompt(server, prompt)
    latents = [
        load_file(server.base / "output" / file["subfolder"] / file["filename"])["latent_tensor"]
        for number in (1, 2, 3)
        for file in result.outputs[f"kept {number}"]["latents"]
    ]
    for latent in latents[1:]:
        torch.testing.assert_close(latent, latents[0], rtol=0, atol=1e-5 * float(latents[0].abs().max()))
    assert all(result.outputs[name] for name in ("plan", "seen", "training", "picture", "doctor"))


REFUSED = [
    ("FerryParallelSampler", {"gpus": 0}, "gpus"),
    ("FerryParallelSampler", {"gpus": 5}, "5"),
    ("FerryParallelSampler", {"gpus": 64, "ulysses_degree": 64}, "64"),
    ("FerryTrainLoraOffload", {"steps": 0}, "steps"),
    ("FerryTrainLoraOffload", {"rank": -1}, "rank"),
    ("FerryTrainLoraOffload", {"save_prefix": "../../escape"}, "escape"),
    ("FerryTrainLoraOffload", {"targets": "no.such.layer"}, "no.such.layer"),
    ("FerryLoadConditioning", {"conditioning_name": "missing.safetensors"}, "missing.safetensors"),
]


@pytest.mark.parametrize(
    ("class_type", "changes", "named"), REFUSED, ids=[f"{c}-{next(iter(x))}" for c, x, _ in REFUSED]
)
def test_bad_inputs_are_refused_by_name_and_leave_nothing(
    server: ComfyServer, prompt: Prompt, class_type: str, changes: dict[str, Any], named: str
) -> None:
    bad = node_id(prompt, class_type)
    prompt = only_outputs_behind(prompt, bad)
    prompt[bad]["inputs"] |= changes
    before = files_below(server.base)
    with pytest.raises(PromptError) as caught:
        run_prompt(server, prompt)
    assert named in str(caught.value)
    left = {
        path
        for path in files_below(server.base) - before
        if path.suffix in {".safetensors", ".tmp", ".partial"}
    }
    assert left == set()
    assert not (server.base.parent / "escape_00001_.safetensors").exists()
    run_prompt(server, sampling_prompt(server, gpus=2))  # the server goes on working


def latent_prompt(server: ComfyServer, prompt: Prompt, latent: torch.Tensor) -> Prompt:
    """The workflow's training with a latent from a file in place of the pictures."""
    path = server.base / "input" / "given.latent"
    save_file({"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}, path)
    prompt = json.loads(json.dumps(prompt))
    prompt["given"] = {"class_type": "LoadLatent", "inputs": {"latent": "given.latent"}}
    only(prompt, "FerryTrainLoraOffload").update(latents=["given", 0], steps=2)
    return prompt


def test_nan_latents_are_refused(server: ComfyServer, prompt: Prompt) -> None:
    latent = torch.zeros(2, 16, 1, 8, 8)
    latent[1, 3, 0, 2, 2] = float("nan")
    before = files_below(server.base / "output" / "loras")
    with pytest.raises(PromptError, match=r"(?i)nan") as caught:
        run_prompt(server, latent_prompt(server, prompt, latent))
    assert caught.value.node_type == "FerryTrainLoraOffload"
    assert files_below(server.base / "output" / "loras") == before


def test_an_interrupted_training_is_kept_goes_on_and_can_be_stopped(
    server: ComfyServer, prompt: Prompt
) -> None:
    training = node_id(prompt, "FerryTrainLoraOffload")
    only(prompt, "FerryTrainLoraOffload").update(steps=5000, seed=123, save_prefix="loras/broken_off")
    seen = threading.Event()

    def act(action: Callable[[], Any]) -> threading.Thread:
        seen.clear()
        thread = threading.Thread(target=lambda: seen.wait(120) and action())
        thread.start()
        return thread

    def stop() -> None:
        (running,) = server.get("/ferry/trainings")
        assert running["step"] > 0
        server.post(f"/ferry/trainings/{running['prompt_id']}/stop", {})

    def watch(progress: Any) -> None:
        if progress.node_id == training and progress.value >= 2:
            seen.set()

    start_s = time.monotonic()
    thread = act(lambda: server.post("/interrupt", {}))
    with pytest.raises(PromptError, match="interrupted"):
        run_prompt(server, prompt, report=watch)
    thread.join()
    assert time.monotonic() - start_s < 120
    output = server.base / "output"
    (state,) = (output / "training_states" / "loras" / "broken_off_00001").iterdir()
    assert (output / "loras" / "broken_off_00001_.safetensors").is_file()
    assert_same_latents(server, run_prompt(server, sampling_prompt(server, seed=21)))

    only(prompt, "FerryTrainLoraOffload").update(resume_from="latest")
    graph = node_id(prompt, "LossGraphNode")
    thread = act(stop)
    run_prompt(server, without_other_outputs(prompt, graph), report=watch)
    thread.join()
    (later,) = (output / "training_states" / "loras" / "broken_off_00002").iterdir()
    assert state.name < later.name
    assert server.get("/ferry/trainings") == []


def test_saved_conditioning_is_offered_and_loads(server: ComfyServer) -> None:
    load = {
        "class_type": "FerryLoadConditioning",
        "inputs": {"conditioning_name": "ferry_digit_1.safetensors"},
    }
    save = {"class_type": "FerrySaveConditioning", "inputs": {"conditioning": ["load", 0], "name": "my/one"}}
    run_prompt(server, {"load": load, "save": save | {"inputs": save["inputs"] | {"overwrite": False}}})
    info = server.get("/object_info/FerryLoadConditioning")["FerryLoadConditioning"]
    assert "my/one.safetensors" in json.dumps(info["input"]["required"]["conditioning_name"])
    folder = server.base / "models" / "conditioning"
    original, copy = (
        load_file(folder / name) for name in ("ferry_digit_1.safetensors", "my/one.safetensors")
    )
    assert torch.equal(original["cond"], copy["cond"])


def test_template_browser_lists_the_workflow(server: ComfyServer) -> None:
    listed = server.get("/workflow_templates")
    assert "train_and_sample" in listed["ComfyUI-Ferry"]
    graph = server.get("/api/workflow_templates/ComfyUI-Ferry/train_and_sample.json")
    assert any(node["type"] == "FerryTrainLoraOffload" for node in graph["nodes"])


def test_help_page_of_every_node(server: ComfyServer) -> None:
    nodes = [
        name for name, info in server.get("/object_info").items() if info["category"].startswith("ferry/")
    ]
    assert len(nodes) >= 5
    for name in nodes:
        try:
            page = server.download(f"/extensions/ComfyUI-Ferry/docs/{name}/en.md")
        except urllib.error.HTTPError as error:
            pytest.fail(f"no help page for {name}: {error}")
        assert page.startswith(b"# ")
