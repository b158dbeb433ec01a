"""Memory of a MODEL while it is loaded, and of all processes of a parallel one, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from comfyui_ferry.core.comfy_adapter import worker_groups
from ferry_support.sampling import ULYSSES_2, parallel, sample
from ferry_support.tiny_patchers import PATCHERS
from safetensors.torch import save_file

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(180), pytest.mark.usefixtures("workers_of_the_test")]

# Forked ones share this process' memory until either writes to it, which would be counted as growth.
REAL_WORKERS = True
KIND = "wan"


def memory(pids: list[int]) -> tuple[int, int]:
    """Bytes of all these processes, a shared page counted once: the arenas, and ordinary memory."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier tests freed
    shared = private = 0
    for pid in pids:
        own = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                own = "ferry-arena" in line
            elif own and line.startswith("Pss:"):
                shared += 1024 * int(line.split()[1])
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        private += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return shared, private


def test_all_processes_together_hold_one_copy():
    """200 MB; what each process takes besides is measured first, with a model that weighs nothing."""
    sample(parallel(PATCHERS[KIND].build(), ULYSSES_2), KIND, steps=1, cfg=1.0)
    assert worker_groups._current is not None
    processes = [os.getpid(), *(rank.process.pid for rank in worker_groups._current.pool._group.ranks)]
    before = memory(processes)[1]
    model = PATCHERS[KIND].build(dim=768, ffn_dim=3072, num_heads=12, num_layers=5)
    size = sum(parameter.nbytes for parameter in model.model.diffusion_model.parameters())
    assert size > 200e6
    sample(parallel(model, ULYSSES_2), KIND, steps=1, cfg=1.0)
    shared, private = memory(processes)
    assert 0.99 * size <= shared <= 1.05 * size  # counted in rounded kilobytes
    assert private - before <= 2 * 20e6


def mapped_bytes(path: Path) -> int:
    """Bytes of a file that this process has in memory by mapping it."""
    total, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_file = line.endswith(str(path))
        elif is_file and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


class PeakMemory:
    """Watches what this process has besides pages of files, beyond what it had at first."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.nbytes, self._before, self._stopped = 0, self._now(), threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *error):
        self._stopped.set()
        self._watcher.join()

    def _watch(self):
        while not self._stopped.wait(0.0005):
            self.nbytes = max(self.nbytes, self._now() - self._before)

    def _now(self):
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def test_loading_takes_the_memory_of_the_model_and_one_tensor(tmp_path, monkeypatch):
    import folder_paths
    from comfyui_ferry.core.comfy_adapter import load_offloaded

    model = PATCHERS[KIND].build(
        dim=512, ffn_dim=2048, num_heads=4, num_layers=4, text_dim=4096, freq_dim=256
    )
    model = model.model.diffusion_model
    weights = dict(model.state_dict())
    size, largest = (take(tensor.nbytes for tensor in weights.values()) for take in (sum, max))
    assert size > 8 * largest
    save_file(weights, tmp_path / "large.safetensors")
    del model, weights
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "diffusion_models", ([str(tmp_path)], {".safetensors"})
    )
    folder_paths.filename_list_cache.pop("diffusion_models", None)
    with torch.inference_mode(), PeakMemory() as peak:
        loaded = load_offloaded("large.safetensors", vram_gb=0.06)
    with torch.inference_mode():
        cast = load_offloaded("large.safetensors", vram_gb=0.06, weight_dtype="fp8_e4m3fn")
    folder_paths.filename_list_cache.pop("diffusion_models", None)
    assert cast.stream.streamer.weight_bytes < 0.3 * size
    assert mapped_bytes(tmp_path / "large.safetensors") <= 0.02 * size  # read through, and let go
    assert size <= loaded.stream.streamer.weight_bytes <= 1.001 * size  # aligned
    # What else the process takes meanwhile (modules, objects) is in it: 0.2 MB too many were seen once.
    assert 0.8 * size <= peak.nbytes <= size + 1.25 * largest
