"""Training data from folders of pictures and videos."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..core.comfy_adapter import (
    AUTO_PROMPT,
    CONTROL_PROMPTS,
    FAMILY_NAMES,
    NO_CONTROL,
    NO_START,
    START_IMAGES,
    cache_training_set,
    input_subfolders,
    load_input_folder,
    training_folder_version,
    training_set_images,
)
from .schema import known
from .types import TrainingCacheSocket, TrainingSetSocket


def _folder_inputs() -> list[Any]:
    return [
        io.Combo.Input(
            "folder",
            options=input_subfolders(),
            tooltip="A folder inside ComfyUI's input folder, with pictures or videos and a caption for each: "
            "cat.png and cat.txt. Its subfolders are not searched.",
        ),
        io.Int.Input(
            "resolution",
            default=1024,
            min=64,
            max=8192,
            step=16,
            tooltip="Pictures are brought to about this many pixels squared, in the shape nearest their own.",
        ),
        io.Combo.Input(
            "model_family",
            options=list(FAMILY_NAMES),
            default="any",
            tooltip="Decides the step of the picture sides. any: multiples of 64, which fit every model.",
        ),
        io.Int.Input(
            "repeats",
            default=1,
            min=1,
            max=10000,
            tooltip="How often each file comes in an epoch; balances joined folders of different sizes.",
        ),
        io.Float.Input(
            "caption_dropout",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="How often a sample is trained without its caption, so that CFG goes on working. 0.05 is "
            "usual.",
        ),
        io.Boolean.Input(
            "flip",
            default=False,
            tooltip="Add every picture once more with left and right exchanged. Not for text or faces.",
        ),
        io.String.Input(
            "default_caption",
            default="",
            tooltip="Caption of files without one. Empty: a missing caption is an error.",
        ),
        io.Float.Input(
            "max_upscale",
            default=1.25,
            min=1.0,
            max=16.0,
            step=0.05,
            tooltip="Pictures that would have to be enlarged more than this are errors: they teach blur.",
        ),
        io.Int.Input(
            "video_frames",
            default=17,
            min=1,
            max=1000,
            tooltip="Frames taken from the start of each video. Wan wants 4 n + 1.",
        ),
        io.Float.Input(
            "video_fps",
            default=16.0,
            min=0.0,
            max=240.0,
            step=1.0,
            tooltip="Frames a second taken from videos. 0: every frame of the file.",
        ),
    ]


class LoadTrainingFolder(io.ComfyNode):
    """A folder of pictures or videos with captions as a training set."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node; its list of folders is read each time ComfyUI asks."""
        return io.Schema(
            node_id="FerryLoadTrainingFolder",
            display_name="Load Training Folder",
            category="ferry/training",
            description="Reads pictures or videos with captions for training, sorted into buckets by shape.",
            inputs=[
                *_folder_inputs(),
                TrainingSetSocket.Input(
                    "before", optional=True, tooltip="Another training set that this one is joined to."
                ),
                io.Combo.Input(
                    "control_folder",
                    options=[NO_CONTROL, *input_subfolders()],
                    default=NO_CONTROL,
                    optional=True,
                    tooltip="For edit models (Qwen-Image-Edit): the folder with the picture before the edit "
                    "for each picture in 'folder', under the same name.",
                ),
            ],
            outputs=[
                TrainingSetSocket.Output(display_name="training_set", tooltip="For Cache Training Data.")
            ],
            **known(io.Schema, search_aliases=["dataset", "load images", "captions", "buckets"]),
        )

    @classmethod
    def fingerprint_inputs(cls, folder: str, control_folder: str = NO_CONTROL, **settings: Any) -> str:
        """Read the folders again when a file in them has changed."""
        return training_folder_version(folder, control_folder)

    @classmethod
    def execute(
        cls,
        folder: str,
        resolution: int,
        model_family: str,
        flip: bool,
        video_fps: float,
        before: Any = None,
        **settings: Any,
    ) -> io.NodeOutput:
        """Return the training set."""
        found = load_input_folder(
            folder,
            family=model_family,
            before=before,
            resolution_px=resolution,
            mirror=flip,
            video_rate_hz=video_fps,
            **settings,
        )
        return io.NodeOutput(found, ui=ui.PreviewText(found.summary()))


class TrainingSetImages(io.ComfyNode):
    """A training set as lists that every node understands."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="FerryTrainingSetImages",
            display_name="Training Set to Images",
            category="ferry/training",
            description="The pictures of a training set in their buckets, with captions, for any other node. "
            "All of them are held in memory.",
            inputs=[
                TrainingSetSocket.Input("training_set", tooltip="From Load Training Folder."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    tooltip="Decides which captions are dropped.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    display_name="images", is_output_list=True, tooltip="One for each sample of an epoch."
                ),
                io.String.Output(
                    display_name="captions", is_output_list=True, tooltip="In the same order as the images."
                ),
            ],
            **known(io.Schema, search_aliases=["dataset", "load images", "captions"]),
        )

    @classmethod
    def execute(cls, training_set: Any, seed: int) -> io.NodeOutput:
        """Return the pictures and the captions."""
        return io.NodeOutput(*training_set_images(training_set, seed=seed))


class CacheTrainingData(io.ComfyNode):
    """A training set, encoded once and kept on disk."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="FerryCacheTrainingData",
            display_name="Cache Training Data",
            category="ferry/training",
            description="Encodes pictures and captions once, to disk. A second run encodes nothing, and text "
            "encoder and VAE leave the GPU before training.",
            inputs=[
                TrainingSetSocket.Input("training_set", tooltip="From Load Training Folder."),
                io.Clip.Input("clip", tooltip="The text encoder that belongs to the model, with its LoRAs."),
                io.Vae.Input("vae", tooltip="The VAE that belongs to the model."),
                io.Combo.Input(
                    "control_prompt",
                    options=list(CONTROL_PROMPTS),
                    default=AUTO_PROMPT,
                    optional=True,
                    tooltip="How the text encoder is shown control pictures, as ComfyUI's text encode node "
                    "for that model does. auto: the newest way, if it takes pictures.",
                ),
                io.Combo.Input(
                    "start_image",
                    options=list(START_IMAGES),
                    default=NO_START,
                    optional=True,
                    tooltip="For models that make a video of a picture (Wan I2V): 'first frame' gives each "
                    "video its own first frame, as WanImageToVideo does.",
                ),
            ],
            outputs=[
                TrainingCacheSocket.Output(
                    display_name="training_data",
                    tooltip="For the input training_data of Train LoRA (Offload).",
                )
            ],
            **known(io.Schema, search_aliases=["split training", "latent cache", "encode dataset"]),
        )

    @classmethod
    def execute(
        cls,
        training_set: Any,
        clip: Any,
        vae: Any,
        control_prompt: str = AUTO_PROMPT,
        start_image: str = NO_START,
    ) -> io.NodeOutput:
        """Encode what is missing and return the cache."""
        result = cache_training_set(
            training_set, clip, vae, control_prompt=control_prompt, start_image=start_image
        )
        text = f"{result.num_encoded} encoded, {result.num_found} found; {result.cache.summary()}"
        return io.NodeOutput(result.cache, ui=ui.PreviewText(text))
