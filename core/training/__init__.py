"""LoRA training of any torch denoiser; plain PyTorch, usable without ComfyUI."""

from .block_checkpointing import BlockCheckpointing
from .checkpoint import read_lora, save_verified
from .config import LoraConfig, OffloadSettings, TrainingConfig
from .data import Batch, Sample, SampleOrder, SampleSource, draw_batches, pair_samples
from .lora import LoraAdapter, LoraAdapters
from .loss import LOSSES, DiffusionProcess, RectifiedFlow, sample_losses
from .optimizer import OPTIMIZERS
from .out_of_place import OutOfPlace
from .self_check import check_same_output
from .targets import Block, Target, find_blocks, is_linear, select_targets
from .trainer import Callbacks, train

__all__ = [
    "LOSSES",
    "OPTIMIZERS",
    "Batch",
    "Block",
    "BlockCheckpointing",
    "Callbacks",
    "DiffusionProcess",
    "LoraAdapter",
    "LoraAdapters",
    "LoraConfig",
    "OffloadSettings",
    "OutOfPlace",
    "RectifiedFlow",
    "Sample",
    "SampleOrder",
    "SampleSource",
    "Target",
    "TrainingConfig",
    "check_same_output",
    "draw_batches",
    "find_blocks",
    "is_linear",
    "pair_samples",
    "read_lora",
    "sample_losses",
    "save_verified",
    "select_targets",
    "train",
]
