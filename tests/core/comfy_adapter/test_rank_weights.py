from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.comfy_adapter.model_export import class_path, named_parameters
from comfyui_ferry.core.offload.wrappers import take_apart
from comfyui_ferry.core.parallel import TensorShards
from comfyui_ferry.core.plans import find_plan
from ferry_support.quantized_patchers import quantized_patcher
from ferry_support.tiny_models import is_newer_comfyui
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert one.shape == other.shape and one.dtype == other.dtype
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)


def test_a_rank_that_streams_copies_nothing_on_the_host():
    """Rows, columns, fused runs, quantized ones: each lies in the shared weights, or stands for some."""
    from comfyui_ferry.core.comfy_adapter.quantized_parts import cut
    from comfyui_ferry.core.comfy_adapter.rank_weights import RankWeights

    models = [PATCHERS[kind].build() for kind in ("flux", "wan")]
    if is_newer_comfyui():
        models += [quantized_patcher("flux"), quantized_patcher("flux", "int8_tensorwise")]
    stand_ins = 0
    for module in (model.model.diffusion_model for model in models):
        plan, weights = find_plan(class_path(module)), named_parameters(module)
        shared = {
            leaf.untyped_storage().data_ptr() for each in weights.values() for leaf in take_apart(each)[0]
        }
        for rank in range(2):
            shards = TensorShards(module, plan, degree=2, rank=rank)
            held = RankWeights(shards, torch.device("cpu"), streams=True)
            assert held.parts is not None
            for name, whole in weights.items():
                part, given = shards.parts.get(name), held.place(name, whole)
                expected = whole if part is None else cut(whole, part)
                if given is None or expected is None:
                    assert given is expected
                    continue
                found, wanted = take_apart(held.parts.filled(given))[0], take_apart(expected)[0]
                assert all(map(equal_bits, found, wanted)), name
                for leaf in take_apart(given)[0]:
                    stands = held.parts.holds(leaf)
                    stand_ins += stands
                    is_small = leaf.nbytes <= 4 * max(whole.shape, default=1)  # scales of rows
                    assert stands or is_small or leaf.untyped_storage().data_ptr() in shared, name
    assert stand_ins > 20
