"""Streaming on the CPU: what is where, in which order, and that nothing of it shows in the numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.module_hooks import hook_names
from comfyui_ferry.core.offload import ModelStreamer, StreamConfig, StreamPool, WeightChange, WeightFile
from comfyui_ferry.core.offload.segments import ALIGNMENT_BYTES
from safetensors.torch import save_file
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x):
        return x + self.down(self.up(x).tanh()) + self.shift


class Model(nn.Module):
    """Blocks of different sizes between two projections; two of them share a weight."""

    def __init__(self, widths=(16, 16, 32, 16, 16, 16)) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.leave = nn.Linear(8, 8)
        self.order = range(len(widths))
        self.fails_at = None

    def forward(self, x):
        x = self.enter(x)
        for index in self.order:
            if index == self.fails_at:
                raise KeyboardInterrupt
            x = self.blocks[index](x)
        return self.leave(x)


def make(limit_bytes=None, *, depth=1, ram_bytes=None):
    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    plain = copy.deepcopy(model)
    pool = StreamPool(torch.device("cpu"), StreamConfig(limit_bytes, ram_bytes, depth))
    return model, plain, ModelStreamer(model, pool)


X = torch.linspace(-1, 1, 24).view(3, 8)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ram_bytes", [None, 3000])
def test_equal_within_the_budget(depth, share, ram_bytes):
    model, plain, streamer = make(depth=depth, ram_bytes=ram_bytes)
    budget = int(streamer.least_bytes + share * (streamer.weight_bytes - streamer.least_bytes))
    streamer.load(budget)
    for order in (range(6), [5, 1, 1, 2, 4, 0], range(6)):
        model.order = plain.order = order
        with torch.inference_mode():
            assert torch.equal(model(X), plain(X))
        assert streamer.target_bytes <= budget
    stats = streamer.stats()
    assert (stats.num_streamed == 0) == (budget == streamer.weight_bytes)
    assert stats.host_bytes + stats.file_bytes == streamer.weight_bytes
    assert (stats.file_bytes > 0) == (ram_bytes is not None) and stats.host_bytes <= (ram_bytes or 2**40)
    streamer.unload()
    assert streamer.target_bytes == 0 and not any(hook_names(module) for module in model.modules())
    assert torch.equal(model(X), plain(X))


def test_each_pass_moves_the_streamed_blocks_once():
    model, _, streamer = make()
    streamer.load((streamer.least_bytes + streamer.weight_bytes) // 2)
    model(X)
    moved = streamer.stats().moved_bytes
    model(X)
    stats = streamer.stats()
    assert 0 < stats.streamed_bytes < sum(block.master.nbytes for block in streamer._blocks)
    assert stats.moved_bytes - moved == stats.streamed_bytes
    assert streamer.stats().num_passes == 2


def test_copies_start_ahead_and_a_broken_pass_leaves_nothing_behind():
    model, plain, streamer = make()
    streamer.load(0)
    started = []
    copy_in = streamer.pool.copy_in

    def note(master, buffer):
        if any(buffer is slot for slot in streamer.pool._slots):
            started.append(master.plan.path)
        copy_in(master, buffer)

    streamer.pool.copy_in = note
    seen = {}
    for index, block in enumerate(model.blocks):
        block.up.register_forward_pre_hook(
            lambda module, args, index=index: seen.update({index: list(started)})
        )
    model(X)
    assert seen[0] == ["blocks.0", "blocks.1"] and seen[1] == ["blocks.0", "blocks.1", "blocks.2"]
    # The first block's next copy is on its way already when the pass ends.
    assert started[-1] == "blocks.0"
    model.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert all(parameter is not None for parameter in model.parameters())
    model.fails_at = None
    assert torch.equal(model(X), plain(X))


def test_outside_of_a_forward_the_model_is_its_masters():
    model, plain, streamer = make()
    streamer.load(0)
    model(X)
    rests = [block.rest for block in streamer._blocks]
    assert all(rest.is_filled or not rest.is_bound for rest in rests)
    for block, rest in zip(streamer._blocks, rests, strict=True):
        own = [entry for path, entry in block.entries.items() if path in rest._paths]
        assert own and all(entry.table[entry.name] is entry.tensor for entry in own)
    state, expected = model.state_dict(), plain.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_gives_memory_back_while_it_runs_and_takes_it_again():
    model, plain, streamer = make()
    streamer.load(streamer.weight_bytes)
    model(X)
    held = streamer.target_bytes
    freed = []
    handle = model.blocks[2].register_forward_pre_hook(
        lambda module, args: freed.append(streamer.shrink(2000))
    )
    assert torch.equal(model(X), plain(X))
    handle.remove()
    assert freed[0] >= 2000 and streamer.target_bytes == held - freed[0]
    assert streamer.shrink(10**9) == held - freed[0] - streamer.least_bytes
    assert torch.equal(model(X), plain(X))
    streamer.load(streamer.weight_bytes)
    assert streamer.target_bytes == streamer.weight_bytes
    assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("ram_bytes", [None, 3000])
def test_parts_of_blocks_stay_and_only_what_is_new_moves(ram_bytes):
    model, plain, streamer = make(ram_bytes=ram_bytes)
    stayed: list[set[int]] = []
    for share in (0.3, 0.6, 0.9, 0.5):
        budget = int(streamer.least_bytes + share * (streamer.weight_bytes - streamer.least_bytes))
        held = streamer._arrangement.held_bytes
        before = streamer.stats().moved_bytes
        streamer.load(budget)
        assert budget * 0.9 < streamer.target_bytes <= budget
        model.order = plain.order = range(6)
        assert torch.equal(model(X), plain(X))
        stats = streamer.stats()
        grown = max(0, streamer._arrangement.held_bytes - held)
        # The rests, one of them ahead for the next pass, and what has come to stay since.
        new = stats.moved_bytes - before - stats.streamed_bytes
        assert new <= grown + streamer.slot_bytes + (streamer.rim_bytes if not stayed else 0)
        assert streamer.pool.slot_bytes == 2 * streamer.slot_bytes
        stayed.append({block.kept_bytes for block in streamer._blocks})
    # Free memory that is nearly the same moves nothing.
    streamer.load(budget + 50)
    before = streamer.stats().moved_bytes
    assert torch.equal(model(X), plain(X))
    assert streamer.stats().moved_bytes - before <= stats.streamed_bytes + streamer.slot_bytes
    assert {block.kept_bytes for block in streamer._blocks} == stayed[-1]
    partly = [0 < block.kept_bytes < block.master.nbytes for block in streamer._blocks]
    assert sum(partly) > 2 and len({frozenset(each) for each in stayed}) > 2
    # Nor does the same request, whatever is left of it.
    planned = []
    choose = streamer._arrangement._choose
    streamer._arrangement._choose = lambda *given: planned.append(given) or choose(*given)
    for _ in range(3):
        streamer.load(budget + 700)
    assert len(planned) <= 1


def test_changes_come_and_go_without_a_reload():
    model, plain, streamer = make()
    streamer.load((streamer.least_bytes + streamer.weight_bytes) // 2)
    names = [
        "enter.weight",
        "blocks.0.down.weight",
        "blocks.2.up.weight",
        "blocks.5.shift",
        "blocks.1.up.weight",
    ]

    def check(factor):
        streamer.set_changes({} if factor == 1 else {
            name: WeightChange(factor, lambda weight: weight * factor) for name in names
        })  # fmt: skip
        changed = copy.deepcopy(plain)
        state = changed.state_dict()
        for name in names:
            state[name] *= factor
        for _ in range(2):
            assert torch.equal(model(X), changed(X))

    check(1)
    moved = streamer.stats().moved_bytes
    model(X)
    one_pass = streamer.stats().moved_bytes - moved
    for factor in (3.0, 3.0, 0.5, 1):
        before = streamer.stats().moved_bytes
        check(factor)
        # Two passes, and at most the changed tensors once more.
        assert streamer.stats().moved_bytes - before - 2 * one_pass <= sum(
            plain.state_dict()[name].nbytes for name in names
        )
    with pytest.raises(RequestError, match=r"blocks\.9"):
        streamer.set_changes({"blocks.9": WeightChange(1, lambda weight: weight)})


def test_two_models_in_one_budget():
    torch.manual_seed(1)
    models = [Model().requires_grad_(False) for _ in range(2)]
    plains = copy.deepcopy(models)
    probe = ModelStreamer(copy.deepcopy(models[0]), StreamPool(torch.device("cpu"), StreamConfig()))
    limit = probe.weight_bytes
    pool = StreamPool(torch.device("cpu"), StreamConfig(limit))
    streamers = [ModelStreamer(model, pool) for model in models]
    hosts = [block.master.host.data_ptr() for streamer in streamers for block in streamer._blocks]
    for turn in (0, 0, 1, 1, 0):
        streamers[turn].load(limit)
        assert sum(streamer.target_bytes for streamer in streamers) <= limit
        moved = pool.transfer.moved_to_target_bytes
        assert torch.equal(models[turn](X), plains[turn](X))
        # The switch costs at most one pass over the model: what streams anyway, and what stays from now on.
        assert pool.transfer.moved_to_target_bytes - moved <= probe.weight_bytes + probe.largest_block_bytes
    assert hosts == [block.master.host.data_ptr() for streamer in streamers for block in streamer._blocks]
    with pytest.raises(RequestError, match="VRAM budget"):
        pool_of_nothing = StreamPool(torch.device("cpu"), StreamConfig(1000))
        ModelStreamer(Model(), pool_of_nothing)


def test_bytes_that_moved_meanwhile_are_taken_back():
    model, plain, streamer = make()
    home = model.blocks[3].up.weight.data_ptr()
    model.blocks[3].up.weight.data = model.blocks[3].up.weight.data.clone() * 2
    plain.blocks[3].up.weight.data.mul_(2)
    model.blocks[4].up.weight = nn.Parameter(model.blocks[4].up.weight.data, requires_grad=False)
    streamer.load(0)
    assert model.blocks[3].up.weight.data_ptr() == home
    assert torch.equal(model(X), plain(X))
    streamer.close()
    assert streamer.pool.host_bytes == 0
    assert torch.equal(model(X), plain(X))


def test_blocks_whose_parts_are_called_without_them():
    """As UNets and some others do; NaN masters show that nothing is read from the host."""
    model, plain, streamer = make(depth=0)

    def walk(self, x):
        for block in self.blocks:
            x = x + block.down(block.up(x).tanh())
        return self.leave(self.enter(x))

    for block in (*model.blocks, *plain.blocks):
        block.shift.zero_()
    expected = walk(plain, X)
    for share in (0, 1):
        model.forward = walk.__get__(model)
        streamer.load(share * streamer.weight_bytes)
        for _ in range(2):
            moved = streamer.stats().moved_bytes
            assert torch.equal(model(X), expected)
        stats = streamer.stats()
        assert stats.moved_bytes - moved == stats.streamed_bytes  # each once, not once a part
    for block in streamer._blocks:
        block.master.host.fill_(255)
    assert torch.equal(model(X), expected)
    streamer.unload()
    assert not any(hook_names(module) for module in model.modules())


def test_parts_lose_their_hooks_once_their_block_was_called():
    model, _, streamer = make()
    called = []
    streamer.call_around_pass(after=lambda: called.append(1))
    streamer.load(0)
    assert hook_names(model.blocks[0].up) == ["stream_part"]
    model(X)
    assert called == [1] and not hook_names(model.blocks[0].up) and hook_names(model.blocks[0])


def test_weights_are_aligned_like_an_allocators_wherever_they_come_from(tmp_path):
    """A matrix product may choose its kernel, and so its rounding, by where a weight starts."""
    torch.manual_seed(0)
    plain = Model().requires_grad_(False)
    plain.blocks[1].up.weight = nn.Parameter(torch.randn(16, 8), requires_grad=False)
    state = {"x": torch.zeros(3, dtype=torch.uint8), **plain.state_dict()}
    save_file(state, tmp_path / "model.safetensors", metadata={"length": "odd"})
    file = WeightFile(tmp_path / "model.safetensors")
    tensors = file.tensors()
    del tensors["x"]
    starts = []

    def note(module, args):
        starts.extend(parameter.storage_offset() * 4 for parameter in module.parameters())

    pool = StreamPool(torch.device("cpu"), StreamConfig(None, 1000, 1))
    refused = copy.deepcopy(plain).requires_grad_(False)  # its tensors are in no file
    with pytest.raises(RequestError, match="RAM budget"):
        ModelStreamer(refused, pool, files=[file])
    assert not pool.members and pool.host_bytes == 0
    for ram_bytes in (None, 300):
        model = copy.deepcopy(plain)
        model.load_state_dict(tensors, assign=True)
        assert any(parameter.data_ptr() % ALIGNMENT_BYTES for parameter in model.parameters())
        pool = StreamPool(torch.device("cpu"), StreamConfig(None, ram_bytes, 1))
        streamer = ModelStreamer(model.requires_grad_(False), pool, files=[file])
        for layer in (part for block in model.blocks for part in (block.up, block.down)):
            layer.register_forward_pre_hook(note)
        for budget in (0, streamer.weight_bytes):
            streamer.load(budget)
            starts.clear()
            assert torch.equal(model(X), plain(X))
            assert len(starts) == 24 and not any(start % ALIGNMENT_BYTES for start in starts)
        streamer.close()
