from __future__ import annotations

import torch
from comfyui_ferry.core.offload.slots import Slot, SlotPool
from comfyui_ferry.core.offload.transfer import Transfer


def transfer() -> Transfer:
    return Transfer(torch.device("cpu"))


def test_a_view_is_noticed_wherever_it_lives():
    slot = Slot(transfer(), 512)
    assert not slot.is_viewed()
    view = slot.flat[8:16]
    assert slot.is_viewed()
    weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    weight.data = view.view(torch.float32)
    del view
    assert slot.is_viewed()
    x = torch.ones(2, requires_grad=True)
    y = x * weight.view(2)  # a leaf itself would be saved by identity, without its memory
    weight.data = torch.empty(0)
    assert slot.is_viewed()  # autograd alone holds it now
    y.sum().backward()
    del y
    assert not slot.is_viewed()


def test_a_free_slot_serves_what_suits_it():
    pool = SlotPool(transfer())
    large, small = pool.acquire(8 * 2**20), pool.acquire(600)
    assert small.capacity_bytes == 1024
    pool.release(large), pool.release(small)
    assert pool.acquire(5 * 2**20) is large
    assert pool.acquire(1) is small
    pool.release(large)
    assert pool.acquire(2 * 2**20) is not large
    assert pool.allocated_bytes == 10 * 2**20 + 1024
