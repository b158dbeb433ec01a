"""All adapters of a model: put on, taken off, checked, collected.

What one adapter is stands in ``adapters``. This module does not choose layers (``targets``) and does
not write files (``checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import TrainingError
from ..log import get_logger
from ..module_hooks import Forward, ModuleHook, install_hook, remove_hook
from .adapters import ALGORITHMS, Adapter, check_layer
from .config import LoraConfig
from .data import generator
from .norm_adapter import NormAdapter
from .targets import Target, is_linear

_LOG = get_logger("training")
_HOOK = "lora"
_CHILD = "ferry_lora"


class _LoraHook(ModuleHook):
    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.called = False

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        self.called = True
        if args:
            return self.adapter.around(lambda x: forward(x, *args[1:], **kwargs), module, args[0])
        return self.adapter.around(lambda x: forward(**{**kwargs, "input": x}), module, kwargs["input"])


class LoraAdapters:
    """All adapters of a model; a context manager that takes them off again.

    While installed, each adapter is also a child of its layer, so that whatever manages the model's
    parameters (the offload engine) manages these too.

    Attributes:
        unused: Paths of adapters that were left out, see ``check_first_gradients``.

    Args:
        targets: The layers.
        config: Algorithm, rank and alpha.
        seed: Decides each adapter's start from the seed and its path alone.
        device: Where the masters live.
    """

    def __init__(
        self, targets: Sequence[Target], config: LoraConfig, *, seed: int, device: torch.device | str
    ) -> None:
        self.config = config
        self.targets = {target.path: target for target in targets}
        self.unused: list[str] = []
        self._hooks: dict[str, _LoraHook] = {}
        self._installed: list[str] = []
        for path, target in self.targets.items():
            adapter = _build(path, target.layer, config)
            adapter.start(generator(seed, "lora", path), target.layer)
            self._hooks[path] = _LoraHook(adapter.to(device))

    def __len__(self) -> int:
        return len(self._hooks)

    def __enter__(self) -> Self:
        try:
            self.install()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def install(self) -> None:
        """Put every adapter on its layer."""
        for path, hook in self._hooks.items():
            layer = self.targets[path].layer
            install_hook(layer, _HOOK, hook)
            self._installed.append(path)
            layer.add_module(_CHILD, hook.adapter)

    def remove(self) -> None:
        """Take the adapters off; the layers are as before. The trained values stay here."""
        for path in self._installed:
            layer = self.targets[path].layer
            remove_hook(layer, _HOOK)
            layer._modules.pop(_CHILD, None)
        self._installed.clear()

    def adapters(self) -> dict[str, Adapter]:
        """Return the adapters that are being trained, by the path of their layer."""
        return {path: hook.adapter for path, hook in self._hooks.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every trained parameter."""
        for hook in self._hooks.values():
            yield from hook.adapter.parameters()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return every trained parameter under its layer's path and its own name."""
        return {
            f"{path}.{name}": parameter
            for path, hook in self._hooks.items()
            for name, parameter in hook.adapter.named_parameters()
        }

    def last_with_bad_gradient(self) -> str:
        """Return the path of the last adapter, in model order, that has a gradient that is not finite."""
        bad = [path for path, hook in self._hooks.items() if not _is_finite(hook.adapter)]
        # Each finite, but too large to be squared.
        return bad[-1] if bad else "all adapters together (too large)"

    def check_first_gradients(self) -> None:
        """Make sure that every adapter can learn; to be called after the first backward.

        As long as an adapter's ``zero`` parameter is zero, that one alone has a gradient, so it decides.
        In the last block of a list whole branches may end unused (Qwen-Image drops the text half of its
        last block): their layers are called but no loss depends on them. Such adapters are left out.

        Raises:
            TrainingError: Naming the layers, if any other adapter has no gradient or a zero one.
        """
        learns = {path: _has_gradient(hook.adapter.zero_parameter()) for path, hook in self._hooks.items()}
        unused = [
            path
            for path, hook in self._hooks.items()
            if hook.called and self.targets[path].in_last_block and not learns[path]
        ]
        dead = {
            path: "the model reads this layer's weight without calling it"
            if not hook.called
            else "no gradient reaches it"
            for path, hook in self._hooks.items()
            if not (path in unused or learns[path])
        }
        if dead or len(unused) == len(self._hooks):
            named = "; ".join(f"{path}: {why}" for path, why in list(dead.items())[:5]) or "all are unused"
            raise TrainingError(
                f"{len(dead)} of {len(self._hooks)} adapters would never learn, so their part of the LoRA "
                f"would be silently missing ({named}). Take these layers out of 'targets' with a leading "
                f"'-', for example '-{next(iter(dead or unused))}'."
            )
        if unused:
            _LOG.info("left out %d layers of the last block without influence: %s", len(unused), unused)
        for path in unused:
            self.leave_out(path)

    def leave_out(self, path: str) -> None:
        """Take an adapter without influence out of the training and of the LoRA."""
        # The hook stays installed until remove(): it adds exactly zero.
        hook = self._hooks.pop(path)
        hook.adapter.requires_grad_(False)
        self.unused.append(path)

    def state_dict(self, *, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return host copies under the names that ComfyUI's own training node writes.

        Args:
            prefix: Put before each path, for example ``"diffusion_model."``.
            dtype: Of the matrices; ``alpha`` and vectors (DoRA's lengths) stay fp32.
        """
        tensors: dict[str, Tensor] = {}
        for path, adapter in self.adapters().items():
            for name, parameter in adapter.named_parameters():
                kept = torch.float32 if name == "dora_scale" else dtype
                value = parameter.detach().to("cpu", kept, copy=True)
                tensors[f"{prefix}{path}.{adapter.file_names.get(name, name)}"] = value.contiguous()
            if not isinstance(adapter, NormAdapter):
                tensors[f"{prefix}{path}.alpha"] = torch.tensor(float(self.config.alpha))
        return tensors


def _build(path: str, layer: Any, config: LoraConfig) -> Adapter:
    if not is_linear(layer):
        return NormAdapter(layer)
    check_layer(config.algorithm, path, layer)
    kind = ALGORITHMS[config.algorithm]
    adapter = kind(layer.in_features, layer.out_features, rank=config.rank, alpha=config.alpha)
    if config.trains_biases and layer.bias is not None:
        adapter.add_bias()
    return adapter


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _is_finite(adapter: nn.Module) -> bool:
    gradients = [parameter.grad for parameter in adapter.parameters() if parameter.grad is not None]
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
