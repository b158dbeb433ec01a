"""Make the tiny checkpoint's files, once: a finished set is kept until these scripts change.

What is made, under ``<folder>/<hash of the scripts>``:
``models/diffusion_models/ferry_tiny_wan.safetensors``, ``models/vae/ferry_tiny_wan_vae.safetensors``,
``models/conditioning/ferry_digit_<0..9>.safetensors`` and ``ferry_empty.safetensors``, and the
pictures ``input/ferry_style/*.png`` that the demo's LoRA learns.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

_SEED = 20261130
_AUTOENCODER_STEPS, _AUTOENCODER_BATCH, _AUTOENCODER_ERROR_LIMIT = 320, 16, 0.10
_DENOISER_STEPS, _DENOISER_BATCH, _DENOISER_LOSS_LIMIT = 600, 32, 0.55
_STYLE_DIGITS, _PICTURES_PER_DIGIT = (3,), 12
_LIMIT_S = 1800  # on a machine that others use as well; two minutes on a quiet one
_PARTIAL = ".making_"


class CheckpointError(RuntimeError):
    """Training ended above its limit: the pictures would show nothing."""


def checkpoint_folder(root: Path) -> Path:
    """Return where the files of this version of the scripts belong under ``root``."""
    scripts = sorted(Path(__file__).resolve().parent.glob("*.py"))
    digest = hashlib.sha256(b"\0".join(script.read_bytes() for script in scripts)).hexdigest()
    return root / f"tiny_wan_{digest[:12]}"


def ensure_checkpoint(root: Path, comfyui: Path, *, threads: int = 1) -> Path:
    """Return the folder with ``models`` and ``input``, making it in a process of its own if it is missing.

    Args:
        root: Folder of all versions.
        comfyui: The ComfyUI checkout whose classes are trained; the files are valid in every one.
        threads: Of the training. On a quiet machine two are 1.5 times as fast; on a busy one each of its
            thousands of tiny operations waits for whichever was put aside (4 times slower).

    Raises:
        subprocess.CalledProcessError: If the training failed; it has said why on stderr.
        subprocess.TimeoutExpired: If it did not end within half an hour.
    """
    folder = checkpoint_folder(root)
    if not folder.is_dir():
        _make_in_a_process(root, comfyui, threads)
    return folder


def _make_in_a_process(root: Path, comfyui: Path, threads: int) -> None:
    command = [
        sys.executable,
        "-m",
        "support.tiny_checkpoint",
        "--comfyui",
        str(comfyui),
        "--root",
        str(root),
    ]
    tests = Path(__file__).resolve().parent.parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, cwd=tests, timeout=_LIMIT_S, env=environment)


def link_checkpoint(folder: Path, base: Path) -> None:
    """Put the files of ``folder`` into a ComfyUI base folder, as hard links where the disk allows."""
    for source in sorted(path for path in folder.rglob("*") if path.is_file()):
        target = base / source.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def make_checkpoint(root: Path, comfyui: Path) -> Path:
    """Train both models and write all files, unless there are such; the folder appears whole or not at all.

    Raises:
        CheckpointError: If a model has not learned enough.
    """
    folder = checkpoint_folder(root)
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second waits for the first one's files
        if folder.is_dir():
            return folder
        for left in root.glob(f"{_PARTIAL}*"):  # by a process that was killed
            shutil.rmtree(left)
        _set_up_comfyui(comfyui)
        with tempfile.TemporaryDirectory(dir=root, prefix=_PARTIAL) as name:
            partial = Path(name) / "files"
            _write_files(partial)
            partial.rename(folder)
    return folder


def _set_up_comfyui(comfyui: Path) -> None:
    sys.path.insert(0, str(comfyui))
    from comfy.cli_args import args

    args.cpu = True
    args.use_pytorch_cross_attention = True
    import comfy.model_management

    # 0.33 runs kernels without a backward pass unless told so; 0.3.75 has no such switch.
    if hasattr(comfy.model_management, "in_training"):
        comfy.model_management.in_training = True


def _write_files(folder: Path) -> None:
    import comfy.latent_formats

    from . import autoencoder, denoiser, pictures

    start_s = time.monotonic()
    generator = torch.Generator().manual_seed(_SEED)
    ink, classes = pictures.load_digits()
    latent_format = comfy.latent_formats.Wan21()

    vae = autoencoder.build_autoencoder(generator)
    with autoencoder.single_frame_layers():
        error = autoencoder.train_autoencoder(
            vae, ink, steps=_AUTOENCODER_STEPS, batch_size=_AUTOENCODER_BATCH, generator=generator,
            report=_show_progress("1 of 2, its VAE"),
        )  # fmt: skip
    base = pictures.paint_base(ink)
    autoencoder.normalise_latents(
        vae, base[::4], mean=latent_format.latents_mean, std=latent_format.latents_std
    )
    _report(f"VAE: mean error {error:.3f} of the picture range, {time.monotonic() - start_s:.0f} s")
    _require("VAE", error, _AUTOENCODER_ERROR_LIMIT)

    latents = latent_format.process_in(autoencoder.encode_pictures(vae, base))
    model = denoiser.build_denoiser(generator)
    captions = denoiser.make_captions(int(classes.max()) + 2, generator)
    loss = denoiser.train_denoiser(
        model,
        latents,
        classes,
        captions,
        steps=_DENOISER_STEPS,
        batch_size=_DENOISER_BATCH,
        generator=generator,
        report=_show_progress("2 of 2, its denoiser"),
    )
    _report(f"denoiser: loss {loss:.3f}; {time.monotonic() - start_s:.0f} s in all")
    _require("denoiser", loss, _DENOISER_LOSS_LIMIT)

    models = folder / "models"
    _save(models / "diffusion_models" / "ferry_tiny_wan.safetensors", model.state_dict())
    _save(models / "vae" / "ferry_tiny_wan_vae.safetensors", vae.state_dict())
    for index, caption in enumerate(captions):
        name = f"ferry_digit_{index}" if index + 1 < len(captions) else "ferry_empty"
        metadata = {"format": "comfyui_ferry.conditioning", "version": "1", "values": "{}"}
        _save(models / "conditioning" / f"{name}.safetensors", {"cond": caption[None]}, metadata)
    for digit in _STYLE_DIGITS:
        pictures.save_style_pictures(folder / "input" / "ferry_style", digit, _PICTURES_PER_DIGIT)


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, path, metadata
    )


def _require(name: str, value: float, limit: float) -> None:
    if not value <= limit:  # also for NaN
        raise CheckpointError(f"the tiny {name} ended at {value:.3f}, above its limit {limit}")


def _show_progress(what: str) -> Callable[[int, int], None]:
    """Return what shows progress: on a terminal every hundredth in one line, else a line for each fifth."""
    start_s, is_live = time.monotonic(), sys.stdout.isatty()

    def show(done: int, steps: int) -> None:
        parts = 100 if is_live else 5
        if done * parts // steps > (done - 1) * parts // steps:
            text = f"   {what}: {100 * done // steps} %, {time.monotonic() - start_s:.0f} s"
            print(f"\r{text}" if is_live else text, end="" if is_live and done < steps else "\n", flush=True)

    return show


def _report(text: str) -> None:
    print(f"   {text}", flush=True)
