"""MODELs whose weights are GGUF's blocks: what dense weights of the same values give, from fewer bytes."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.offload import PackedWeight
from ferry_support.packed_patchers import packed_pair
from ferry_support.parity import world_group
from ferry_support.ranks import run_ranks
from ferry_support.sampling import sample, with_lora
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy
WIDE = {"hidden_size": 64, "num_heads": 4}


def blocks(patcher):
    """Return the bytes of every packed weight by name."""
    named = patcher.model.named_parameters()
    return {name: weight.blocks.clone() for name, weight in named if isinstance(weight, PackedWeight)}


def test_sampling_is_that_of_dense_weights():
    from comfyui_ferry.core.comfy_adapter import offload_model

    packed, dense = packed_pair("flux", dtype=torch.bfloat16, depth=2, depth_single_blocks=5, **WIDE)
    before = blocks(packed)
    assert len(before) > 20
    expected, with_patches = sample(dense, "flux", steps=1), sample(with_lora(dense), "flux", steps=1)
    assert not torch.equal(expected, with_patches)
    saved = sum(weight.nbytes for weight in dense.model.parameters()) - sum(
        weight.nbytes for weight in packed.model.parameters()
    )
    dense_bytes = offload_model(dense, vram_gb=0.0).stream.streamer.stats().host_bytes
    vram_gb = 0.0
    for _ in range(2):
        streamed = offload_model(packed, vram_gb=vram_gb, prefetch_depth=0)
        assert torch.equal(sample(streamed, "flux", steps=1), expected)
        assert torch.equal(sample(with_lora(streamed), "flux", steps=1), with_patches)
        assert torch.equal(sample(streamed, "flux", steps=1), expected)
        stats = streamed.stream.streamer.stats()
        # Each tensor begins at a multiple of 64 bytes.
        assert 0 <= stats.host_bytes - (dense_bytes - saved) < 64 * len(before)
        assert stats.host_bytes < 0.5 * dense_bytes
        assert (stats.num_streamed > 0) == (vram_gb > 0)
        vram_gb = 1.001 * streamed.stream.streamer.least_bytes / 2**30
    after = blocks(packed)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def learned(patcher, *, offload, algorithm):
    """Return the losses and the LoRA of a training of two steps."""
    from comfyui_ferry.core.comfy_adapter.train_lora import SaveSettings, TrainingRequest, run_lora_training
    from comfyui_ferry.core.training import LoraConfig, OffloadSettings, TrainingConfig

    tiny = PATCHERS["flux"]
    request = TrainingRequest(
        LoraConfig(rank=4, algorithm=algorithm), TrainingConfig(steps=2, learning_rate=1e-2),
        OffloadSettings(enabled=offload), SaveSettings(prefix=""), save_dtype="fp32", compute_dtype="fp32",
    )  # fmt: skip
    with torch.inference_mode():
        result = run_lora_training(patcher, [tiny.latent(0, 2)], [tiny.caption(0), tiny.caption(1)], request)
    return result.loss_map["loss"], result.lora


def test_training_is_that_of_dense_weights():
    for upstream, algorithm in ((False, "DoRA"), (True, "LoRA")):
        packed, dense = packed_pair("flux", **WIDE)
        before = blocks(packed)
        pair = [with_lora(patcher) if upstream else patcher for patcher in (packed, dense)]
        losses, lora = learned(pair[1], offload=False, algorithm=algorithm)
        for offload in (True, False) if upstream else (True,):
            own_losses, own_lora = learned(pair[0], offload=offload, algorithm=algorithm)
            assert own_losses == losses
            assert all(torch.equal(own_lora[name], value) for name, value in lora.items())
        after = blocks(packed)
        assert before.keys() == after.keys()
        assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_each_rank_of_the_workers_has_its_part_of_dense_weights():
    from comfyui_ferry.core.comfy_adapter.model_export import describe_model, named_parameters, named_tensors
    from comfyui_ferry.core.comfy_adapter.patch_messages import encode_patches
    from comfyui_ferry.core.comfy_adapter.worker_model import WorkerModel
    from comfyui_ferry.core.parallel import RankLayout

    pair = [with_lora(patcher) for patcher in packed_pair("flux", **WIDE)]
    networks = [(describe_model(one.model), dict(named_tensors(one.model.diffusion_model))) for one in pair]
    message = encode_patches(pair[0].patches)
    most = len(blocks(pair[0]))

    def num_packed(workers):
        held = [named_parameters(worker.module) for worker in workers]
        for name, tensor in held[1].items():
            own = held[0][name]
            assert torch.equal(own.dense() if isinstance(own, PackedWeight) else own, tensor), name
        return sum(isinstance(tensor, PackedWeight) for tensor in held[0].values())

    def check(layout, is_all):
        with torch.inference_mode():
            workers = [WorkerModel(*one, device=torch.device("cpu"), layout=layout) for one in networks]
            before = num_packed(workers)
            assert 20 < before and (before == most) == is_all
            for patches in (message, {}):  # what a LoRA changes is dense
                for worker in workers:
                    worker.apply_patches(patches)
                assert (num_packed(workers) == before) == (not patches)

    check(RankLayout(0, None), True)
    # A cut through the blocks of 256 weights leaves them dense.
    run_ranks(lambda: check(RankLayout(0, None, world_group()), False), 2)
