"""Train a model whose weights and optimizer live in host memory; only what computes is on the GPU.

    pip install -e . && python docs/examples/train_offload.py

The two scripts of DiffSynth-Studio's guide to offload training: with ``--plain`` the first one, all on the
GPU, else the second, with its import changed; ``OffloadTrainingManager`` takes the same arguments.
"""

from __future__ import annotations

import argparse

import torch
from comfyui_ferry.core.offload import OffloadTrainingManager


class ToyModel(torch.nn.Module):
    """Residual Linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, width]`` to ``[B, width]``."""
        for layer in self.layers:
            x = x + layer(torch.nn.functional.layer_norm(x, (self.width,)))
        return x


def main() -> None:
    """Train to add one to everything, and print the loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plain", action="store_true", help="Without offload, to compare")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, manager = ToyModel(options.width), None
    if options.plain:
        model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if not options.plain:  # the weights are on the host and stay there
        manager = OffloadTrainingManager(
            model, target_device=options.device, enable_optimizer_cpu_offload=True
        )
    for step in range(options.steps):
        x = torch.randn(512, options.width, device=options.device)
        loss = torch.nn.functional.mse_loss(model(x), x + 1)
        loss.backward()
        if manager is not None:
            manager.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    if manager is not None:
        whole = sum(parameter.nbytes for parameter in model.parameters())
        resident = manager.resident_bytes
        print(f"weights: {whole / 1e6:.2f} MB, of which {resident / 1e6:.2f} MB stay on {options.device}")
        manager.remove()  # the model is an ordinary one again, with the trained weights


if __name__ == "__main__":
    main()
