"""Whole samplings of a batch whose samples are shared out to workers equal sampling in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ferry_support.sampling import TOLERANCE, difference, parallel, sample, worker_processes
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300), pytest.mark.usefixtures("workers_of_the_file")]


def batch_of(kind: str, count: int) -> dict[str, Any]:
    """Return a LATENT of zeros; noise of each sample differs."""
    one = PATCHERS[kind].latent()["samples"]
    return {"samples": torch.zeros(count, *one.shape[1:])}


@pytest.mark.parametrize("kind", ["flux", "wan", "sdxl"])
def test_batches_equal_one_process(kind: str) -> None:
    """Three samples on two groups, fewer samples than groups, and products with the other degrees."""
    model = PATCHERS[kind].build()
    apart = {"gpus": 4, "cfg_degree": 1, "ulysses_degree": 1, "batch_degree": 4}
    product = {"gpus": 4, "cfg_degree": 1, "ulysses_degree": 2, "batch_degree": 2}
    guided = {"gpus": 4, "cfg_degree": 2, "ulysses_degree": 1, "batch_degree": 2}
    if kind == "sdxl":  # one head at a level
        product |= {"ulysses_degree": 1, "ring_degree": 2}
    workers: list[list[int]] = []
    for count, layouts in ((3, (apart, product, guided)), (1, (guided,))):
        expected = sample(model, kind, latent=batch_of(kind, count), steps=2)
        for degrees in layouts:
            found = sample(parallel(model, degrees), kind, latent=batch_of(kind, count), steps=2)
            assert difference(found, expected) <= TOLERANCE, (degrees, count)
            workers.append(worker_processes())
    # Other degrees on the same GPUs start no new workers.
    assert all(processes == workers[0] for processes in workers) and len(workers[0]) == 4
