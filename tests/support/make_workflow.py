"""Write the files in ``workflows``: ``python -m support.make_workflow`` in the folder ``tests``.

A script, so that the order of the nodes' widgets is always that of the nodes; the positions and the
notes are for the person who opens the file.
"""

from __future__ import annotations

import json
from typing import Any

from .comfy_server import PACK
from .graph_builder import GraphBuilder, Output
from .make_model_workflows import definitions
from .tiny_text_encoder import NAME as TINY_TEXT_ENCODER

WORKFLOW = PACK / "workflows" / "train_and_sample.json"
CACHING_WORKFLOW = PACK / "workflows" / "pictures_to_lora.json"
_SEED = 7
_TRAINING = """## 1. Train a LoRA

The base model draws white digits on black. The pictures show the digit 3 in blue on yellow; 120 steps teach
the LoRA that style. The weights of the base model stay in host memory and come to the GPU layer by layer.

The LoRA is saved under *output/loras*, and *Plot Loss Graph* shows how the loss falls.

Use your own: choose a model and a VAE in the loaders, a folder of pictures under *input*, and encoded
captions (*Save Conditioning* behind any text encoder writes them), then raise *steps* and lower
*learning_rate*.

The small files that the loaders name are made by *./run demo* in the pack's folder; its last line says how to
copy them here."""
_SAMPLING = """## 2. Sample with it, in parallel

*Parallel Sampler* is KSampler on several GPUs: here 2 workers share one picture (*ulysses_degree* 2). On a
machine without GPUs the workers are CPU processes. It accepts any MODEL with its LoRAs applied.

Below, the stock KSampler draws the same seed without the LoRA, to see the difference."""


_CACHING = """## From a folder of pictures to a LoRA

1. Put pictures into a folder below *input*, each with a caption in a text file of its name (*cat.png*,
   *cat.txt*), and choose the folder in *Load Training Folder*. Whatever is wrong is listed by file name.
2. *Cache Training Data* encodes pictures and captions once. Running it again encodes nothing, and text
   encoder and VAE leave the GPU before the training.
3. *Train LoRA (Offload)*: leave *learning_rate*, *rank* and *alpha* at 0 and the other choices at auto to
   get what suits the model's family; the node's text says which values were taken.

The loaders name the small files of *./run demo*, whose text encoder tells captions apart, but knows no
language. With a model of your own, choose its text encoder, its type and its VAE, and 1024 or so as
*resolution*."""


def build_caching_workflow(object_info: dict[str, Any]) -> dict[str, Any]:
    """Return the graph: a folder of pictures, encoded once to disk, then trained on.

    Args:
        object_info: The server's answer to ``GET /object_info``.
    """
    builder = GraphBuilder(object_info)
    (model,) = builder.add(
        "UNETLoader", (40, 100), unet_name="ferry_tiny_wan.safetensors", weight_dtype="default"
    )
    (clip,) = builder.add("CLIPLoader", (40, 240), clip_name=TINY_TEXT_ENCODER, type="sd3")
    (vae,) = builder.add("VAELoader", (40, 420), vae_name="ferry_tiny_wan_vae.safetensors")
    builder.group("Models", (20, 30, 360, 480), "#3f789e")
    (training_set,) = builder.add(
        "FerryLoadTrainingFolder",
        (420, 100),
        node_size=(360, 360),
        folder="ferry_style",
        resolution=64,
        default_caption="the digit 3 in blue on yellow",
        caption_dropout=0.05,
    )
    (data,) = builder.add(
        "FerryCacheTrainingData",
        (420, 520),
        node_size=(360, 160),
        training_set=training_set,
        clip=clip,
        vae=vae,
    )
    _lora, losses, _steps = builder.add(
        "FerryTrainLoraOffload",
        (820, 100),
        node_size=(360, 860),
        model=model,
        training_data=data,
        steps=120,
        seed=_SEED,
        save_prefix="loras/ferry_pictures",
        batch_size=8,
    )
    builder.add("LossGraphNode", (1220, 100), node_size=(360, 400), loss=losses, filename_prefix="loss_graph")
    builder.note(_CACHING, (1220, 560), (360, 520))
    builder.group("Pictures, cache, LoRA", (400, 30, 1200, 1080), "#8a6d3b")
    return builder.graph()


def build_workflow(object_info: dict[str, Any]) -> dict[str, Any]:
    """Return the graph: load a model, train a LoRA on pictures, apply it, sample in parallel, save.

    Args:
        object_info: The server's answer to ``GET /object_info``.
    """
    builder = GraphBuilder(object_info)
    (model,) = builder.add(
        "UNETLoader", (40, 100), unet_name="ferry_tiny_wan.safetensors", weight_dtype="default"
    )
    (vae,) = builder.add("VAELoader", (40, 240), vae_name="ferry_tiny_wan_vae.safetensors")
    (positive,) = builder.add(
        "FerryLoadConditioning",
        (40, 360),
        node_title="Load Conditioning (the digit 3)",
        conditioning_name="ferry_digit_3.safetensors",
    )
    (negative,) = builder.add(
        "FerryLoadConditioning",
        (40, 510),
        node_title="Load Conditioning (empty prompt)",
        conditioning_name="ferry_empty.safetensors",
    )
    builder.group("Models and prompts", (20, 30, 360, 600), "#3f789e")
    lora = _add_training(builder, model, vae, positive)
    _add_sampling(builder, model, vae, lora, positive, negative)
    return builder.graph()


def _add_training(builder: GraphBuilder, model: Output, vae: Output, positive: Output) -> Output:
    (pictures,) = builder.add("LoadImageDataSetFromFolder", (420, 100), folder="ferry_style")
    (latents,) = builder.add("VAEEncode", (420, 220), pixels=pictures, vae=vae)
    lora, losses, _steps = builder.add(
        "FerryTrainLoraOffload",
        (800, 100),
        node_size=(360, 860),
        model=model,
        latents=latents,
        positive=positive,
        steps=120,
        learning_rate=0.005,
        rank=16,
        alpha=16.0,
        seed=_SEED,
        save_prefix="loras/ferry_style",
        batch_size=8,
        lora_dtype="fp32",
    )
    builder.add("LossGraphNode", (420, 360), node_size=(340, 400), loss=losses, filename_prefix="loss_graph")
    builder.note(_TRAINING, (20, 690), (360, 440))
    builder.group("1. Train a LoRA", (400, 30, 780, 1010), "#8a6d3b")
    return lora


def _add_sampling(
    builder: GraphBuilder, model: Output, vae: Output, lora: Output, positive: Output, negative: Output
) -> None:
    (with_lora,) = builder.add("LoraModelLoader", (1220, 100), model=model, lora=lora, strength_model=1.0)
    (latent,) = builder.add(
        "EmptyHunyuanLatentVideo", (1220, 270), width=64, height=64, length=1, batch_size=1
    )
    shared: dict[str, Any] = {
        "seed": _SEED,
        "steps": 16,
        "cfg": 2.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "positive": positive,
        "negative": negative,
        "latent_image": latent,
        "denoise": 1.0,
    }
    (parallel,) = builder.add(
        "FerryParallelSampler",
        (1580, 100),
        node_size=(360, 620),
        model=with_lora,
        gpus=2,
        cfg_degree=1,
        ulysses_degree=2,
        **shared,
    )
    (single,) = builder.add(
        "KSampler",
        (1220, 810),  # both samplers grow downwards, by the preview
        node_title="KSampler (without the LoRA)",
        node_size=(330, 320),
        model=model,
        **shared,
    )
    for samples, row, name in ((parallel, 100, "with_lora"), (single, 720, "without_lora")):
        (image,) = builder.add("VAEDecode", (1980, row), node_size=(220, 60), samples=samples, vae=vae)
        (large,) = builder.add(
            "ImageScaleBy", (1980, row + 100), image=image, upscale_method="nearest-exact", scale_by=4.0
        )
        builder.add(
            "SaveImage",
            (1980, row + 250),
            node_size=(320, 280),
            images=large,
            filename_prefix=f"ferry/{name}",
        )
    builder.note(_SAMPLING, (1220, 500), (330, 260))
    builder.group("2. Sample with it", (1200, 30, 1120, 1370), "#3f7a4f")


def main() -> None:
    """Write the files."""
    known = definitions()
    for path, build in ((WORKFLOW, build_workflow), (CACHING_WORKFLOW, build_caching_workflow)):
        path.write_text(json.dumps(build(known), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
