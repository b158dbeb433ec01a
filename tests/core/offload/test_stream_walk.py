"""Random lives of streamed models: budgets, memory asked back in a pass, changes, breaks, in any order."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from comfyui_ferry.core.offload import HostParts, ModelStreamer, StreamConfig, StreamPool, WeightChange
from torch import nn

X = torch.linspace(-1, 1, 24).view(3, 8)
# Few, so that the same weight is changed in one way after another.
_CHANGED = ["enter.weight", "blocks.0.up.weight", "blocks.0.down.bias", "blocks.3.down.weight"]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x):
        return x + self.down(self.up(x).tanh()) + self.empty.sum()


class _Model(nn.Module):
    """Runs its blocks in any order, one inside another if asked, and calls back before each."""

    def __init__(self, widths) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Block(width) for width in widths)
        self.order = range(len(widths))
        self.before_block = lambda index: None

    def forward(self, x):
        x = self.enter(x)
        for index in self.order:
            self.before_block(index)
            x = self.blocks[index](x)
        return x


class _Life:
    """One streamed model beside a plain one that is changed alike."""

    def __init__(self, pool: StreamPool, draw: random.Random, *, borrows: bool) -> None:
        self.model = _Model([draw.choice([16, 16, 40, 90]) for _ in range(6)]).requires_grad_(False)
        self.plain = copy.deepcopy(self.model)
        self.changed = self.plain
        self.parts = HostParts()
        if borrows:
            self.cut(draw)
        self.streamer = ModelStreamer(self.model, pool, parts=self.parts if borrows else None)
        self.draw = draw

    def cut(self, draw: random.Random) -> None:
        """Let some weights stand for two runs of rows or columns of larger ones."""
        for weight in self.model.parameters():
            dim = draw.randrange(-1, weight.ndim)
            if dim >= 0:
                first, second = weight.split(
                    [weight.shape[dim] // 2, weight.shape[dim] - weight.shape[dim] // 2], dim
                )
                whole = torch.cat([second, first, weight, second], dim)
                begin, end = second.shape[dim], weight.shape[dim]
                stop = whole.shape[dim]
                ranges = [(begin, end), (stop - begin, stop)]
                pieces = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
                weight.data = self.parts.stand_in(pieces, dim)

    def load(self) -> None:
        share = self.draw.choice([0, 0.2, 0.5, 0.8, 1])
        streamer = self.streamer
        streamer.load(int(streamer.least_bytes + share * (streamer.weight_bytes - streamer.least_bytes)))

    def change(self) -> None:
        """Let some weights be multiplied from now on."""
        names = self.draw.sample(_CHANGED, self.draw.randrange(4))
        factor = self.draw.choice([2.0, 3.0])
        self.streamer.set_changes(
            {name: WeightChange((name, factor), lambda weight: weight * factor) for name in names}
        )
        self.changed = copy.deepcopy(self.plain)
        for name in names:
            self.changed.state_dict()[name].mul_(factor)

    def run(self) -> None:
        """Run passes, one of which may break or be asked for memory."""
        self.model.order = [self.draw.randrange(6) for _ in range(self.draw.choice([2, 6, 9]))]
        at, what = self.draw.choice(self.model.order), self.draw.choice(["nothing", "break", "shrink"])

        def interfere(index: int) -> None:
            if index == at and what == "break":
                raise KeyboardInterrupt
            if index == at and what == "shrink":
                held = self.streamer.target_bytes
                freed = self.streamer.shrink(self.draw.randrange(1, max(2, held)))
                assert self.streamer.target_bytes == held - freed

        self.model.before_block = interfere
        with torch.inference_mode():
            try:
                self.check()
            except KeyboardInterrupt:
                assert what == "break"
            self.model.before_block = lambda index: None
            self.check()

    def check(self) -> None:
        """Compare one pass."""
        self.changed.order = self.model.order
        assert torch.equal(self.model(X), self.changed(X))


@pytest.mark.parametrize("tier", ["arena", "file", "borrowed"])
def test_every_pass_is_exact_and_within_the_budget(tier):
    for seed in range(10):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        config = StreamConfig(
            draw.choice([None, 30_000]), 4000 if tier == "file" else None, draw.choice([0, 1, 2])
        )
        pool = StreamPool(torch.device("cpu"), config)
        lives = [_Life(pool, draw, borrows=tier == "borrowed") for _ in range(draw.choice([1, 2]))]
        for life in lives:
            life.load()
        for _ in range(24):
            life = draw.choice(lives)
            draw.choice([life.load, life.change, life.run, life.run])()
            held = sum(each.streamer.resident_bytes for each in lives) + pool.slot_bytes
            assert config.vram_limit_bytes is None or held <= config.vram_limit_bytes
        for life in lives:
            state = life.plain.state_dict()
            life.streamer.unload()
            for name, value in life.model.state_dict().items():
                assert torch.equal(life.parts.filled(value), state[name])
        assert pool.slot_bytes == 0 and all(life.streamer.target_bytes == 0 for life in lives)
