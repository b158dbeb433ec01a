"""The examples run, as a user would start them."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture
def run_example(tmp_path):
    """Return a function that runs a command in a folder where the pack is importable by its name."""
    (tmp_path / "comfyui_ferry").symlink_to(ROOT, target_is_directory=True)

    def run(*command):
        environment = os.environ | {
            "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        return done.stdout

    return run


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]


def test_offload_training_learns_as_without_it_and_gives_the_memory_back(run_example):
    command = (EXAMPLES / "train_offload.py", "--device=cpu", "--width=64", "--steps=30")
    output = run_example(*command)
    losses = losses_of(output)
    assert len(losses) == 30 and losses[-1] < losses[0]
    assert "weights: 0.17 MB, of which 0.00 MB stay on cpu" in output
    # AdamW's fused kernel on the host rounds otherwise than the plain one: the fourth digit after 30 steps.
    assert losses == pytest.approx(losses_of(run_example(*command, "--plain")), abs=2e-3)


def test_a_lora_is_trained_on_a_diffusers_model(run_example, tmp_path):
    for name in ("accelerate", "diffusers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    # Two processes, as `accelerate launch --num_processes 2` starts them.
    output = run_example(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        EXAMPLES / "diffusers_lora.py", "--steps=20", "--batch-size=2", "--output=lora.safetensors",
    )  # fmt: skip
    losses = losses_of(output)
    assert len(losses) == 20  # one process prints
    assert sum(losses[-5:]) < sum(losses[:5])
    tensors = load_file(tmp_path / "lora.safetensors")
    # The text that leaves the last block goes nowhere: its layer's up matrix stays at zero, and so does its
    # queries', but for rounding.
    zeros = {name for name, tensor in tensors.items() if not tensor.any()}
    last = "transformer.transformer_blocks.1.attn"
    assert len(tensors) == 32 and f"{last}.to_add_out.lora_B.weight" in zeros
    assert zeros <= {f"{last}.to_add_out.lora_B.weight", f"{last}.add_q_proj.lora_B.weight"}
    # The names that diffusers' load_lora_weights takes, each matrix the way round that PEFT holds it.
    layer = r"transformer\.transformer_blocks\.[01]\.attn\.\w+(\.0)?"
    for name, tensor in tensors.items():
        assert re.fullmatch(rf"{layer}\.lora_[AB]\.weight", name)
        assert tensor.shape[0 if "lora_A" in name else 1] == 8


def test_the_walk_through_quotes_the_example():
    example = (EXAMPLES / "parallel_transformer.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4 and all(block in example for block in blocks)


def test_the_readme_trains_as_written_and_parallelises_as_the_example(tmp_path):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    training, parallel = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    losses = []

    def loss_of(model, batch):
        losses.append(model(batch).square().mean())
        return losses[-1]

    names = {"torch": torch, "model": model, "data": [torch.ones(2, 6)] * 20, "loss_of": loss_of}
    script = tmp_path / "readme.py"
    script.write_text(training.replace('"cuda"', '"cpu"'), encoding="utf-8")
    runpy.run_path(str(script), init_globals=names)
    assert losses[-1] < losses[0]
    assert not any(map(torch.equal, before, model.parameters()))
    example = (EXAMPLES / "parallel_transformer.py").read_text(encoding="utf-8")
    for name in ("ParallelDims(", "build_mesh(", "parallelize(model, PLAN, group=layout.sequence_group)"):
        assert name in parallel and name in example
    call = 'handle.run(model, x, position, {"override": handle.attention_override})'
    assert call in parallel and call in example


def test_a_transformer_of_ones_own_gives_the_same_on_four_ranks(run_example):
    output = run_example(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
        EXAMPLES / "parallel_transformer.py", "--ring=2",
    )  # fmt: skip
    assert float(re.search(r"relative difference (\S+)", output)[1]) < 1e-5
