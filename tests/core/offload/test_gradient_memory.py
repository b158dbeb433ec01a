"""Where gradients arrive."""

from __future__ import annotations

import random
import threading
import time

import torch
from comfyui_ferry.core.offload.gradient_memory import StagingRing
from comfyui_ferry.core.offload.pinned_arena import PinnedArena


def test_a_ring_never_gives_out_bytes_in_use_and_waits_when_full():
    nbytes = 4096
    ring = StagingRing(PinnedArena([nbytes], pin=False).allocate(nbytes))
    rng = random.Random(0)
    in_use: list[tuple[torch.Tensor, int]] = []
    lock = threading.Lock()
    most = 0

    def consume():
        for _ in range(400):
            while not in_use:
                time.sleep(0)
            tensor, mark = in_use[0]
            assert bool((tensor == mark).all()), "overwritten while in use"
            with lock:
                in_use.pop(0)
            ring.give_back()

    consumer = threading.Thread(target=consume)
    consumer.start()
    for mark in range(400):
        part = ring.like(torch.empty(rng.randrange(1, 700), dtype=torch.int32))
        part.fill_(mark)
        with lock:
            in_use.append((part, mark))
            most = max(most, len(in_use))
    consumer.join(timeout=60)
    assert not consumer.is_alive() and not in_use
    assert most > 1


def test_the_largest_thing_that_fits_the_whole_ring_can_be_taken_again_and_again():
    ring = StagingRing(PinnedArena([1024], pin=False).allocate(1024))
    for _ in range(3):
        assert ring.like(torch.empty(16, 16)).shape == (16, 16)
        ring.give_back()
