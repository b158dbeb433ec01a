"""LoRA training of any torch denoiser; plain PyTorch, usable without ComfyUI."""

from .adapters import ALGORITHMS, Adapter, LoraAdapter
from .block_checkpointing import BlockCheckpointing
from .callbacks import Callbacks
from .checkpoint import read_lora, save_verified, sync_folder
from .config import LoraConfig, OffloadSettings, TrainingConfig
from .data import (
    Batch,
    Sample,
    SampleOrder,
    SampleSource,
    draw_batches,
    generator,
    pair_samples,
    seed_torch,
)
from .fingerprint import fingerprint, fingerprint_model
from .lora import LoraAdapters
from .loss import LOSSES, DiffusionProcess, RectifiedFlow, sample_losses
from .nan_guard import Trouble, find_layer
from .noise_levels import LOSS_WEIGHTINGS, MIN_SNR_GAMMA, TIMESTEP_SAMPLINGS, NoiseLevels, shifted
from .number_ranges import Range, check_number, check_numbers
from .optimizer import OPTIMIZERS, auto_learning_rate, check_device
from .out_of_place import OutOfPlace
from .recorded_blocks import RecordedBlocks
from .schedule import SCHEDULES, learning_rate_factor
from .self_check import check_managed_bytes, check_same_output, model_bytes
from .shares import Helpers, MicroStep, Share, check_shares
from .state_file import TrainingState, check_continues, check_identity, read_state, save_state
from .targets import Block, Target, find_blocks, is_linear, select_targets, split_patterns
from .trainer import Training, train

__all__ = [
    "ALGORITHMS",
    "LOSSES",
    "LOSS_WEIGHTINGS",
    "MIN_SNR_GAMMA",
    "TIMESTEP_SAMPLINGS",
    "NoiseLevels",
    "shifted",
    "OPTIMIZERS",
    "SCHEDULES",
    "Adapter",
    "Batch",
    "Block",
    "BlockCheckpointing",
    "Callbacks",
    "DiffusionProcess",
    "Helpers",
    "LoraAdapter",
    "LoraAdapters",
    "LoraConfig",
    "MicroStep",
    "OffloadSettings",
    "OutOfPlace",
    "RecordedBlocks",
    "Range",
    "RectifiedFlow",
    "Sample",
    "SampleOrder",
    "SampleSource",
    "Share",
    "Target",
    "Training",
    "TrainingConfig",
    "TrainingState",
    "Trouble",
    "auto_learning_rate",
    "check_continues",
    "check_device",
    "check_identity",
    "check_managed_bytes",
    "check_number",
    "check_numbers",
    "check_same_output",
    "check_shares",
    "draw_batches",
    "find_blocks",
    "find_layer",
    "fingerprint",
    "fingerprint_model",
    "generator",
    "is_linear",
    "learning_rate_factor",
    "model_bytes",
    "pair_samples",
    "read_lora",
    "read_state",
    "sample_losses",
    "save_state",
    "save_verified",
    "seed_torch",
    "select_targets",
    "split_patterns",
    "sync_folder",
    "train",
]
