"""The examples run, as a user would start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run_example(tmp_path):
    """Return a function that runs a command in a folder where the pack is importable by its name."""
    (tmp_path / "comfyui_ferry").symlink_to(ROOT, target_is_directory=True)

    def run(*command):
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_offload_training_learns_and_gives_the_memory_back(run_example):
    output = run_example(ROOT / "docs/examples/train_offload.py", "--device=cpu", "--width=64", "--steps=30")
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert len(losses) == 30 and losses[-1] < losses[0]
    assert "0 MB of weights" in output


def test_a_transformer_of_ones_own_gives_the_same_on_four_ranks(run_example):
    output = run_example(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
        ROOT / "docs/examples/parallel_transformer.py", "--ring=2",
    )  # fmt: skip
    assert float(re.search(r"relative difference (\S+)", output)[1]) < 1e-5
