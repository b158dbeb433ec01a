"""Train a LoRA on a diffusers transformer whose weights stay in host memory.

    pip install -e . diffusers && python docs/examples/diffusers_lora.py --model path/to/Qwen-Image

Without ``--model`` a tiny random model of the same class is trained, to try the script. The latents are
random here: put your own encoded pictures and captions in place of ``batches``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.training import LoraAdapters, LoraConfig, select_targets
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import save_file

HEIGHT, WIDTH, TEXT_TOKENS = 8, 6, 11


def load(path: str | None) -> QwenImageTransformer2DModel:
    """Return the transformer, on the host and frozen."""
    if path is not None:
        model = QwenImageTransformer2DModel.from_pretrained(
            path, subfolder="transformer", torch_dtype=torch.bfloat16
        )
    else:
        model = QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
            num_attention_heads=3, joint_attention_dim=20, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
    model.enable_gradient_checkpointing()
    return model.requires_grad_(False).train()


def batches(model: QwenImageTransformer2DModel, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield latents ``[B, tokens, C]`` and text embeddings ``[B, tokens, D]``, the same ones forever."""
    options = {"device": device, "dtype": model.dtype}
    latents = torch.randn(1, HEIGHT * WIDTH, model.config["in_channels"], **options)
    text = torch.randn(1, TEXT_TOKENS, model.config["joint_attention_dim"], **options)
    while True:
        yield latents, text


def loss_of(model: QwenImageTransformer2DModel, latents: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the flow-matching loss (arXiv:2210.02747) at one random noise level."""
    sigma = torch.rand(1, device=latents.device, dtype=latents.dtype)
    noise = torch.randn_like(latents)
    predicted = model(
        hidden_states=(1 - sigma) * latents + sigma * noise,
        encoder_hidden_states=text,
        timestep=sigma,
        img_shapes=[[(1, HEIGHT, WIDTH)]],
    ).sample
    return torch.nn.functional.mse_loss(predicted.float(), (noise - latents).float())


def main() -> None:
    """Train and save the LoRA."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="A folder in diffusers' layout; default: a tiny random model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="lora.safetensors")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = load(options.model)
    targets = select_targets(model, "transformer_blocks.*.attn")
    adapters = LoraAdapters(targets, LoraConfig(rank=8, alpha=8.0), seed=0, device=options.device)
    with adapters:
        optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2 if options.model is None else 1e-4)
        # Frozen weights stream; the LoRA stays on the device.
        manager = OffloadTrainingManager(
            model, target_device=options.device, enable_optimizer_cpu_offload=False
        )
        for step, (latents, text) in zip(range(options.steps), batches(model, options.device), strict=False):
            loss = loss_of(model, latents, text)
            loss.backward()
            manager.after_backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.4f}")
        tensors = {name: tensor.detach().cpu() for name, tensor in adapters.named_parameters().items()}
        manager.remove()
    save_file(tensors, options.output)
    print(f"{len(adapters)} layers, saved {options.output}")


if __name__ == "__main__":
    main()
