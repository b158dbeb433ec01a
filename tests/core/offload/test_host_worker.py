"""The background thread of the host."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from comfyui_ferry.core.offload.host_worker import HostWorker


def test_tasks_run_in_order_in_one_other_thread_without_gradients():
    worker, seen = HostWorker(), []
    for index in range(50):
        worker.submit(lambda i=index: seen.append((i, threading.get_ident(), torch.is_grad_enabled())))
    worker.drain()
    assert [i for i, _, _ in seen] == list(range(50))
    assert len({thread for _, thread, _ in seen}) == 1 and seen[0][1] != threading.get_ident()
    assert not any(grad for _, _, grad in seen)
    worker.close()


def test_an_error_is_raised_once_and_the_rest_still_runs():
    worker, seen = HostWorker(), []

    def fail():
        raise torch.OutOfMemoryError("planted")

    worker.submit(fail)
    worker.submit(lambda: seen.append(1))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        worker.drain()
    worker.drain()
    assert seen == [1]
    worker.close()


def test_a_forgotten_worker_ends_its_thread():
    before = set(threading.enumerate())
    worker = HostWorker()
    worker.submit(lambda: None)
    worker.drain()
    (thread,) = (t for t in threading.enumerate() if t not in before and t.name == "ferry-offload-host")
    del worker
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
