"""Optimizers by name, from the libraries that people know them by.

torch's own are always there. ``bitsandbytes``, ``prodigyopt`` and ``schedulefree`` are asked for only
when one of theirs is chosen, and are never imported otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import RequestError


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    Attributes:
        module: The module that has it.
        name: The class in that module.
        options: Constructor arguments besides the parameters, learning rate and weight decay.
        package: What ``pip install`` calls its package; empty for torch's own.
        averages_weights: It keeps an average of the weights itself and has ``train()`` and ``eval()``
            to switch between the two (The Road Less Scheduled, arXiv:2405.15682).
        needs_gpu: Its kernels are written for GPUs only.
        learning_rate: What it is best started with where AdamW's rate would be wrong; None: AdamW's own.
        has_usual_rate: Whether there is a rate that suits most models.
        state_bytes: What it keeps for each value of a large fp32 matrix from its first step on, in bytes.
    """

    module: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()
    package: str = ""
    averages_weights: bool = False
    needs_gpu: bool = False
    learning_rate: float | None = None
    has_usual_rate: bool = True
    state_bytes: int = 8


OPTIMIZERS: dict[str, OptimizerKind] = {
    "AdamW": OptimizerKind("torch.optim", "AdamW", (("fused", True),)),
    "Adam": OptimizerKind("torch.optim", "Adam", (("fused", True),)),
    # Its step is as large as the gradient, which differs by orders of magnitude between models.
    "SGD": OptimizerKind("torch.optim", "SGD", has_usual_rate=False, state_bytes=0),
    "RMSprop": OptimizerKind("torch.optim", "RMSprop", state_bytes=4),
    # Its rate is relative to the weights' own size (arXiv:1804.04235); torch's default.
    "Adafactor": OptimizerKind("torch.optim", "Adafactor", learning_rate=1e-2, state_bytes=0),
    "AdamW8bit": OptimizerKind(
        "bitsandbytes.optim", "AdamW8bit", package="bitsandbytes", needs_gpu=True, state_bytes=2
    ),
    # It finds the rate and multiplies by this one (arXiv:2306.06101). Without the safeguard a warm-up
    # spoils what it finds, as its authors say.
    "Prodigy": OptimizerKind(
        "prodigyopt",
        "Prodigy",
        (("safeguard_warmup", True),),
        package="prodigyopt",
        learning_rate=1.0,
        state_bytes=16,
    ),
    "AdamWScheduleFree": OptimizerKind(
        "schedulefree", "AdamWScheduleFree", package="schedulefree", averages_weights=True
    ),
}


def check_installed(name: str) -> None:
    """Refuse an optimizer whose package is not there.

    Raises:
        RequestError: With the line that installs it.
    """
    kind = OPTIMIZERS[name]
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise RequestError(
            f"optimizer={name!r} was asked",
            limit=f"It is part of the package {kind.package}, which is not installed",
            way_out=f"Run 'pip install {kind.package}' in ComfyUI's Python, or choose AdamW",
        )


def check_device(name: str, device: torch.device | str) -> None:
    """Refuse an optimizer that cannot work where the adapters live.

    Raises:
        RequestError: If it needs a GPU and ``device`` is none.
    """
    if OPTIMIZERS[name].needs_gpu and torch.device(device).type == "cpu":
        raise RequestError(
            f"optimizer={name!r} was asked with the LoRA in host memory",
            limit=f"{OPTIMIZERS[name].package} computes it on GPUs only",
            way_out="Switch optimizer_on_cpu off or train on a GPU, or choose AdamW",
        )


def build_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float = 0.01
) -> torch.optim.Optimizer:
    """Return the optimizer, with its library's own defaults for everything that is not named here.

    Raises:
        RequestError: If its package is not installed.
    """
    check_installed(name)
    kind = OPTIMIZERS[name]
    build: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module(kind.module), kind.name)
    return build(list(parameters), lr=learning_rate, weight_decay=weight_decay, **dict(kind.options))


def auto_learning_rate(name: str, adamw_rate: float) -> float:
    """Return the learning rate to start with where a person names none.

    Args:
        name: A key of ``OPTIMIZERS``.
        adamw_rate: What suits the model with AdamW.

    Raises:
        RequestError: If there is no rate that suits most models.
    """
    kind = OPTIMIZERS[name]
    if not kind.has_usual_rate:
        raise RequestError(
            f"optimizer={name!r} was asked with learning_rate=0 (auto)",
            limit="Its steps are as large as the gradients, so no learning rate suits all models",
            way_out="Set learning_rate, for example to 0.1, or choose another optimizer",
        )
    return adamw_rate if kind.learning_rate is None else kind.learning_rate


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the norm of all gradients together; NaN or infinite if one value is, or overflows squared."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2))))


def gradients_are_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether no gradient holds NaN or an infinite value, and none would overflow squared."""
    return math.isfinite(gradient_norm(parameters))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
