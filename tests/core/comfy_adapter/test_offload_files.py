"""Load Diffusion Model (Offload): the same model as the stock loader's, from every kind of file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.packed_patchers import random_weight
from ferry_support.sampling import with_lora
from ferry_support.tiny_models import noise, randomize
from safetensors.torch import save_file

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def wan():
    """Weights of a tiny Wan that ComfyUI's detection recognises, as a file has them."""
    import comfy.ops
    from comfy.ldm.wan.model import WanModel

    model = WanModel(
        model_type="t2v", dim=128, in_dim=16, out_dim=16, num_heads=1, ffn_dim=64, num_layers=4,
        operations=comfy.ops.disable_weight_init, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    randomize(model)
    return {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}


@pytest.fixture
def models(tmp_path, monkeypatch):
    """ComfyUI's model folders, empty."""
    import folder_paths

    for kind in ("diffusion_models", "checkpoints"):
        (tmp_path / kind).mkdir()
        known = folder_paths.folder_names_and_paths[kind][1]
        monkeypatch.setitem(
            folder_paths.folder_names_and_paths, kind, ([str(tmp_path / kind)], {*known, ".safetensors"})
        )
        folder_paths.filename_list_cache.pop(kind, None)
    yield tmp_path
    for kind in ("diffusion_models", "checkpoints"):
        folder_paths.filename_list_cache.pop(kind, None)


def load(name, **settings):
    from comfyui_ferry.core.comfy_adapter import load_offloaded

    with torch.inference_mode():
        return load_offloaded(name, **settings)


def stock(path, **options):
    import comfy.sd

    with torch.inference_mode():
        return comfy.sd.load_diffusion_model(str(path), model_options=options)


def picture(model):
    import nodes

    caption = [[noise(1, 5, 4096), {}]]
    latent = {"samples": torch.zeros(1, 16, 1, 4, 4)}
    with torch.inference_mode():
        return nodes.common_ksampler(model, 3, 1, 1.0, "euler", "simple", caption, caption, latent)[0][
            "samples"
        ]


def test_the_stock_loaders_model_within_both_budgets(models, wan):
    path = models / "diffusion_models" / "wan.safetensors"
    save_file({name: value.float() for name, value in wan.items()}, path)  # what a CPU computes in
    plain = stock(path)
    expected = picture(plain)
    streamed = load("wan.safetensors", ram_gb=0.003, vram_gb=0.0046)
    stats = streamed.stream.streamer.stats()
    assert 0 < stats.host_bytes <= 0.003 * 2**30 and stats.file_bytes > 0
    state = plain.model.state_dict()
    assert {name: value.dtype for name, value in streamed.model.state_dict().items()} == {
        name: value.dtype for name, value in state.items()
    }
    assert all(torch.equal(value, state[name]) for name, value in streamed.model.state_dict().items())
    assert torch.equal(picture(streamed), expected)
    assert streamed.stream.streamer.stats().num_streamed > 0
    assert torch.equal(picture(with_lora(streamed)), picture(with_lora(plain)))
    # Weights of another dtype are in no file: they count as RAM, and have to fit there.
    with pytest.raises(RequestError, match=r"RAM budget of 0\.000 GB.*another dtype"):
        load("wan.safetensors", weight_dtype="fp8_e4m3fn", ram_gb=0.0004)
    fp8 = load("wan.safetensors", weight_dtype="fp8_e4m3fn")
    assert torch.equal(picture(fp8), picture(stock(path, dtype=torch.float8_e4m3fn)))


def test_shards_and_checkpoints_hold_the_same_model(models, wan):
    from comfyui_ferry.core.comfy_adapter import diffusion_model_names

    folder = models / "diffusion_models" / "repo" / "transformer"
    folder.mkdir(parents=True)
    names, owners = sorted(wan), {}
    for index in range(3):
        part = {name: wan[name] for name in names[index::3]}
        save_file(part, folder / f"part-{index}.safetensors")
        owners |= dict.fromkeys(part, f"part-{index}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    checkpoint = {f"model.diffusion_model.{name}": value for name, value in wan.items()}
    save_file(checkpoint | {"vae.x": torch.ones(3)}, models / "checkpoints" / "all.safetensors")
    offered = diffusion_model_names()
    shards, whole = "repo/transformer/model.safetensors.index.json", "checkpoints/all.safetensors"
    assert {shards, whole} <= set(offered)
    for name in (shards, whole):
        state = load(name).model.diffusion_model.state_dict()
        assert state.keys() == wan.keys()
        assert all(torch.equal(state[key], value.to(state[key].dtype)) for key, value in wan.items())
    own = names.index("patch_embedding.weight") % 3
    for owner, reason in (
        ("../../part-0.safetensors", "beside it"),
        ("no\0file.safetensors", "opened"),
        (next(f"part-{i}.safetensors" for i in range(3) if i != own), "none of its files"),
    ):
        owners["patch_embedding.weight"] = owner
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
        with pytest.raises(RequestError, match=reason):
            load(shards)
    owners["patch_embedding.weight"] = f"part-{own}.safetensors"
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": owners | {"x": "part-0.safetensors"}})
    )
    with pytest.raises(RequestError, match="none of its files"):
        load(shards)
    # Two owners of one tensor, or two tables: nobody can know which is meant.
    text = json.dumps({"weight_map": owners})
    for opening, once_more in (
        ('{"weight_map": {', '"patch_embedding.weight": "part-0.safetensors", '),
        ("{", '"weight_map": {}, '),
    ):
        repeated = opening + once_more + text.removeprefix(opening)
        (folder / "model.safetensors.index.json").write_text(repeated)
        with pytest.raises(RequestError, match="twice"):
            load(shards)


def test_a_diffusers_folder_with_halves_that_comfyui_swaps_in_place(models):
    """Stable Diffusion 3: q, k and v apart, and scale and shift the other way round in the last layers."""
    import comfy.ops
    import comfy.utils
    from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
    from comfyui_ferry.core.comfy_adapter.model_build import build_diffusion_model

    import nodes

    context = {"target": "torch.nn.Linear", "params": {"in_features": 40, "out_features": 128}}
    model = MMDiT(
        depth=2, num_blocks=2, patch_size=2, in_channels=16, adm_in_channels=24, pos_embed_max_size=8,
        context_embedder_config=context, operations=comfy.ops.disable_weight_init, dtype=torch.float32,
    )  # fmt: skip
    randomize(model)
    state, folder = model.state_dict(), models / "diffusion_models" / "repo" / "transformer"
    table = comfy.utils.mmdit_to_diffusers({"depth": 2, "num_blocks": 2}, output_prefix="")
    targets = {key: (target,) if isinstance(target, str) else target for key, target in table.items()}
    written = {
        key: (state[name].narrow(*where[0]) if where and where[0] else state[name]).clone()
        for key, (name, *where) in targets.items()
        if name in state
    }
    parts = [{key: written[key] for key in sorted(written)[index::2]} for index in range(2)]
    folder.mkdir(parents=True)
    for index, part in enumerate(parts):
        save_file(part, folder / f"diffusion_pytorch_model-{index}.safetensors")
    owners = {
        key: f"diffusion_pytorch_model-{index}.safetensors" for index in range(2) for key in parts[index]
    }
    name = "diffusion_pytorch_model.safetensors.index.json"
    (folder / name).write_text(json.dumps({"weight_map": owners}))
    save_file(written, models / "diffusion_models" / "one.safetensors")
    # GGUF's matrices are cut, joined and written to as well.
    packed = {
        key: random_weight("Q8_0", *value.shape, seed=seed)
        for seed, (key, value) in enumerate(written.items())
        if value.ndim == 2 and value.shape[1] % 32 == 0
    }
    dense = {key: value.dense() for key, value in packed.items()}
    built = [
        build_diffusion_model("sd3", written | given, {}, weight_dtype="default").model.state_dict()
        for given in (packed, dense)
    ]
    assert len(packed) > 20 and all(torch.equal(value, built[1][key]) for key, value in built[0].items())
    plain = stock(models / "diffusion_models" / "one.safetensors")
    caption = [[noise(1, 5, 40), {"pooled_output": noise(1, 24)}]]

    def picture_of(model):
        latent = {"samples": torch.zeros(1, 16, 8, 8)}
        with torch.inference_mode():
            sampled = nodes.common_ksampler(model, 3, 1, 1.0, "euler", "simple", caption, caption, latent)
        return sampled[0]["samples"]

    swapped = plain.model.diffusion_model.state_dict()["final_layer.adaLN_modulation.1.bias"]
    assert not torch.equal(swapped, state["final_layer.adaLN_modulation.1.bias"])
    weights_gb = load("one.safetensors").stream.streamer.weight_bytes / 2**30
    for ram_gb in (0, 0.9 * weights_gb):
        streamed = load(f"repo/transformer/{name}", ram_gb=ram_gb)
        assert bool(streamed.stream.streamer.stats().file_bytes) == bool(ram_gb)
        assert torch.equal(picture_of(streamed), picture_of(plain))


def test_what_is_no_model_is_refused_and_leaves_nothing(models, wan):
    import comfy.model_base

    folder = models / "diffusion_models"
    original = comfy.model_base.BaseModel.load_model_weights
    (models / "secret.safetensors").write_bytes(b"")

    def refused(change, reason):
        weights = {name: value.clone() for name, value in wan.items()}
        change(weights)
        save_file(weights, folder / "bad.safetensors")
        with pytest.raises(RequestError, match=reason):
            load("bad.safetensors")
        assert comfy.model_base.BaseModel.load_model_weights is original

    refused(lambda w: w.update({"blocks.1.ffn.0.bias": torch.zeros(65)}), "do not fit")
    refused(lambda w: w.pop("blocks.2.ffn.0.weight"), "not in the file")
    refused(lambda w: w.pop("blocks.2.modulation"), "not in the file")
    refused(lambda w: w.update({"blocks.1.ffn.0.bias": torch.zeros(64, dtype=torch.int64)}), "wrong dtype")
    refused(lambda w: [w.pop(name) for name in list(w) if "ffn" not in name], "does not know it")
    for name in (
        "../secret.safetensors",
        "/etc/passwd",
        "absent.safetensors",
        "checkpoints/../../secret.safetensors",
        "a\0b",
        "a" * 5000,
        "\ud800",
        "",
    ):
        with pytest.raises(RequestError, match="no file of that name"):
            load(name)
    save_file(wan, folder / "wan.safetensors")
    with pytest.raises(RequestError, match="weight_dtype"):
        load("wan.safetensors", weight_dtype="int3")
    whole = (folder / "wan.safetensors").read_bytes()
    (folder / "wan.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match="not whole"):
        load("wan.safetensors")


def scaled_fp8(weights):
    """The same model with its blocks' matrices in fp8 with a scale each, as such files have them."""
    result = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, value in weights.items():
        if name.startswith("blocks.") and name.endswith(".weight") and value.ndim == 2:
            scale = value.float().abs().max() / 448
            result[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            result[name.replace(".weight", ".scale_weight")] = scale
        else:
            result[name] = value
    return result


def test_scaled_fp8_stays_what_comfyui_makes_of_it(models, wan):
    path = models / "diffusion_models" / "fp8.safetensors"
    save_file(scaled_fp8(wan), path)
    probe = load("fp8.safetensors").stream.streamer
    budget_gb = (probe.least_bytes + probe.weight_bytes) / 2**31
    plain, streamed = stock(path), load("fp8.safetensors", vram_gb=budget_gb)
    layer, own = (model.model.diffusion_model.blocks[1].ffn[0] for model in (plain, streamed))
    assert type(own) is not torch.nn.Linear and type(own.weight) is type(layer.weight)
    assert torch.equal(picture(streamed), picture(plain))
    assert streamed.stream.streamer.stats().num_streamed > 0
    # Through LoRA as well: dequantised, patched, quantised again with the same rounding.
    expected = picture(with_lora(plain, 2.0))
    assert torch.equal(picture(with_lora(streamed, 2.0)), expected)
    assert not torch.equal(expected, picture(plain))
    assert torch.equal(picture(streamed), picture(plain))


def test_a_merge_is_that_of_the_stock_loader(models, wan):
    """Also where ComfyUI leaves patches out: a module's own weights beside those of its children."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    paths = [models / "diffusion_models" / f"{name}.safetensors" for name in "ab"]
    save_file(wan, paths[0])
    save_file({name: value * 1.25 for name, value in wan.items()}, paths[1])
    plain, other = (stock(path) for path in paths)
    with torch.inference_mode():
        expected = picture(ModelMergeSimple().merge(plain, other, 0.3)[0])
        for first, second in ((load(paths[0].name), other), (stock(paths[0]), load(paths[1].name))):
            merged = ModelMergeSimple().merge(first, second, 0.3)[0]
            assert "diffusion_model.head.modulation" in merged.patches
            assert torch.equal(picture(merged), expected)


def test_gguf(models, wan, monkeypatch):
    """Needs the optional package for the files themselves; without it the refusal names the remedy."""
    import sys

    from comfyui_ferry.core.comfy_adapter import diffusion_model_names

    path = models / "diffusion_models" / "wan.gguf"
    path.write_bytes(b"GGUF")
    assert "wan.gguf" in diffusion_model_names()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        with pytest.raises(RequestError, match="pip install gguf"):
            load("wan.gguf")
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "wan")
    expected = {}
    for name, value in wan.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        array = value.float().numpy()
        if value.ndim > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(value.shape))
            array = array.reshape(value.shape[0], -1)
        packed = gguf.quants.quantize(array, kind)
        expected[name] = torch.from_numpy(gguf.quants.dequantize(packed, kind)).reshape(value.shape)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    state = load("wan.gguf").model.diffusion_model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        kept = value.to(torch.bfloat16) if wan[name].ndim == 2 else value
        assert torch.equal(state[name], kept.to(state[name].dtype))
    # Matrices are held and read as they are in the file; what multiplies by them sees bf16.
    packed_bytes = sum(
        tensor.nbytes for tensor in load("wan.gguf").model.diffusion_model.state_dict().values()
    )
    assert packed_bytes < 0.6 * sum(2 * value.numel() for value in wan.values())
    limited = load("wan.gguf", ram_gb=0.0012)
    stats = limited.stream.streamer.stats()
    assert 0 < stats.host_bytes <= 0.0012 * 2**30 and stats.file_bytes > 0
    kept = {name: value.to(torch.bfloat16) for name, value in expected.items()}
    plain = {name: kept[name] if wan[name].ndim == 2 else value for name, value in expected.items()}
    save_file(plain, models / "diffusion_models" / "dense.safetensors")
    dense = load("dense.safetensors")
    assert torch.equal(picture(limited), picture(dense))
    assert torch.equal(picture(with_lora(limited)), picture(with_lora(dense)))
    fp8 = load("wan.gguf", weight_dtype="fp8_e4m3fn")
    assert torch.equal(picture(fp8), picture(load("dense.safetensors", weight_dtype="fp8_e4m3fn")))
    import comfy.sd

    with torch.inference_mode(), pytest.raises(RequestError, match="saving a MODEL of a GGUF file"):
        comfy.sd.save_checkpoint(str(models / "saved.safetensors"), limited)
    del limited, fp8
    from comfyui_ferry.core.comfy_adapter.gguf_files import open_gguf

    # Types that only the package knows are numbers at once; those that it does not know are named.
    random = np.random.default_rng(0).integers(0, 128, (2, 82), np.uint8)
    other = models / "diffusion_models" / "other.gguf"
    kinds = gguf.GGMLQuantizationType
    for kind, data in ((kinds.IQ2_S, random), (kinds.F64, np.zeros((2, 8)))):
        foreign = gguf.GGUFWriter(other, "wan")
        foreign.add_tensor("blocks.0.weight", data, raw_dtype=kind)
        foreign.write_header_to_file()
        foreign.write_kv_data_to_file()
        foreign.write_tensors_to_file()
        foreign.close()
        if kind == kinds.IQ2_S:
            values = torch.from_numpy(gguf.quants.dequantize(random, kind)).to(torch.bfloat16)
            assert torch.equal(open_gguf(other)[1]["blocks.0.weight"], values)
    with pytest.raises(RequestError, match=r"blocks\.0\.weight \(F64\)"):
        load("other.gguf")
    path.write_bytes(path.read_bytes()[:-200_000])
    with pytest.raises(RequestError, match="sound GGUF"):
        load("wan.gguf")
