"""Find out how ComfyUI would call the diffusion model, without computing it, so that a helper can.

ComfyUI's own code in front of the network (conditioning, scaling, dtypes) and behind it runs here; what
crosses to the helper is one call of the network and the output that would have no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..training import MicroStep, generator, seed_torch
from .nested import map_tensors
from .remote_forward import sendable_options
from .training import ComfyProcess, draw_seeds


class _CallFound(BaseException):
    # No error: it carries the call out of ComfyUI's code, past its `except Exception`.
    def __init__(self, args: tuple, kwargs: dict) -> None:
        super().__init__()
        self.args_of_call = args
        self.kwargs = kwargs


def micro_step_calls(process: ComfyProcess, micro_step: MicroStep, *, seed: int) -> list[dict[str, Any]]:
    """Return the calls of a micro-step as plain values on the CPU.

    Args:
        process: The denoiser; its network is not called.
        micro_step: What is to be computed.
        seed: The training's.

    Returns:
        For each call: ``args``, ``kwargs``, the ``target`` ``(B, C, ...)`` that the output should be,
        the ``weight`` ``(B,)`` of each sample's loss, and ``random``, a seed for torch.

    Raises:
        RequestError: If the MODEL carries what cannot be sent.
    """
    calls: list[dict[str, Any]] = []
    for index, batch in enumerate(micro_step.batches):
        seed_torch(generator(seed, "torch", micro_step.number, index).initial_seed(), process.device)
        clean, noise = batch.clean.to(process.device), batch.noise.to(process.device)
        sigma = process.sigmas(batch.positions)
        noisy = process.add_noise(clean, noise, sigma)
        # The clean prediction is affine in the output, so this output is the one without an error.
        at_zero = process.model.model_sampling.calculate_denoised(sigma, torch.zeros_like(noisy), noisy)
        scale = process.output_scale(sigma).view(-1, *(1,) * (clean.ndim - 1))
        target, weight = (clean - at_zero) / scale, process.loss_weight(sigma)
        groups = process.groups(noisy, batch.conditions)
        for group, call_random in zip(groups, draw_seeds(len(groups)), strict=True):
            with _recording(process.model.diffusion_model):
                try:
                    process.run_group(group, noisy, sigma)
                    raise AssertionError("ComfyUI did not call the diffusion model")
                except _CallFound as found:
                    args, kwargs = found.args_of_call, found.kwargs
            if "transformer_options" in kwargs:
                kwargs["transformer_options"] = sendable_options(kwargs["transformer_options"])
            call = {
                "args": args,
                "kwargs": kwargs,
                "target": target[group.rows],
                "weight": weight[group.rows],
                "random": call_random,
            }
            calls.append(map_tensors(call, lambda tensor: tensor.detach().cpu()))
    return calls


@contextmanager
def _recording(network: nn.Module) -> Iterator[None]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise _CallFound(args, kwargs)

    before = network.__dict__.get("forward")
    network.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del network.__dict__["forward"]
        else:
            network.__dict__["forward"] = before
