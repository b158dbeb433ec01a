"""Many steps, late copies, and the end of a process in the middle of a step."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path

import torch
from comfyui_ferry.core.offload import OffloadTrainingManager
from comfyui_ferry.core.offload.transfer import Arrival, Transfer
from ferry_support.offload_cases import Residual, Stack, assert_close, build, inputs


def resident_host_bytes():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_host_memory_is_steady_over_200_steps():
    """Half of them overlapped. One leaked gradient of this model a step would be 13 MB over the run."""
    model = Stack(Residual(64))
    optimizer = torch.optim.AdamW(model.parameters())
    manager = OffloadTrainingManager(model, "cpu", True)
    before = host_bytes = 0
    for step in range(212):
        for _ in range(2):
            model(torch.randn(2, 64)).square().mean().backward()
        manager.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 12:
            before, host_bytes = resident_host_bytes(), manager.stats().host_bytes
        if step == 110:
            manager.overlap_optimizer(optimizer, accumulation_steps=2, finish="next use")
    assert manager.stats().host_bytes == host_bytes
    assert resident_host_bytes() - before < 4 * 2**20


def test_gradients_that_arrive_late_change_nothing(monkeypatch):
    """Each is on the host only once somebody has waited for it; sums and overlapped steps must."""

    class Late(Arrival):
        def __init__(self, gradient, host):
            self.gradient, self.host, self.delay_s = gradient.clone(), host, rng.random() * 0.002
            host.fill_(float("nan"))
            sent.append(self)

        def wait(self):
            if self.gradient is not None:
                time.sleep(self.delay_s)
                self.host.copy_(self.gradient)
                self.gradient = None

    def finish(self):
        # As a stream's end: what the worker waits for by itself is left to it.
        for late in sent[: len(list(model.parameters()))] if micro == 0 else ():
            late.wait()

    rng, sent, micro = random.Random(0), [], 0
    plain, model = build("residual"), build("residual")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    manager = OffloadTrainingManager(model, "cpu", True)
    manager.overlap_optimizer(optimizers[1], accumulation_steps=3)
    monkeypatch.setattr(Transfer, "send_gradient", lambda self, gradient, host: Late(gradient, host))
    monkeypatch.setattr(Transfer, "finish_gradients", finish)
    for step in range(3):
        for micro in range(3):
            sent.clear()
            for m in (plain, model):
                m(inputs(3 * step + micro)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.detach(), other.detach())


def test_a_kill_in_the_middle_of_a_step_leaves_nothing_behind():
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model = build("residual")
            optimizer = torch.optim.AdamW(model.parameters())
            manager = OffloadTrainingManager(model, "cpu", True)
            model.blocks[2].up.weight.register_hook(lambda gradient: os.write(writer, b"b") and None)
            while True:
                model(inputs(0)).square().mean().backward()
                manager.after_backward()
                optimizer.step()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert [os.read(reader, 1) for _ in range(3)] == [b"b"] * 3
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(reader)
    assert os.WTERMSIG(status) == signal.SIGKILL
    left = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not {name for name in left - shared if str(child) in name}
