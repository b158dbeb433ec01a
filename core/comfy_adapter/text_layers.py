"""Layers of a diffusion model that ComfyUI runs on the prompt, before any step and outside the forward.

LTX-2 keeps the last layers of its text encoder in the diffusion model. They run once for each prompt, in
ComfyUI's process, where a parallel MODEL's weights stay on the host and unpatched. So they run on the
host, and weight patches on them are refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import RequestError

_METHOD = "preprocess_text_embeds"
_PREFIX = "diffusion_model."


class TextLayersInjection:
    """Inject and eject ``HostTextLayers`` for one patcher; like ``RemoteInjection``, safely among clones."""

    def __init__(self) -> None:
        self._owner: Callable[[], Any] = lambda: None

    def inject(self, patcher: Any) -> None:
        """Set the instance's method, if its class has one."""
        module = patcher.model.diffusion_model
        if hasattr(type(module), _METHOD):
            module.__dict__[_METHOD] = HostTextLayers(module, self, set(patcher.patches))
            self._owner = weakref.ref(patcher)

    def eject(self, patcher: Any) -> None:
        """Take it away again, if ``patcher`` is the one that set it."""
        attributes = patcher.model.diffusion_model.__dict__
        current = attributes.get(_METHOD)
        if (
            isinstance(current, HostTextLayers)
            and current.injection is self
            and self._owner() in (None, patcher)
        ):
            del attributes[_METHOD]


class HostTextLayers:
    """Callable stored under the method's name in ``diffusion_model.__dict__``.

    Args:
        module: The diffusion model, its weights on the host.
        injection: What set it.
        patched: Names of the weights that the MODEL patches.
    """

    def __init__(self, module: nn.Module, injection: TextLayersInjection, patched: set[str]) -> None:
        self.module = module
        self.injection = injection
        self.patched = patched

    def __call__(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the method returns, on the device of ``context`` ``[B, T, C]``.

        Raises:
            RequestError: If the MODEL patches weights of a layer that ran.
        """
        host = next(self.module.parameters()).device
        with _called_children(self.module) as called:
            output = getattr(type(self.module), _METHOD)(self.module, context.to(host), *args, **kwargs)
        patched = sorted(name for name in self.patched if name.removeprefix(_PREFIX).split(".")[0] in called)
        if patched:
            raise RequestError(
                f"a parallel MODEL with {len(patched)} patched text layers was sampled ({patched[0]}, ...)",
                limit="They run before the workers do, with weights as loaded",
                way_out="Leave these layers out of the LoRA, or sample with a stock KSampler",
            )
        return output.to(context.device)


@contextlib.contextmanager
def _called_children(module: nn.Module) -> Iterator[set[str]]:
    """Give the names of the direct children that are called meanwhile."""
    called: set[str] = set()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.add(name)

    handles = [child.register_forward_pre_hook(note(name)) for name, child in module.named_children()]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
