"""Train a LoRA on a diffusers transformer with accelerate, the transformer's weights in host memory.

    pip install -e . accelerate diffusers
    accelerate launch docs/examples/diffusers_lora.py --model path/to/Qwen-Image
    accelerate launch --num_processes 2 docs/examples/diffusers_lora.py --model path/to/Qwen-Image

Without ``--model`` a tiny random model of the same class is trained, to try the script. The latents are
random here: put your own encoded pictures and captions in place of ``data``. accelerate has the loop, the
devices and the processes; it is not given the model, which it would move to the GPU as a whole. The file is
for ``pipeline.load_lora_weights("lora.safetensors")`` (with the package ``peft``) and ComfyUI's Load LoRA.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from accelerate import Accelerator
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.training import LoraAdapters, LoraConfig, select_targets
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

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


def data(model: QwenImageTransformer2DModel, batch_size: int) -> DataLoader:
    """Return batches of latents ``[B, tokens, C]`` and text ``[B, tokens, D]``: one picture, repeated."""
    latents = torch.randn(1, HEIGHT * WIDTH, model.config["in_channels"], dtype=model.dtype)
    text = torch.randn(1, TEXT_TOKENS, model.config["joint_attention_dim"], dtype=model.dtype)
    dataset = TensorDataset(latents.expand(8, -1, -1), text.expand(8, -1, -1))
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def loss_of(model: QwenImageTransformer2DModel, latents: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the flow-matching loss (arXiv:2210.02747) at one random noise level."""
    sigma = torch.rand(latents.shape[0], device=latents.device, dtype=latents.dtype)
    mixed = sigma[:, None, None]
    noise = torch.randn_like(latents)
    predicted = model(
        hidden_states=(1 - mixed) * latents + mixed * noise,
        encoder_hidden_states=text,
        timestep=sigma,
        img_shapes=[[(1, HEIGHT, WIDTH)]] * latents.shape[0],
    ).sample
    return torch.nn.functional.mse_loss(predicted.float(), (noise - latents).float())


def main() -> None:
    """Train and save the LoRA."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="A folder in diffusers' layout; default: a tiny random model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step")
    parser.add_argument("--output", default="lora.safetensors")
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    torch.manual_seed(0)
    model = load(options.model)
    targets = select_targets(model, "transformer_blocks.*.attn")
    adapters = LoraAdapters(targets, LoraConfig(rank=8, alpha=8.0), seed=0, device=accelerator.device)
    with adapters:
        optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2 if options.model is None else 1e-4)
        optimizer, loader = accelerator.prepare(optimizer, data(model, options.batch_size))
        # Frozen weights stream; the LoRA stays on the device.
        manager = OffloadTrainingManager(
            model, target_device=str(accelerator.device), enable_optimizer_cpu_offload=False
        )
        torch.manual_seed(accelerator.process_index)  # each process draws noise of its own
        train(accelerator, model, manager, optimizer, loader, adapters, options.steps)
        tensors = named_for_diffusers(adapters)
        manager.remove()
    if accelerator.is_main_process:
        save_file(tensors, options.output)
    accelerator.print(f"{len(adapters)} layers, saved {options.output}")
    accelerator.end_training()


def named_for_diffusers(adapters: LoraAdapters) -> dict[str, torch.Tensor]:
    """Return the LoRA as ``load_lora_weights`` takes it; alpha is the rank, so no scale is needed."""
    names = {"lora_down": "lora_A.weight", "lora_up": "lora_B.weight"}
    return {
        f"transformer.{path}.{names[name]}": parameter.detach().cpu()
        for path, adapter in adapters.adapters().items()
        for name, parameter in adapter.named_parameters()
    }


def train(
    accelerator: Accelerator,
    model: QwenImageTransformer2DModel,
    manager: OffloadTrainingManager,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    adapters: LoraAdapters,
    steps: int,
) -> None:
    """Take that many optimizer steps, each over all processes' batches."""
    step, losses = 0, []
    for latents, text in itertools.chain.from_iterable(itertools.repeat(loader)):
        with accelerator.accumulate(model):
            loss = loss_of(model, latents, text)
            accelerator.backward(loss)
            manager.after_backward()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
            if accelerator.sync_gradients:
                for parameter in (one for one in adapters.parameters() if one.grad is not None):
                    parameter.grad = accelerator.reduce(parameter.grad, "mean")
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accelerator.print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}")
            losses.clear()
        if step == steps:
            return


if __name__ == "__main__":
    main()
