"""Modulation layers come in ahead of their use, two at a time, whatever order the model calls them in."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.offload import (
    ModelStreamer,
    ModulationLayers,
    ModulationPlan,
    StreamConfig,
    StreamPool,
    modulation_store,
)
from torch import nn

PLAN = ModulationPlan((ModulationLayers("blocks.*.mods.*", "1"),))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mods = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(4, 6)) for _ in range(2))
        self.body = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 6))

    def forward(self, x, vector):
        first, second = (mod(vector) for mod in self.mods)
        return self.body(x * first) + second


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x, time, order=range(5)):
        vector = self.embed(time)
        for index in order:
            x = self.blocks[index](x, vector)
        return x


def streamed():
    """Return a streamed model, its plain copy, and what happens to modulation layers: (what, which)."""
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    pool = StreamPool(torch.device("cpu"), StreamConfig())
    streamer = ModelStreamer(model, pool, modulation=PLAN)
    streamer.load(streamer.least_bytes)
    events = []
    copy_in = pool.copy_in

    def noted(master, buffer):
        if ".mods." in master.plan.path:
            events.append(("copy", master.plan.path))
        copy_in(master, buffer)
        assert streamer.target_bytes <= streamer.least_bytes

    pool.copy_in = noted
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential) and ".mods." in path:
            module[0].register_forward_hook(lambda *_, path=f"{path}.1": events.append(("compute", path)))
    return streamer, model, plain, events


@torch.inference_mode()
def test_copies_run_ahead_in_order_and_each_layer_computes_for_all_inputs_at_once(monkeypatch):
    streamer, model, plain, events = streamed()
    reads = []
    read = modulation_store._read_bytes
    monkeypatch.setattr(modulation_store, "_read_bytes", lambda tensor: reads.append(1) or read(tensor))
    x, times = torch.randn(2, 6), [torch.full((1, 1), float(index)) for index in range(3)]
    assert streamer.modulation is not None
    assert streamer.modulation.precompute([lambda time=time: model(x, time) for time in times]) == 3
    paths = [f"blocks.{block}.mods.{mod}.1" for block in range(5) for mod in range(2)]
    assert events == [("copy", path) for path in paths[:2]]  # on their way before the pass begins
    for time in times:
        streamer.modulation.begin_pass(trusts_objects=True)
        assert torch.equal(model(x, time), plain(x, time))
    # Each input ahead, and each pass's own: more would have the host wait for the device in every layer.
    assert len(reads) == 2 * len(times)
    for index, path in enumerate(paths):
        computed = [place for place, event in enumerate(events) if event == ("compute", path)]
        # Three inputs one after the other, and the call itself in each of the three passes.
        assert computed[:3] == list(range(computed[0], computed[0] + 3))
        for ahead in paths[index : index + 2]:
            assert events.index(("copy", ahead)) < computed[0]
    assert sum(what == "copy" for what, _ in events) == len(paths)
    # An input that nobody foresaw comes in the same way.
    events.clear()
    assert torch.equal(model(x, times[0] + 0.5), plain(x, times[0] + 0.5))
    assert [path for what, path in events if what == "copy"] == paths


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (0, 3, 3, 1), (2,)])
@torch.inference_mode()
def test_another_order_than_was_thought(order):
    streamer, model, plain, _ = streamed()
    x, times = torch.randn(2, 6), [torch.full((1, 1), float(index)) for index in range(3)]
    cache = streamer.modulation
    assert cache is not None
    cache.precompute([lambda time=time: model(x, time) for time in times[:2]])
    for time in times:
        for each in (order, range(5)):
            assert torch.equal(model(x, time, each), plain(x, time, each))
    # What broke off in between leaves nothing that would be wrong later.
    cache.release_waiting()
    cache.precompute([lambda: model(x, times[2] + 1)])
    with pytest.raises(IndexError):
        model(x, times[2] + 1, (0, 1, 9))
    for time in (times[2] + 1, times[0]):
        assert torch.equal(model(x, time), plain(x, time))
    streamer.shrink(10**9)
    streamer.unload()
    assert streamer.target_bytes == 0 and torch.equal(model(x, times[1]), plain(x, times[1]))
