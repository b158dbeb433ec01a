from __future__ import annotations

import torch
from comfyui_ferry.core.workers import available_host_bytes, file_backed_bytes
from safetensors.torch import load_file, save_file

GIB = 1 << 30


def fake_root(tmp_path, *, group="0::/", files=()):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(group + "\n")
    for name, value in files:
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return tmp_path


def test_the_machine_counts_where_no_group_limits(tmp_path):
    files = [("memory.max", "max"), ("memory.current", GIB)]
    assert available_host_bytes(fake_root(tmp_path, files=files)) == 8 * GIB


def test_the_tightest_group_counts_and_cached_files_do_not(tmp_path):
    files = [
        ("a/memory.max", 5 * GIB), ("a/memory.current", 4 * GIB), ("a/memory.stat", f"inactive_file {GIB}"),
        ("a/b/memory.max", 9 * GIB), ("a/b/memory.current", GIB),
    ]  # fmt: skip
    assert available_host_bytes(fake_root(tmp_path, group="0::/a/b", files=files)) == 2 * GIB


def test_an_older_group(tmp_path):
    files = [("memory/memory.limit_in_bytes", 3 * GIB), ("memory/memory.usage_in_bytes", GIB)]
    root = fake_root(tmp_path, group="5:cpu:/x\n4:memory:/docker/x", files=files)
    assert available_host_bytes(root) == 2 * GIB


def test_this_machine_says_something():
    assert 0 < available_host_bytes() < 1 << 50


def test_only_weights_that_are_mapped_from_a_file_take_more(tmp_path):
    save_file({"a": torch.ones(1 << 18), "b": torch.ones(1 << 18)}, tmp_path / "w.safetensors")
    mapped = load_file(tmp_path / "w.safetensors")
    private = torch.ones(1 << 18)
    assert file_backed_bytes([private, mapped["a"], mapped["b"], mapped["a"]]) in (2 << 20, 0)
    assert file_backed_bytes([private, torch.ones(4, device="meta")]) == 0
    storage = torch.UntypedStorage.from_file(str(tmp_path / "w.safetensors"), shared=False, nbytes=1 << 20)
    assert file_backed_bytes([torch.empty(0, dtype=torch.uint8).set_(storage), private]) == 1 << 20
