"""Modulation layers of a streamed MODEL come in once for a whole sampling, and the picture's bits stay."""

from __future__ import annotations

import collections

import pytest
import torch
from ferry_support.sampling import prompts, sample, with_lora
from ferry_support.tiny_patchers import PATCHERS

pytestmark = pytest.mark.comfy


class Streamed:
    """A streamed copy of a MODEL within the least budget, and how often each of its blocks was copied."""

    def __init__(self, plain, share=0.0):
        from comfyui_ferry.core.comfy_adapter import offload_model

        with torch.inference_mode():
            probe = offload_model(plain, vram_gb=0).stream.streamer
            budget = probe.least_bytes + share * (probe.weight_bytes - probe.least_bytes)
            self.model = offload_model(plain, vram_gb=budget / 2**30)
        self.streamer = self.model.stream.streamer
        self.asides = self.streamer._asides
        self.copies = collections.Counter()
        copy_in = self.streamer.pool.copy_in

        def counted(master, buffer):
            self.copies[master.plan.path] += 1
            copy_in(master, buffer)
            assert self.streamer.target_bytes <= budget

        self.streamer.pool.copy_in = counted

    def aside_copies(self):
        """Return how often each modulation layer was copied since the last call."""
        counts = [self.copies[block.plan.path] for block in self.asides.blocks]
        self.copies.clear()
        return counts


# Each prompt of Flux and SD3 has a vector of its own; Qwen-Image's depends on the time alone.
@pytest.mark.parametrize(("kind", "vectors"), [("flux", 2), ("qwen", 1), ("sd3", 2)])
def test_each_layer_comes_in_once_for_all_steps(kind, vectors):
    plain = PATCHERS[kind].build()
    streamed = Streamed(plain)
    expected = sample(plain, kind, steps=5)
    assert torch.equal(sample(streamed.model, kind, steps=5), expected)
    assert streamed.asides.blocks and streamed.aside_copies() == [vectors] * len(streamed.asides.blocks)
    assert streamed.asides.cache.num_misses == 0
    # The same times again: nothing of it is computed anew.
    assert torch.equal(sample(streamed.model, kind, steps=5), expected)
    assert set(streamed.aside_copies()) == {0}
    # A change of the layers' weights is seen, and its end.
    for model, streamed_model in (
        (with_lora(plain, 0.5), with_lora(streamed.model, 0.5)),
        (with_lora(plain, -1.0), with_lora(streamed.model, -1.0)),
        (plain, streamed.model),
    ):
        assert torch.equal(sample(streamed_model, kind, steps=2), sample(model, kind, steps=2))
    assert max(streamed.aside_copies()) > 0


def test_times_that_nobody_foresaw_and_little_room():
    plain = PATCHERS["flux"].build()
    streamed = Streamed(plain)
    # The sampler's steps between two sigmas.
    assert torch.equal(
        sample(streamed.model, "flux", steps=3, sampler="dpm_2"),
        sample(plain, "flux", steps=3, sampler="dpm_2"),
    )
    assert streamed.asides.cache.num_misses > 0
    expected = sample(plain, "flux", steps=4)
    rows = streamed.asides.stored_limit_bytes // 32
    for limit in (3 * rows, rows, 0):
        streamed.asides.cache._store.limit_bytes = limit
        streamed.asides.cache.clear()
        assert torch.equal(sample(streamed.model, "flux", steps=4), expected)
        assert streamed.asides.cache.stored_bytes <= limit


def test_others_code_may_write_to_the_vector():
    """A block replacement that changes it in place: its bytes are read before every layer then."""

    def patched(model):
        model = model.clone()

        def replace(args, extra):
            args["vec"].mul_(1.25)
            return extra["original_block"](args)

        model.set_model_patch_replace(replace, "dit", "double_block", 1)
        return model

    plain = PATCHERS["flux"].build()
    streamed = Streamed(plain)
    expected = sample(patched(plain), "flux", steps=3)
    assert torch.equal(sample(patched(streamed.model), "flux", steps=3), expected)
    assert not torch.equal(expected, sample(plain, "flux", steps=3))
    assert torch.equal(sample(streamed.model, "flux", steps=3), sample(plain, "flux", steps=3))


def test_resident_layers_give_way_in_the_middle_of_a_run():
    plain = PATCHERS["qwen"].build()
    streamed = Streamed(plain, share=1.0)
    expected = sample(plain, "qwen", steps=4)
    shrunk = []

    def shrink(step, *_):
        if step == 1:
            assert streamed.asides.is_resident and not streamed.asides.cache.stored_bytes
            shrunk.append(streamed.model.partially_unload(None, streamed.streamer.weight_bytes // 3))

    import comfy.sample

    chosen = prompts("qwen")
    latent = PATCHERS["qwen"].latent()["samples"]
    with torch.inference_mode():
        start = comfy.sample.prepare_noise(latent, 5)
        options = (
            4,
            3.0,
            "euler",
            "simple",
            chosen["positive"],
            chosen["negative"],
            torch.zeros_like(latent),
        )
        sampled = comfy.sample.sample(streamed.model, start, *options, callback=shrink, seed=5)
    assert shrunk[0] >= streamed.streamer.weight_bytes // 3
    assert torch.equal(sampled, expected)
    assert not streamed.asides.is_resident and streamed.asides.cache.num_hits > 0


def test_a_cancelled_sampling_leaves_nothing_behind():
    plain = PATCHERS["sd3"].build()
    streamed = Streamed(plain)

    def fail(*_):
        raise KeyboardInterrupt

    broken = streamed.model.clone()
    broken.set_model_attn1_patch(fail)
    broken.model_options["sampler_cfg_function"] = fail
    with pytest.raises(KeyboardInterrupt):
        sample(broken, "sd3", steps=3)
    assert all(block.depth == 0 for block in [*streamed.streamer._blocks, *streamed.asides.blocks])
    assert torch.equal(sample(streamed.model, "sd3", steps=3), sample(plain, "sd3", steps=3))
    streamed.model.detach()
    assert streamed.streamer.target_bytes == 0 and not streamed.asides.cache.stored_bytes
    assert not any("forward" in module.__dict__ for module in streamed.model.model.modules())
