from __future__ import annotations

import torch
from comfyui_ferry.core.offload.transfer import Transfer, make_transfer


def test_copies_on_the_cpu_are_done_at_once_and_counted():
    transfer = make_transfer(torch.device("cpu"))
    assert type(transfer) is Transfer
    source = torch.arange(64, dtype=torch.uint8)
    slot = transfer.allocate(64)
    lease = transfer.open_lease()
    transfer.start(source, slot, lease)
    transfer.wait(lease)
    assert torch.equal(slot, source)
    slot.add_(1)
    transfer.write_back(slot[:16], source[:16])
    assert source[:17].tolist() == [*range(1, 17), 16]
    gradient, host = torch.ones(4), torch.zeros(4)
    transfer.send_gradient(gradient, host)
    transfer.finish_gradients()
    assert torch.equal(host, gradient)
    assert (transfer.moved_to_target_bytes, transfer.moved_to_host_bytes) == (64, 16 + 16)
