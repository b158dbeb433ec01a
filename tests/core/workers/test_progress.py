"""A rank's count of what is done, read from the memory that it shares with its parent."""

from __future__ import annotations

import mmap

import pytest
import torch
from comfyui_ferry.core.workers.progress import ProgressCounter, read_progress, read_waiting


def test_marks_are_counted_behind_the_heartbeat():
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    memory[:8] = b"beats..."
    counter = ProgressCounter(memory, torch.device("cpu"))
    for _ in range(3):
        counter.mark()
    assert read_progress(memory) == 3
    assert memory[:8] == b"beats..."
    with pytest.raises(KeyError), counter.waiting():
        assert read_waiting(memory)
        raise KeyError
    assert not read_waiting(memory)
    assert read_progress(memory) == 3
    nobody_looks = ProgressCounter(None, torch.device("cpu"))
    with nobody_looks.waiting():
        nobody_looks.mark()


@pytest.mark.gpu
def test_a_gpu_counts_when_it_gets_there_also_in_a_replay():
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    counter = ProgressCounter(memory, torch.device("cuda"))
    with torch.inference_mode():
        counter.mark()  # the first one waits until its kernel is loaded
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        counter.mark()
        assert read_progress(memory) == 1
        torch.cuda.synchronize()
        assert read_progress(memory) == 2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            counter.mark()
            counter.mark()
        assert read_progress(memory) == 2
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    assert read_progress(memory) == 8
