"""Blocks of GGUF files become the very numbers that the package ``gguf`` makes of them."""

from __future__ import annotations

import hashlib

import pytest
import torch
from comfyui_ferry.core.offload import GGUF_FORMATS, dequantize
from ferry_support.packed_patchers import FORMS, SCALES, random_weight

# SHA-256 of what gguf 0.19.0 makes of ``counted_blocks``, fp32, little-endian: gguf.quants.dequantize.
DIGESTS = {
    "Q4_0": "02b4bf4cec9ec6b7",
    "Q4_1": "65a58d3f9d592247",
    "Q5_0": "a1804bc3d64b7ee1",
    "Q5_1": "82f7a934a4b50dc6",
    "Q8_0": "53f8d7971dee3a67",
    "Q2_K": "5efb385af9dacd7b",
    "Q3_K": "2b681b13db9fb242",
    "Q4_K": "2b11298a2d24690a",
    "Q5_K": "3b6249be93e89b0d",
    "Q6_K": "2a8d64aabdb8b75f",
    "IQ4_NL": "4f13e89ee075e8aa",
    "IQ4_XS": "c0aeb2e9ebe9e899",
}


def counted_blocks(form):
    """Return four blocks in one row, of bytes that follow from their places; scales are finite."""
    layout = GGUF_FORMATS[form]
    blocks = ((torch.arange(4 * layout.nbytes) * 167 + 13) % 251).to(torch.uint8).view(4, -1)
    for index in SCALES[form]:
        blocks[:, sum(layout.fields[:index]) + 1] %= 64
    return blocks.view(1, -1)


def test_every_format_gives_the_packages_numbers():
    assert set(GGUF_FORMATS) == set(FORMS) == set(DIGESTS)
    found = {}
    for form in FORMS:
        values = dequantize(counted_blocks(form), form, (torch.float32,))
        assert values.shape == (1, 4 * GGUF_FORMATS[form].weights)
        found[form] = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
    assert found == DIGESTS


def test_large_weights_are_made_in_pieces(monkeypatch):
    from comfyui_ferry.core.offload import gguf_blocks

    weight = random_weight("Q4_K", 6, 512, seed=0)
    whole = weight.dense()
    monkeypatch.setattr(gguf_blocks, "_PIECE_WEIGHTS", 5 * 256)  # two rows and a half
    assert torch.equal(weight.dense(), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_makes_the_same_numbers(form):
    """Products and sums are operations of their own, so nothing is contracted."""
    blocks = random_weight(form, 64, 1024, seed=0).blocks
    there = dequantize(blocks.cuda(), form, (torch.float32,))
    assert torch.equal(there.cpu(), dequantize(blocks, form, (torch.float32,)))
