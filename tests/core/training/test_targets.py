"""Which layers get an adapter."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training import find_blocks, select_targets
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm_q = nn.LayerNorm(4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.img_mod = nn.Sequential(nn.SiLU(), nn.Linear(4, 8))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(4, 8))
        self.norm1 = nn.Sequential(nn.Linear(4, 4))
        self.mlp = nn.ModuleList([nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)])


class Dit(nn.Module):
    def __init__(self):
        super().__init__()
        self.img_in = nn.Linear(4, 4)
        self.time_embed = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)


class TimestepSequential(nn.Sequential):
    pass


class ResBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(4, 4))
        self.conv = nn.Conv2d(4, 4, 1)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(4, 4))
        self.input_blocks = nn.ModuleList(
            [TimestepSequential(nn.Conv2d(4, 4, 1)), TimestepSequential(ResBlock(), Attention())]
        )
        self.middle_block = TimestepSequential(ResBlock(), Attention())


class QuantizedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 4, 4
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def paths(model, patterns=""):
    return [target.path for target in select_targets(model, patterns)]


def test_the_default_is_attention_and_mlp_inside_the_blocks():
    per_block = ["attn.to_q", "attn.to_k", "mlp.0", "mlp.2"]
    assert paths(Dit()) == [f"blocks.{index}.{name}" for index in range(2) for name in per_block]


def test_containers_are_not_blocks_but_their_members_are():
    model = UNet()
    assert [block.path for block in find_blocks(model)] == [
        "input_blocks.1.0", "input_blocks.1.1", "middle_block.0", "middle_block.1",
    ]  # fmt: skip
    assert paths(model) == [
        f"{block}.{name}" for block in ("input_blocks.1.1", "middle_block.1") for name in ("to_q", "to_k")
    ]


def test_the_last_block_is_known():
    assert [target.in_last_block for target in select_targets(Dit())] == [False] * 4 + [True] * 4


def test_patterns_choose_and_take_away():
    model = Dit()
    assert paths(model, "blocks.*.attn, head") == [
        "blocks.0.attn.to_q", "blocks.0.attn.to_k", "blocks.1.attn.to_q", "blocks.1.attn.to_k", "head",
    ]  # fmt: skip
    assert paths(model, "-blocks.*.mlp\n-blocks.0.attn.to_k") == [
        "blocks.0.attn.to_q", "blocks.1.attn.to_q", "blocks.1.attn.to_k",
    ]  # fmt: skip
    assert paths(model, "blocks.1.img_mod") == ["blocks.1.img_mod.1"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("block.0", r"nothing matches 'block'\. Near it are blocks\.\*, "),
        ("blocks.*.attn.norm_q", "No Linear layer"),
        ("-blocks", "leaves no Linear layer"),
    ],
)
def test_patterns_that_choose_nothing_are_refused(patterns, message):
    with pytest.raises(RequestError, match=message):
        select_targets(Dit(), patterns)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(RequestError, match="out of 0 blocks"):
        select_targets(nn.Sequential(nn.Linear(2, 2)))


def test_a_layer_that_only_looks_like_linear_counts():
    model = Dit()
    model.blocks[0].attn.to_q = QuantizedLinear()
    assert "blocks.0.attn.to_q" in paths(model)


def test_norms_are_targets_only_if_asked():
    root = Dit()
    root.blocks[1].attn.norm_q = nn.LayerNorm(4, elementwise_affine=False)
    plain = {target.path for target in select_targets(root)}
    with_norms = {target.path for target in select_targets(root, "+norms, +biases")}
    assert with_norms - plain == {"blocks.0.attn.norm_q"}
    assert {target.path for target in select_targets(root, "+biases")} == plain
    named = {target.path for target in select_targets(root, "blocks.0.attn, -blocks.*.attn.to_k, +norms")}
    assert named == {"blocks.0.attn.to_q", "blocks.0.attn.norm_q"}
    for patterns, why in (
        ("+bias", r"there are \+biases and \+norms"),
        ("blocks.1, +norms", "None of the norms there"),
    ):
        with pytest.raises(RequestError, match=why):
            select_targets(root, patterns)
