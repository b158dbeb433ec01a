"""What is added to a norm is what adding to its scale and bias would do."""

from __future__ import annotations

import copy

import pytest
import torch
from comfyui_ferry.core.training import LoraAdapters, LoraConfig, select_targets
from torch import nn
from torch.nn import functional as F


class ScaleRMSNorm(nn.Module):
    """As FLUX has it in ComfyUI 0.3.75."""

    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(size))

    def forward(self, x):
        return F.rms_norm(x, self.scale.shape, self.scale, 1e-6)


NORMS = {
    "layer": (lambda: nn.LayerNorm(8, eps=1e-3), ["diff", "diff_b"]),
    "layer without bias": (lambda: nn.LayerNorm(8, bias=False), ["diff"]),
    "rms": (lambda: nn.RMSNorm(8), ["diff"]),
    "scale": (lambda: ScaleRMSNorm(8), ["scale.diff"]),
}


@pytest.mark.parametrize("kind", NORMS)
def test_it_is_an_addition_to_scale_and_bias(kind):
    build, names = NORMS[kind]
    root = nn.Module()
    root.blocks = nn.ModuleList([nn.ModuleDict({"norm": build(), "to_q": nn.Linear(8, 8)})])
    block = root.blocks[0].requires_grad_(False)
    bare = copy.deepcopy(block)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    layers = select_targets(root, "blocks.0, +norms, +biases")
    with LoraAdapters(layers, LoraConfig(rank=2, targets="+biases"), seed=0, device="cpu") as adapters:
        assert torch.equal(block["to_q"](block["norm"](x)), bare["to_q"](bare["norm"](x)))
        for index, parameter in enumerate(adapters.parameters()):
            parameter.data.normal_(generator=torch.Generator().manual_seed(index))
        changed = block["to_q"](block["norm"](x))
        changed.sum().backward()
        assert all(bool(parameter.grad.any()) for parameter in adapters.parameters())
        saved = adapters.state_dict(prefix="", dtype=torch.float32)
    found = [name.removeprefix("blocks.0.norm.") for name in saved if ".norm." in name]
    assert found == names
    with torch.no_grad():
        scale = next(iter(bare["norm"].parameters()))
        scale += saved[f"blocks.0.norm.{names[0]}"]
        if len(names) == 2:
            bare["norm"].bias += saved["blocks.0.norm.diff_b"]
        lora = saved["blocks.0.to_q.lora_up.weight"] @ saved["blocks.0.to_q.lora_down.weight"]
        bare["to_q"].weight += 8.0 * lora  # alpha 16, rank 2
        bare["to_q"].bias += saved["blocks.0.to_q.diff_b"]
        # fp32, one product in place of two.
        torch.testing.assert_close(changed, bare["to_q"](bare["norm"](x)), rtol=1e-4, atol=1e-4)
