from __future__ import annotations

import torch
from comfyui_ferry.core.offload.modulation_layers import CachedLayer
from comfyui_ferry.core.offload.modulation_store import InputKeys, OutputStore
from torch import nn


def key(*values, dtype=torch.float32):
    return InputKeys(trusts_versions=False).key(torch.tensor(values, dtype=dtype))


def test_keys_tell_every_bit_apart():
    nan, other_nan = (
        torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)
    )
    keys = InputKeys(trusts_versions=False)
    different = {
        keys.key(tensor)
        for tensor in (
            torch.zeros(2), -torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int32),
            torch.zeros(4), nan, other_nan,
        )
    }  # fmt: skip
    assert len(different) == 7
    with torch.autocast("cpu", torch.bfloat16):
        assert keys.key(torch.zeros(2)) not in different
    assert keys.key(torch.zeros(4)[::2]) in different  # the values count, not how they lie
    assert keys.key(torch.zeros(2**20)) is None


def test_a_tensor_seen_before_is_not_read_again_unless_it_changed(monkeypatch):
    from comfyui_ferry.core.offload import modulation_store

    reads = []
    read = modulation_store._read_bytes
    monkeypatch.setattr(modulation_store, "_read_bytes", lambda tensor: reads.append(1) or read(tensor))
    keys = InputKeys(trusts_versions=True)
    x = torch.ones(4)
    first = keys.key(x)
    assert keys.key(x.detach()) == first and len(reads) == 1
    x.mul_(2)
    assert keys.key(x) != first and len(reads) == 2
    assert keys.key(x[:2]) != keys.key(x) and len(reads) == 3
    address = x.data_ptr()
    del x
    for _ in range(20):  # the memory of a tensor that was seen is not given to another one meanwhile
        assert torch.empty(4).data_ptr() != address
    with torch.inference_mode():
        y = torch.ones(4)
        keys.key(y), keys.key(y)  # no version, so read each time
    assert len(reads) == 5


def test_room_is_made_by_what_was_used_longest_ago():
    layer = CachedLayer(linear := nn.Linear(1, 4).requires_grad_(False), linear)
    store = OutputStore(limit_bytes=3 * 16)
    a, b, c, d = (key(float(i)) for i in range(4))
    for each in (a, b, c):
        store.put(each, layer, torch.ones(1, 4))
    store.await_use(a)
    store.note_use(b)
    assert store.room_bytes == 2 * 16
    store.put(d, layer, torch.ones(1, 4))
    assert [store.find(each, layer) is not None for each in (a, b, c, d)] == [True, True, False, True]
    store.put(c, layer, torch.ones(1, 13))  # larger than everything
    assert store.stored_bytes == 16 and store.find(a, layer) is not None
    with torch.no_grad():
        linear.weight.add_(1)
    assert store.find(a, layer) is None and store.stored_bytes == 0
