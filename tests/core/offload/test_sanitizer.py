"""PyTorch's CUDA sanitizer looks at the engine's streams; it is for a whole process, so there is one more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.offload.transfer import CudaTransfer
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

IS_WATCHED = os.environ.get("TORCH_CUDA_SANITIZER") == "1"
watched = pytest.mark.skipif(not IS_WATCHED, reason="for the process that the sanitizer watches")


@pytest.fixture
def seen_copies(monkeypatch):
    """Show the sanitizer the engine's own copies, which it hides from whatever watches the model."""
    from torch.cuda._sanitizer import cuda_sanitizer

    for name in ("start", "send_gradient"):
        plain = getattr(CudaTransfer, name)

        def seen(self, *args, plain=plain, **options):
            with cuda_sanitizer.dispatch:
                return plain(self, *args, **options)

        monkeypatch.setattr(CudaTransfer, name, seen)


def learn(threshold_mb: float | None, *, on_host: bool, use_checkpoint: bool) -> None:
    """Three steps on six layers, as many as go through two slots."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    if not on_host:
        model.requires_grad_(False)
    manager = OffloadTrainingManager(
        model, "cuda", on_host, threshold_mb, prefetch_next_forward=use_checkpoint
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if on_host else None
    if optimizer is not None:
        manager.overlap_optimizer(optimizer)
    for _ in range(3):
        x = torch.randn(32, 512, device="cuda", requires_grad=True)
        y = x
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=False) if use_checkpoint else layer(y)
        y.square().mean().backward()
        manager.after_backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    manager.remove()


@watched
@pytest.mark.usefixtures("seen_copies")
@pytest.mark.parametrize("threshold_mb", [None, 4.0], ids=["leaf", "whole"])
@pytest.mark.parametrize("on_host", [False, True], ids=["frozen", "trained on the host"])
@pytest.mark.parametrize("use_checkpoint", [False, True], ids=["kept", "checkpointed"])
def test_no_stream_reads_or_writes_too_early(threshold_mb, on_host, use_checkpoint):
    learn(threshold_mb, on_host=on_host, use_checkpoint=use_checkpoint)


@watched
@pytest.mark.usefixtures("seen_copies")
@pytest.mark.parametrize("missing", ["wait", "retire"])
def test_a_missing_event_is_seen(monkeypatch, missing):
    """Without it the tests above could not fail."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    monkeypatch.setattr(CudaTransfer, missing, lambda self, lease: lease.settle())
    with pytest.raises(CUDASanitizerErrors):  # what raced is on stderr only
        learn(None, on_host=False, use_checkpoint=True)


@pytest.mark.skipif(IS_WATCHED, reason="starts that process")
def test_the_engine_under_the_sanitizer():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", __file__]
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "10 passed" in done.stdout
