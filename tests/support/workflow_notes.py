"""The notes on the workflows: what to download, what happens, what to change.

Names stand in italics: ComfyUI's Nodes 2.0 draws code in blue on bluish grey, which nobody can read.
"""

from __future__ import annotations

from .workflow_graphs import Mode, degrees
from .workflow_models import WorkflowModel

_LOW_VRAM = """The weights stay in host memory and come to the GPU block by block, a block ahead of its use;
the result is that of the stock loader, bit for bit. *vram_budget_gb* is what they may take of the GPU
(0: what is free). More on it: the node's help page."""
_PARALLEL = """Each evaluation of the model is shared by {gpus} GPUs ({how}), with the same result as on one.
The first run starts a worker process a GPU and loads the weights there; later runs find them in place.
{more}"""
_WITH_CFG = """*gpus* must be the product of the degrees: for 4 GPUs set *ulysses_degree* to 2, for 8 to 4."""
_WITHOUT_CFG = """*gpus* must be the product of the degrees: for 4 GPUs set *ulysses_degree* to 4. There is
one prompt only, so *cfg_degree* stays 1."""
_QUANTIZED = """

On several GPUs {names} needs ComfyUI 0.33: 0.3.75 keeps such weights in a form that workers cannot
hold, and the node refuses it. With 0.3.75 use a bf16 or fp16 file of the model."""
EXAMPLES = {
    "pictures": """\
1. Make the folder *input/my_pictures* in ComfyUI: pictures, and for each a text file of its name with
   the caption (*cat.png*, *cat.txt*). Reload the page, and choose the folder if it is not chosen.""",
    "pairs": """\
1. Make two folders in ComfyUI's *input*: *my_pictures* with the results, and for each a text file of its
   name with the instruction (*house.png*; *house.txt*: *make it winter*); *my_originals* with the
   pictures from before the edit, under the same names. Reload the page, and choose them if they are not.""",
    "videos": """\
1. Make the folder *input/my_videos* in ComfyUI: videos, and for each a text file of its name with the
   caption (*wave.mp4*, *wave.txt*). Reload the page, and choose the folder if it is not chosen. Each
   video starts from its own first frame (*start_image*); *video_frames* of it are taken.""",
}
_TRAINING = """\
2. Run. Examples and captions are encoded once, to disk; then text encoder and VAE leave the GPU.
3. The LoRA is saved in *output/loras*. It fits the stock *Load LoRA*.

*rank*, *alpha* and *learning_rate* at 0 and the choices at auto become what suits the model; the node says
which values it took. 100 steps for each example are a start, 1000 to 3000 in all."""
_EXPERTS = """

The model has two experts, each with a LoRA of its own: the left node trains on much noise, the right
one on little (*noise_range*). To train only one, mute the other (Ctrl+M)."""


def _downloads(model: WorkflowModel) -> str:
    lines = [f"- [{file.name}]({file.url}) into *models/{file.directory}*" for file in model.files]
    newer = "\n\nNeeds a ComfyUI newer than 0.3.75 (tried: 0.33)." if model.newer_only else ""
    return "**Files** (ComfyUI offers to download what is missing)\n\n" + "\n".join(lines) + newer


def sampling_note(model: WorkflowModel, mode: Mode) -> str:
    """Return the note of a sampling workflow, in Markdown."""
    if mode is Mode.LOW_VRAM:
        title, text = "low VRAM", _LOW_VRAM
        if len(model.models) > 1:
            text += "\nBoth experts share one budget (*share_with*): nothing is read again at the switch."
    else:
        chosen = degrees(model)
        with_cfg = chosen["cfg_degree"] > 1
        how = "one for each prompt" if with_cfg else "parts of one sequence, Ulysses"
        more = _WITH_CFG if with_cfg else _WITHOUT_CFG
        title, text = "parallel", _PARALLEL.format(gpus=chosen["gpus"], how=how, more=more)
        quantized = [f"*{file.name}*" for file in model.models if file.is_quantized]
        if quantized and not model.newer_only:
            text += _QUANTIZED.format(names=" or ".join(quantized))
    return f"## {model.title}, {model.task}: {title}\n\n{text}\n\n{_downloads(model)}"


def training_note(model: WorkflowModel) -> str:
    """Return the note of a training workflow, in Markdown."""
    experts = _EXPERTS if len(model.models) > 1 else ""
    steps = f"{EXAMPLES[model.examples]}\n{_TRAINING}{experts}"
    return f"## {model.title}: train a LoRA\n\n{steps}\n\n{_downloads(model)}"
