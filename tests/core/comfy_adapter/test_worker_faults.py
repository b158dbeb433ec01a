"""Many prompts in a row leave nothing behind, and a fault in one costs only that one.

The workers are forked from the test process (see `ferry_support.forked_workers`). All 200 prompts:

    .venv/bin/python -m pytest -m slow tests/core/comfy_adapter/test_worker_faults.py
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from comfyui_ferry.core.comfy_adapter import worker_groups
from comfyui_ferry.core.errors import WorkerError
from ferry_support.sampling import CFG_2, TOLERANCE, ULYSSES_2, difference, parallel, sample, with_lora
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS
from ferry_support.worker_specs import exists, open_files

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(550), pytest.mark.usefixtures("workers_of_the_test")]

KIND = "wan"


def processes() -> list[int]:
    group = worker_groups._current
    return [] if group is None else [rank.process.pid for rank in group.pool._group.ranks]


def state(pids: list[int]) -> dict:
    """Ordinary memory, descriptors and shared files of this process and its workers."""
    found = {"files": len(open_files()), "shared": Path("/proc/self/maps").read_text().count("memfd:ferry")}
    for place, pid in enumerate([os.getpid(), *pids]):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        anonymous = next(line for line in lines if line.startswith("Anonymous:"))
        found[f"bytes {place}"] = 1024 * int(anonymous.split()[1])
        if pid != os.getpid():
            found[f"files {place}"] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


def prompt(model, number: int) -> None:
    """Another LoRA strength, size, batch and seed each time; its result is right."""
    patched = with_lora(model, 0.1 * (number % 4)) if number % 4 else model
    size = [(8, 6), (6, 10), (10, 8)][number % 3]
    latent = {"samples": noise(1 + number % 2, 16, 1 + number % 2, *size, seed=number)}
    result = sample(parallel(patched, ULYSSES_2), KIND, latent=latent, steps=1)
    if number % 10 == 0:
        assert difference(result, sample(patched, KIND, latent=latent, steps=1)) <= TOLERANCE


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_prompts_in_a_row_leave_nothing(count):
    model = PATCHERS[KIND].build()
    for number in range(12):  # every combination: buffers have their size
        prompt(model, number)
    group = worker_groups._current
    assert group is not None
    ranks = group.pool._group.ranks
    pids, done = processes(), [rank.progress() for rank in ranks]
    before = state(pids)
    for number in range(count):
        prompt(model, number)
    assert processes() == pids
    after = state(pids)
    # Each forward tells how far it is; else a slow one could not be told from one that hangs.
    assert all(rank.progress() - start >= 2 * count for rank, start in zip(ranks, done, strict=True))
    print({name: after[name] - before[name] for name in before})
    for name, value in before.items():
        # The allocator keeps what it likes; a lost latent or LoRA a prompt would be several times this.
        assert after[name] - value <= (8e6 if name.startswith("bytes") else 0), name


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_fault_costs_one_prompt(fault):
    """In mid sampling, from outside; ended in 5 s, and the next prompt is right."""
    model = PATCHERS[KIND].build()
    expected = sample(model, KIND)
    assert difference(sample(parallel(model, CFG_2), KIND), expected) <= TOLERANCE
    pids, times = processes(), []

    def strike():
        times.append(time.monotonic())
        os.kill(pids[1], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])

    threading.Timer(0.3, strike).start()
    with pytest.raises(WorkerError, match=r"rank 1 was (killed by SIGKILL|stopped)"):
        for _ in range(1000):
            sample(parallel(model, CFG_2), KIND, steps=20)
    assert time.monotonic() - times[0] < 5
    assert not any(exists(pid) for pid in pids)
    assert difference(sample(parallel(model, CFG_2), KIND), expected) <= TOLERANCE


def test_another_server_on_the_machine_goes_on():
    """Its workers, weights and messages are its own; here its process is a fork."""
    model = PATCHERS[KIND].build()
    expected = sample(model, KIND)
    read, write = os.pipe()
    other = os.fork()
    if other == 0:
        right = difference(sample(parallel(model, ULYSSES_2), KIND), expected) <= TOLERANCE
        os.write(write, b"ready" if right else b"wrong")
        time.sleep(60)
        os._exit(0)
    try:
        assert difference(sample(parallel(model, ULYSSES_2), KIND), expected) <= TOLERANCE
        assert os.read(read, 10) == b"ready"
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(read)
        os.close(write)
    assert difference(sample(parallel(model, ULYSSES_2), KIND), expected) <= TOLERANCE


def test_workers_that_die_between_loading_and_the_first_call_are_no_mistake_of_the_user():
    model = PATCHERS[KIND].build()
    kept = parallel(model, ULYSSES_2)
    expected = sample(kept, KIND)
    pids = processes()
    os.kill(pids[1], signal.SIGKILL)
    until = time.monotonic() + 5
    while worker_groups._current is not None and time.monotonic() < until:
        worker_groups.drop_dead_group()  # as when ComfyUI asks how much memory the workers hold
    with pytest.raises(WorkerError, match=r"workers are gone: .*rank 1 was killed by SIGKILL"):
        kept.run.forward({"x": noise(1)})
    assert difference(sample(kept, KIND), expected) <= TOLERANCE
