"""Recorded blocks give the same numbers as blocks that run, and what cannot be recorded runs as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.offload import ModulationLayers, ModulationPlan, OffloadTrainingManager
from comfyui_ferry.core.training import BlockCheckpointing, RecordedBlocks, find_blocks
from ferry_support.tape import TapeRecorder
from torch import nn

WIDTH = 8
BLOCK_MB = 900 / 2**20  # a block moves as a whole, the model does not
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODULATION = ModulationPlan((ModulationLayers("blocks.*.mod", "1"),))


class Block(nn.Module):
    """Two streams, a modulation by a vector, options."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.text = nn.Linear(WIDTH, WIDTH)
        self.mod = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, text, vec, options):
        x = x + torch.tanh(self.linear(x)) * self.mod(vec) * options["strength"] + options["more"][0]
        return x, text + self.text(text) + x.mean()


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x, text, vec, strength=0.5):
        options = {"strength": strength, "more": [vec * 2], "name": "blocks"}
        for block in self.blocks:
            x, text = block(x, text, vec, options)
        return x  # what the last block makes of the text has no part in it


class Adapter(nn.Module):
    """Stands around a layer without being a part of the model."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)
        linear.register_forward_hook(lambda _, args, out: out + args[0] @ self.down.T @ self.up.T)


class Setting:
    """A model with adapters, checkpointed, perhaps offloaded, perhaps recorded."""

    def __init__(
        self,
        device: str = "cpu",
        *,
        recorded: bool,
        offloaded: bool = True,
        block: type[nn.Module] = Block,
        modulation: ModulationPlan | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Model(block).to(device).eval().requires_grad_(False)
        layers = [layer for b in self.model.blocks for layer in (b.linear, b.text)]
        self.adapters = nn.ModuleList(Adapter(layer) for layer in layers).to(device)
        blocks = find_blocks(self.model)
        BlockCheckpointing(blocks, keeps_last=False).install()
        self.manager: Any = None
        if offloaded:
            self.manager = OffloadTrainingManager(
                self.model, device, cpu_offload_split_threshold=BLOCK_MB, modulation=modulation
            )
        self.recorder = TapeRecorder() if device == "cpu" else None
        self.recorded = RecordedBlocks(blocks, device, recorder=self.recorder)
        if recorded:
            self.recorded.install()

    def given(self, seed: int, rows: int = 5) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        return [torch.randn(n, WIDTH, generator=random).to(self.device) for n in (rows, 3, 1)]

    def step(self, seed: int = 0, rows: int = 5, strength: float = 0.5) -> list[torch.Tensor | None]:
        """Return the output and all gradients of one step."""
        self.adapters.zero_grad(set_to_none=True)
        output = self.model(*self.given(seed, rows), strength)
        output.square().sum().backward()
        if self.manager is not None:
            self.manager.after_backward()
        return [output.detach(), *(p.grad for p in self.adapters.parameters())]


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offloaded", [True, False])
def test_every_step_gives_what_the_blocks_give(device, offloaded):
    plain = Setting(device, recorded=False, offloaded=offloaded)
    fast = Setting(device, recorded=True, offloaded=offloaded)
    for seed, rows in [(0, 5), (1, 5), (2, 5), (3, 7), (4, 7), (5, 7), (6, 5)]:
        assert_equal(fast.step(seed, rows), plain.step(seed, rows))
    assert fast.recorded.obstacles == {}
    before = fast.recorded.num_replays, fast.recorded.num_recordings
    with torch.no_grad():  # an optimizer's step
        for p, q in zip(fast.adapters.parameters(), plain.adapters.parameters(), strict=True):
            p.add_(0.1)
            q.add_(0.1)
    assert_equal(fast.step(7), plain.step(7))
    assert fast.recorded.num_replays == before[0] + 8  # four blocks, forward and again
    assert fast.recorded.num_recordings == before[1]
    with torch.no_grad():
        torch.testing.assert_close(fast.model(*fast.given(8, 4)), plain.model(*plain.given(8, 4)))
    fast.recorded.remove()
    assert_equal(fast.step(8), plain.step(8))
    assert fast.recorded.num_replays == before[0] + 8


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_computed_ahead_change_from_step_to_step(device):
    plain = Setting(device, recorded=False, modulation=MODULATION)
    fast = Setting(device, recorded=True, modulation=MODULATION)
    for setting in (plain, fast):
        calls = [lambda s=seed, setting=setting: setting.model(*setting.given(s)) for seed in range(6)]
        assert setting.manager.modulation_cache.precompute(calls) == 6
    for seed in range(8):  # the last two were not computed ahead
        assert_equal(fast.step(seed), plain.step(seed))
    assert fast.recorded.obstacles == {}
    assert fast.recorded.num_replays >= 20


def test_streamed_blocks_share_recordings():
    """The last block and the first have signatures of their own; the others come to two places in turns."""
    fast = Setting(recorded=True)
    for seed in range(4):
        fast.step(seed)
    assert fast.recorder is not None
    assert fast.recorded.num_recordings <= 4
    assert fast.recorder.num_recordings == 2 * fast.recorded.num_recordings


class WithDropout(Block):
    def forward(self, x, text, vec, options):
        return super().forward(nn.functional.dropout(x, 0.5), text, vec, options)


class WithTable(Block):
    table = torch.linspace(0, 1, WIDTH)

    def forward(self, x, text, vec, options):
        return super().forward(x + self.table, text, vec, options)


class WithCounter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, text, vec, options):
        self.count.add_(1)
        return super().forward(x * self.count, text, vec, options)


class WithOwnNumber(Block):
    """Its code depends on what only this block knows."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.factor = 1 + type(self).made / 100

    def forward(self, x, text, vec, options):
        return super().forward(x * self.factor, text, vec, options)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (WithDropout, "random numbers"),
        (WithTable, "neither argument nor weight"),
        (WithCounter, "writes to a tensor"),
        (WithOwnNumber, "differs from the block itself"),
    ],
)
def test_what_a_recording_would_miss_runs_as_it_is(block, reason):
    """Checkpointing is off for the blocks that change from call to call; they are refused there."""
    WithOwnNumber.made = 0
    plain = Setting(recorded=False, block=block)
    WithOwnNumber.made = 0
    fast = Setting(recorded=True, block=block)
    if block is WithDropout:
        plain.model.train()
        fast.model.train()
    if block is WithCounter:  # the engine's write-back, too, has to see every call
        with pytest.raises(Exception, match=r"in place|computed again"):
            fast.step(0)
            fast.step(1)
        assert fast.recorded.num_recordings == 0
        return
    for seed in range(4):
        results = []
        for setting in (plain, fast):
            torch.manual_seed(seed)
            results.append(setting.step(seed))
        assert_equal(*results)
    assert any(reason in text for text in fast.recorded.obstacles.values())


def test_a_gradient_hook_and_a_changing_argument_are_no_matter_of_recordings():
    plain, fast = Setting(recorded=False), Setting(recorded=True)
    for setting in (plain, fast):
        next(setting.adapters.parameters()).register_hook(lambda gradient: gradient * 2)
    for seed in range(3):
        assert_equal(fast.step(seed), plain.step(seed))
    assert fast.recorded.obstacles == {"blocks.0": "what it trains has gradient hooks"}
    num_recordings = fast.recorded.num_recordings
    for seed in range(40):  # a new number at every call is a new kind of call
        assert_equal(fast.step(0, strength=seed / 7), plain.step(0, strength=seed / 7))
    assert fast.recorded.num_recordings == num_recordings


def test_a_recorder_that_fails_leaves_the_blocks_as_they_were():
    plain, fast = Setting(recorded=False), Setting(recorded=True)

    def fail(call):
        raise torch.OutOfMemoryError("no room")

    fast.recorded._make_recorder = lambda: fail
    fast.recorded._recorder = fail
    for seed in range(3):
        assert_equal(fast.step(seed), plain.step(seed))
    assert all("no room" in text for text in fast.recorded.obstacles.values())
    assert len(fast.recorded.obstacles) == 4


def test_weights_that_come_back_elsewhere_for_the_backward():
    """The recording cannot be used then; the gradients are computed from the block itself."""
    plain, fast = Setting(recorded=False), Setting(recorded=True)
    for seed in range(3):
        assert_equal(fast.step(seed), plain.step(seed))
    engine = fast.manager.running_engine()
    reopen, moved = engine.reopen, []

    def elsewhere(bucket, segment, make_view):
        moved.append(bucket.name)
        return reopen(bucket, segment, make_view).clone()

    engine.reopen = elsewhere
    assert_equal(fast.step(3), plain.step(3))
    assert len(moved) >= 4
    del engine.reopen
    assert_equal(fast.step(4), plain.step(4))


def test_stopping_gives_everything_back():
    plain, fast = Setting(recorded=False), Setting(recorded=True)
    for seed in range(3):
        fast.step(seed)
    assert fast.recorded.stop()
    assert not fast.recorded.stop()
    assert fast.recorded.num_recordings == 0
    assert_equal(fast.step(3), plain.step(3))
    assert fast.recorded.num_recordings == 0


def test_watching_alone_records_nothing_and_says_what_it_would_take():
    plain, fast = Setting(recorded=False), Setting(recorded=True)
    fast.recorded.may_record = False
    for seed in range(3):
        assert_equal(fast.step(seed), plain.step(seed))
    assert fast.recorded.num_recordings == 0
    assert fast.recorded.needed_bytes > 0
    fast.recorded.may_record = True
    assert_equal(fast.step(3), plain.step(3))
    assert fast.recorded.num_recordings > 0


def test_an_adapter_that_is_left_out_later():
    """From then on it is a tensor that the recording would not know of, since it is no part of the model."""
    plain, fast = Setting(recorded=False), Setting(recorded=True)
    replays = []
    for seed in range(6):
        if seed == 3:
            for setting in (plain, fast):
                setting.adapters[5].requires_grad_(False)
                setting.adapters[5].zero_grad()
        assert_equal(fast.step(seed), plain.step(seed))
        replays.append(fast.recorded.num_replays)
    assert list(fast.recorded.obstacles) == ["blocks.2"]
    assert replays[2] == replays[1] + 8
    assert replays[-1] == replays[-2] + 6


def test_the_memory_of_recordings_is_asked_for_again_after_they_were_forgotten(monkeypatch):
    from comfyui_ferry.core.training.block_recording import CudaGraphRecorder

    sizes = iter((5, 7))
    monkeypatch.setattr(CudaGraphRecorder, "pool_bytes", lambda self: next(sizes))
    recorded = RecordedBlocks([], "cpu")
    recorded._recordings["first",] = None
    assert recorded.pool_bytes == recorded.pool_bytes == 5
    recorded.clear()
    recorded._recordings["second",] = None
    assert recorded.pool_bytes == 7
