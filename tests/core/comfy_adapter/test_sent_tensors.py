"""What stays the same from step to step crosses to the workers once, and means the same there."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.comfy_adapter import close_workers, sent_tensors, worker_groups
from comfyui_ferry.core.comfy_adapter.sent_tensors import SentTensors, unpack
from ferry_support import forked_workers
from ferry_support.sampling import CFG_2, TOLERANCE, ULYSSES_2, difference, parallel, prompts, sample
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(sent_tensors, "SMALLEST_BYTES", 0)


class Rank:
    """What a worker does with a packed call."""

    def __init__(self):
        self.kept = {}

    def receive(self, packed):
        for number in packed.forget:
            del self.kept[number]
        self.kept |= {int(number): tensor for number, tensor in packed.fresh.items()}
        return unpack(packed.arguments, self.kept, lambda tensor: tensor)


def call(sent, rank, **arguments):
    packed = sent.pack(arguments)
    sent.commit()
    received = rank.receive(packed)
    return received, len(packed.fresh)


def test_equal_values_travel_once_and_changed_ones_again():
    sent, rank = SentTensors(), Rank()
    context = torch.arange(6.0)
    for step in range(3):
        received, fresh = call(sent, rank, x=torch.full((2,), step), context=context.clone(), n=[1, "a"])
        assert fresh == (1 if step == 0 else 0)
        assert torch.equal(received["context"], context)
        assert received["x"].tolist() == [step, step]
        received["context"].zero_()  # a model that writes into its argument harms no later call
    context[0] = 9  # in place, by whoever owns it
    received, fresh = call(sent, rank, context=context)
    assert fresh == 1
    assert received["context"][0] == 9
    nan = torch.tensor([float("nan")])
    assert [call(sent, rank, y=nan)[1] for _ in range(2)] == [1, 1]  # never equal, so always right


def test_prompts_in_turn_are_all_kept_and_what_always_changes_is_not():
    sent, rank = SentTensors(), Rank()
    contexts = [torch.full((3,), float(number)) for number in range(5)]
    counts = [call(sent, rank, context=contexts[turn % 5].clone())[1] for turn in range(15)]
    assert counts == [1] * 5 + [0] * 10
    for turn in range(30):
        received, _ = call(sent, rank, mask=torch.full((3,), float(turn)))
        assert received["mask"][0] == turn
    assert len(rank.kept) <= 5 + 8


def test_after_the_end_the_ranks_forget():
    sent, rank = SentTensors(), Rank()
    call(sent, rank, a=torch.ones(3), b=[torch.zeros(3)])
    assert len(rank.kept) == 2
    sent.clear()
    call(sent, rank, x=torch.ones(1))
    assert rank.kept == {}


def test_one_tensor_in_two_places_is_one_there():
    tensor = torch.ones(3)
    received, fresh = call(SentTensors(), Rank(), a=tensor, b={"c": (tensor,)})
    assert fresh == 1
    assert received["a"] is received["b"]["c"][0]


@pytest.mark.parametrize("degrees", [ULYSSES_2, CFG_2], ids=["ulysses", "cfg"])
def test_a_sampling_sends_its_prompts_once(degrees, monkeypatch):
    """With two regions and a reference latent; another prompt afterwards is not taken for this one."""
    close_workers()
    forked_workers.install(monkeypatch)
    fresh = []
    pack = SentTensors.pack

    def count(self, arguments):
        packed = pack(self, arguments)
        fresh.append(sum(tensor.numel() > 99 for tensor in packed.fresh.values()))  # not the sigmas
        return packed

    monkeypatch.setattr(SentTensors, "pack", count)
    model = PATCHERS["flux"].build()
    for seed in (8, 9):
        conditioning = prompts("flux", positive={"reference_latents": [noise(1, 16, 5, 5, seed=seed)]})
        region = {"pooled_output": noise(1, 24, seed=seed), "guidance": 3.5, "area": (4, 4, 2, 2)}
        conditioning["positive"].append([noise(1, 9, 40, seed=seed), region])
        here = sample(model, "flux", conditioning=conditioning, steps=4)
        fresh.clear()
        there = sample(parallel(model, degrees), "flux", conditioning=conditioning, steps=4)
        assert difference(there, here) <= TOLERANCE
        calls = len(fresh) // 4
        # A conditioning may meet the other branch in a later step, and goes there once as well.
        assert sum(fresh[:calls]) > 0
        assert sum(fresh) <= degrees["cfg_degree"] * sum(fresh[:calls]), fresh
    close_workers()
    assert worker_groups._current is None
