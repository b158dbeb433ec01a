"""Many prompts in a row leave nothing behind, and a fault in one costs only that one.

The workers are forked from the test process (see `ferry_support.forked_workers`). All 200 prompts, and every
fault at every phase (`FERRY_TEST_DEADLINES=default`: with the limits that a person has):

    .venv/bin/python -m pytest -m slow tests/core/comfy_adapter/test_worker_faults.py
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import comfy.model_management as management
import pytest
from comfyui_ferry.core.comfy_adapter import worker_groups
from comfyui_ferry.core.comfy_adapter.worker_groups import acquire_group
from comfyui_ferry.core.errors import WorkerError
from ferry_support.planted_faults import PHASES, FaultPlan, install
from ferry_support.sampling import (
    TOLERANCE,
    ULYSSES_2,
    difference,
    parallel,
    sample,
    with_lora,
    worker_processes,
)
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS
from ferry_support.worker_faults import LIMIT_S, ON_CPU, SHORT, assert_found
from ferry_support.worker_specs import open_files

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


IN_JOBS = [(phase, kind) for phase in PHASES for kind in ON_CPU]
QUICK = {("load", "oom"), ("patch", "raise"), ("first", "loop"), ("mid", "stop"),
         ("unload", "loop")}  # fmt: skip


def case(phase: str, kind: str):
    return pytest.param(phase, kind, marks=[] if (phase, kind) in QUICK else [pytest.mark.slow])


@pytest.fixture
def plan(tmp_path, monkeypatch):
    found = FaultPlan(tmp_path / "fault")
    whole_table = os.environ.get("FERRY_TEST_DEADLINES") == "default"
    install(monkeypatch, found, None if whole_table else SHORT)
    return found


@pytest.mark.parametrize(("phase", "kind"), [case(*pair) for pair in IN_JOBS])
def test_a_fault_costs_one_prompt(plan, phase, kind):
    """Ended in 5 s, with what the rank was doing; nothing is left, and the next prompt is right."""
    model = PATCHERS[KIND].build()
    expected = sample(model, KIND, steps=2)
    if phase == "unload":
        sample(parallel(model, ULYSSES_2), KIND, steps=2)
    pids = processes()
    begin = time.monotonic()
    plan.set(phase, kind)
    if phase == "unload":
        management.unload_all_models()  # what is asked for is given: their memory is free
        seconds = time.monotonic() - begin
        print(f"{seconds:.1f} s: unloaded")
        assert seconds < LIMIT_S
    else:
        with pytest.raises(WorkerError) as caught:
            sample(parallel(model, ULYSSES_2), KIND, steps=2)
        assert_found(begin, caught.value, kind, pids)
    assert worker_processes() == []
    plan.clear()
    assert difference(sample(parallel(model, ULYSSES_2), KIND, steps=2), expected) <= TOLERANCE


@pytest.mark.parametrize("kind", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_worker_lost_between_two_prompts(kind):
    """The next one ends in 5 s, or, if the loss was noticed before, finds new workers."""
    model = PATCHERS[KIND].build()
    expected = sample(model, KIND, steps=2)
    sample(parallel(model, ULYSSES_2), KIND, steps=2)
    begin, pids = time.monotonic(), processes()
    os.kill(pids[1], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
    try:
        found = sample(parallel(model, ULYSSES_2), KIND, steps=2)
    except WorkerError as error:
        assert_found(begin, error, kind, pids)
        found = sample(parallel(model, ULYSSES_2), KIND, steps=2)
    assert difference(found, expected) <= TOLERANCE
    assert not set(pids) & set(worker_processes())


@pytest.mark.parametrize(
    "phase",
    ["load", "mid", *(pytest.param(name, marks=pytest.mark.slow) for name in ("patch", "first"))],
)
def test_cancel_at_any_phase_leaves_the_workers_usable(tmp_path, monkeypatch, phase):
    """It takes effect at once, though the rank is busy for a second; the next prompt is right.

    While they start: `test_worker_memory.py`, with workers that are not forked.
    """
    plan = FaultPlan(tmp_path / "fault")
    install(monkeypatch, plan)  # with the deadlines that users have: by shorter ones that second is a hang
    model = PATCHERS[KIND].build()
    expected = sample(model, KIND, steps=2)
    plan.set(phase, "slow")
    acquire_group(("cpu", "cpu"))
    pids = processes()
    times = []

    def cancel():
        times.append(time.monotonic())
        management.interrupt_current_processing(True)

    timer = threading.Timer(0.3, cancel)
    timer.start()
    with pytest.raises(management.InterruptProcessingException):
        sample(parallel(model, ULYSSES_2), KIND, steps=2)
    assert time.monotonic() - times[0] < 0.4
    timer.join()
    management.interrupt_current_processing(False)
    plan.clear()
    assert difference(sample(parallel(model, ULYSSES_2), KIND, steps=2), expected) <= TOLERANCE
    assert processes() == pids


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
