"""Other GPUs that help to train: one process each, which maps the host's one copy of the weights.

The training itself stays in this process and on its own GPU. For every step it sends the adapters'
values and the calls of the network that others compute, and adds the gradients that come back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import comfy
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import RequestError
from ..log import get_logger
from ..offload import SharedMasters
from ..training import MicroStep, SampleSource, Share, Trouble, check_shares, draw_batches
from ..workers import PendingCall, WorkerPool, WorkerSpec, check_sendable
from .capacity import check_host
from .devices import helper_devices
from .model_export import comfyui_arguments, describe_model, named_parameters, named_tensors
from .recorded_calls import micro_step_calls
from .training import ComfyProcess
from .training_request import TrainingRequest
from .worker_start import check_interrupt

_LOG = get_logger("training")
_SECONDS_A_MICRO_STEP = 600.0
# What ComfyUI's loader decides for each layer of a patched model.
_CASTING = ("comfy_cast_weights", "comfy_force_cast_weights")


def check_helpers(model: Any, request: TrainingRequest) -> tuple[str, ...]:
    """Return the devices of the helpers of a training, none for one GPU.

    Raises:
        RequestError: If there are not so many, or the training cannot be shared.
    """
    gpus = request.gpus
    check_shares(request.training.accumulation_steps, num_devices=gpus)
    if gpus == 1:
        return ()
    if not request.offload.enabled:
        raise RequestError(
            f"gpus={gpus} was asked with offload off",
            limit="The GPUs share one copy of the weights in host memory, which offload keeps",
            way_out="Switch offload on; with vram_gb as large as the GPU nearly all weights stay on each",
        )
    devices = helper_devices(gpus, first=model.load_device)
    check_host(model.model, devices, shared=True, running=False)
    return devices


def describe_training(patcher: Any, request: TrainingRequest) -> dict[str, Any]:
    """Return what a helper needs to build the model of a patched MODEL, apart from its weights' values.

    To be called before anything is installed on the model.

    Raises:
        RequestError: If its weights are of a kind that helpers cannot hold.
    """
    module = patcher.model.diffusion_model
    buffers = set(dict(module.named_buffers(remove_duplicate=False)))
    own = named_parameters(module)
    _check_plain(module)
    names: dict[str, str] = {}
    places: dict[int, str] = {}
    shapes: dict[str, tuple] = {}
    for name, tensor in named_tensors(module).items():
        if name not in buffers:
            place = places.setdefault(id(tensor), name)
            names[name], shapes[place] = place, (tuple(tensor.shape), tensor.dtype)
    return {
        "description": describe_model(patcher.model),
        "names": names,
        "parameters": shapes,
        "buffers": {name: own[name].detach().cpu().clone() for name in buffers},
        "casting": {
            path: chosen
            for path, layer in module.named_modules()
            if (chosen := {name: vars(layer)[name] for name in _CASTING if name in vars(layer)})
        },
        "lora": asdict(request.lora),
        "offload": asdict(request.offload),
        "seed": request.training.seed,
        "loss": request.training.loss,
        "gradient_checkpointing": request.gradient_checkpointing,
    }


def _check_plain(module: nn.Module) -> None:
    for path, layer in module.named_modules():
        for kind in ("weight_function", "bias_function"):
            if getattr(layer, kind, None):
                raise RequestError(
                    f"gpus above 1 was asked, but {path} changes its weight at every call",
                    limit="Other processes cannot call functions of this one",
                    way_out="Set gpus to 1, or remove the node that does this",
                )
    for name, tensor in named_tensors(module).items():
        if is_traceable_wrapper_subclass(tensor):
            raise RequestError(
                f"gpus above 1 was asked, but {name} is a {type(tensor).__name__}",
                limit="Helpers hold plain weights and ComfyUI's quantized ones",
                way_out="Set gpus to 1, or load such a file with the stock loader",
            )


class TrainingHelpers:
    """The ``Helpers`` of a training, over a running pool.

    Args:
        pool: Its ranks have the model.
        process: The denoiser of this process, which says what to compute.
        request: The training.
    """

    def __init__(self, pool: WorkerPool, process: ComfyProcess, request: TrainingRequest) -> None:
        self.pool = pool
        self.process = process
        self.config = request.training
        self._call: PendingCall | None = None
        self._names: list[str] = []
        self._shapes: list[torch.Size] = []

    @property
    def count(self) -> int:
        """Processes besides this one."""
        return len(self.pool.ranks)

    def start(self, parameters: Mapping[str, nn.Parameter], shares: Sequence[Sequence[MicroStep]]) -> None:
        """Send each helper its share, and return at once."""
        self._names = list(parameters)
        self._shapes = [parameter.shape for parameter in parameters.values()]
        row = torch.cat([parameter.detach().view(-1) for parameter in parameters.values()]).cpu()
        common = {
            "names": self._names,
            "weights": row,
            "divisor": self.config.batch_size * self.config.accumulation_steps,
        }
        payloads = {
            rank: {
                **common,
                "micro_steps": [
                    micro_step_calls(self.process, micro_step, seed=self.config.seed) for micro_step in share
                ],
            }
            for rank, share in enumerate(shares)
        }
        deadline_s = _SECONDS_A_MICRO_STEP * max(len(share) for share in shares)
        self._call = self.pool.submit("gradients", payloads_by_rank=payloads, deadline_s=deadline_s)

    def finish(self) -> Share:
        """Wait for what was started; the user may cancel meanwhile.

        Raises:
            WorkerError: If a helper failed or died.
        """
        assert self._call is not None, "start() comes first"
        replies = self._call.wait(poll=check_interrupt)
        self._call = None
        found = [reply["trouble"] for reply in replies.values() if reply["trouble"] is not None]
        losses = [reply["losses"] for reply in replies.values()]
        if found:
            return Share(losses=losses, trouble=Trouble(**found[0]))
        summed = replies[0].get("gradients")
        if summed is None:
            return Share(losses=losses)
        pieces = summed["row"].split([shape.numel() for shape in self._shapes])
        had = summed["had"].tolist()
        gradients = {
            name: piece.view(shape)
            for name, piece, shape, count in zip(self._names, pieces, self._shapes, had, strict=True)
            if count
        }
        return Share(gradients, losses)


@contextlib.contextmanager
def running_helpers(
    devices: Sequence[str],
    message: Mapping[str, Any],
    shared: SharedMasters,
    *,
    process: ComfyProcess,
    samples: Sequence[SampleSource],
    request: TrainingRequest,
) -> Iterator[TrainingHelpers]:
    """Start the helpers, and end them with the training, however it ends.

    Args:
        devices: One for each, from ``check_helpers``.
        message: Of ``describe_training``.
        shared: Filled with the model's weights.
        process: The denoiser of this process.
        samples: The data; the first sample is tried before a process starts.
        request: The training.

    Raises:
        RequestError: If the calls of this model cannot be sent.
        WorkerError: If a helper does not start.
    """
    seed = request.training.seed
    first = MicroStep(0, draw_batches(samples[:1], seed=seed, micro_step=0))
    try:
        check_sendable(micro_step_calls(process, first, seed=seed), "the call of the model")
    except TypeError as error:
        raise RequestError(
            f"gpus={request.gpus} was asked",
            limit=f"The calls of this model cannot be sent to other processes: {error}",
            way_out="Set gpus to 1",
        ) from error
    _LOG.info("starting %d helpers on %s", len(devices), ", ".join(devices))
    with WorkerPool.start(_spec(devices), poll=check_interrupt) as pool:
        pool.call("load", {"message": {**message, "masters": shared.handle}}, poll=check_interrupt)
        yield TrainingHelpers(pool, process, request)


def _spec(devices: Sequence[str]) -> WorkerSpec:
    comfyui_root = Path(next(iter(comfy.__path__))).resolve().parent
    on_cpu = devices[0] == "cpu"
    return WorkerSpec(
        devices=tuple(devices),
        backend="gloo" if on_cpu else "nccl",
        setup="core.comfy_adapter.training_jobs",
        setup_args={"arguments": comfyui_arguments()},
        import_paths=(str(comfyui_root),),
        # As many as here, so that sums are made in the same order.
        num_threads=torch.get_num_threads() if on_cpu else None,
    )
