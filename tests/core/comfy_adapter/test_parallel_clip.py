"""Prompts encoded with the weights shared by workers equal those encoded in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.sampling import TOLERANCE, worker_processes
from ferry_support.tiny_models import is_newer_comfyui
from ferry_support.tiny_prompt_encoders import tiny_prompt_clip

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300), pytest.mark.usefixtures("workers_of_the_file")]

PROMPTS = ["a red fox", "an old:1.4 house by:0.5 the sea", ""]


def encode(clip: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    found = []
    for prompt in PROMPTS:
        ((cond, rest),) = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))
        found.append((cond.clone(), rest["pooled_output"].clone(), rest["attention_mask"].clone()))
    return found


def check(found: list, expected: list) -> None:
    for (cond, pooled, mask), (cond_there, pooled_there, mask_there) in zip(found, expected, strict=True):
        # fp32: partial sums of the ranks in another order; CLIP-L is computed here, as before.
        assert (cond - cond_there).abs().max() <= TOLERANCE * cond_there.abs().max()
        assert torch.equal(pooled, pooled_there) and torch.equal(mask, mask_there)


def with_patches(clip: Any) -> Any:
    """Return a clone with a change of one weight in each encoder, as a LoRA loader makes it."""
    patched, patches = clip.clone(), {}
    for name in ("t5xxl.transformer.encoder.block.1.layer.0.SelfAttention.o.weight",
                 "clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.weight"):  # fmt: skip
        shape = clip.patcher.model.get_parameter(name).shape
        patches[name] = ("diff", (torch.randn(shape, generator=torch.Generator().manual_seed(3)),))
    assert len(patched.add_patches(patches, 0.2)) == 2
    return patched


def test_prompts_are_those_of_one_process() -> None:
    from comfyui_ferry.core.comfy_adapter import make_parallel_clip

    clip = tiny_prompt_clip()
    plain, patched = encode(clip), encode(with_patches(clip))
    assert (plain[0][0] - patched[0][0]).abs().max() > 0.01
    assert not torch.equal(plain[0][1], patched[0][1])
    parallel = make_parallel_clip(clip, gpus=3)
    check(encode(parallel), plain)
    workers = worker_processes()
    check(encode(with_patches(parallel)), patched)
    check(encode(make_parallel_clip(with_patches(clip), gpus=3)), patched)
    check(encode(parallel), plain)
    assert worker_processes() == workers
    # The CLIP that it was made of is as it was.
    transformer = clip.cond_stage_model.t5xxl.transformer
    assert not {"forward", "preprocess_embed"} & transformer.__dict__.keys()
    for (cond, pooled, _), (cond_there, pooled_there, _) in zip(encode(clip), plain, strict=True):
        assert torch.equal(cond, cond_there) and torch.equal(pooled, pooled_there)
    check(encode(with_patches(clip)), patched)
    check(encode(parallel), plain)


def test_quantized_prompts_are_those_of_one_process() -> None:
    """fp8 and int8 are cut with their scales, also under a LoRA; a run with one scale is not cut in two."""
    from comfyui_ferry.core.comfy_adapter import make_parallel_clip

    if not is_newer_comfyui():
        pytest.skip("0.3.75 holds quantized weights in another way")
    for form in ("float8_e4m3fn", "int8 by channels"):
        clip = tiny_prompt_clip(form=form)
        plain, patched = encode(clip), encode(with_patches(clip))
        assert (plain[0][0] - encode(tiny_prompt_clip())[0][0]).abs().max() > 1e-3  # it is quantized
        parallel = make_parallel_clip(clip, gpus=3)
        check(encode(parallel), plain)
        check(encode(with_patches(parallel)), patched)
    with pytest.raises(RequestError, match=r"\.weight would be cut at channel .*, inside a run of 32"):
        make_parallel_clip(tiny_prompt_clip(form="mxfp8"), gpus=2)


def test_each_worker_holds_its_part() -> None:
    from comfyui_ferry.core.comfy_adapter import make_parallel_clip
    from comfyui_ferry.core.comfy_adapter.worker_groups import loaded_bytes, model_token

    clip = tiny_prompt_clip()
    encode(make_parallel_clip(clip, gpus=3))
    transformer = clip.cond_stage_model.t5xxl.transformer
    whole = sum(parameter.nbytes for parameter in transformer.parameters())
    assert 0 < loaded_bytes(model_token(transformer)) <= 0.45 * whole  # two of five heads


def test_what_cannot_be_shared_is_refused() -> None:
    from comfyui_ferry.core.comfy_adapter import make_parallel_clip
    from ferry_support.tiny_clip_vae import tiny_clip

    clip = tiny_prompt_clip()
    with pytest.raises(RequestError, match="5"):
        make_parallel_clip(clip, gpus=6)
    with pytest.raises(RequestError, match=r"_TextEncoder.* was asked.*T5 \(comfy"):
        make_parallel_clip(tiny_clip(width=8), gpus=2)
    parallel = make_parallel_clip(clip, gpus=2)
    with pytest.raises(RequestError, match="parallel already"):
        make_parallel_clip(parallel, gpus=2)
    embeddings = {"t5xxl.transformer.shared.weight": ("diff", (torch.ones(64, 40),))}
    patched = clip.clone()
    patched.add_patches(embeddings)
    with pytest.raises(RequestError, match=r"shared\.weight"):
        make_parallel_clip(patched, gpus=2)
    with pytest.raises(RequestError, match="writing text"):
        parallel.cond_stage_model.generate({})
