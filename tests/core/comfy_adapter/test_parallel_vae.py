"""Pictures and videos decoded by workers equal those decoded in this process, through ComfyUI's own VAE."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from ferry_support.sampling import TOLERANCE, worker_processes
from ferry_support.tiny_autoencoders import latent, ltx_vae, wan_vae
from ferry_support.tiny_clip_vae import tiny_vae
from ferry_support.tiny_models import is_newer_comfyui

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(300), pytest.mark.usefixtures("workers_of_the_file")]


def test_noise_is_that_of_one_process() -> None:
    """The picture, and what this process draws afterwards."""
    from comfyui_ferry.core.comfy_adapter import make_parallel_vae

    vae, whole, found = ltx_vae(), latent(1, 128, 3, 5, 4), []
    if not is_newer_comfyui():
        with pytest.raises(RequestError, match="does not keep how the file describes it"):
            make_parallel_vae(vae, gpus=3)
        return
    for each in (vae, make_parallel_vae(vae, gpus=3)):
        torch.manual_seed(3)
        with torch.inference_mode():
            found.append((each.decode(whole), each.decode(whole), torch.rand(1)))
    (first, second, after), (first_there, second_there, after_there) = found
    assert (first - second).abs().max() > 1e-2  # pixels are 0 to 1
    assert (first_there - first).abs().max() <= TOLERANCE
    assert (second_there - second).abs().max() <= TOLERANCE
    assert torch.equal(after_there, after)


def test_pictures_are_those_of_one_process() -> None:
    from comfyui_ferry.core.comfy_adapter import make_parallel_vae

    vae = wan_vae()
    parallel = make_parallel_vae(vae, gpus=3)
    picture, clip = latent(2, 16, 1, 5, 4), latent(1, 16, 2, 3, 4)
    with torch.inference_mode():
        for each in (picture, clip):
            expected, found = vae.decode(each), parallel.decode(each)
            assert found.shape == expected.shape
            assert (found - expected).abs().max() <= TOLERANCE  # pixels are 0 to 1
            assert expected.std() > 0.05
        workers = worker_processes()
        tiles = {"tile_x": 4, "tile_y": 4, "overlap": 1}
        assert (parallel.decode_tiled(picture, **tiles) - vae.decode_tiled(picture, **tiles)).abs().max() <= (
            TOLERANCE
        )
        pixels = torch.rand(1, 16, 16, 3)
        assert torch.equal(parallel.encode(pixels), vae.encode(pixels))
        assert (parallel.decode(picture) - vae.decode(picture)).abs().max() <= TOLERANCE
    assert worker_processes() == workers and len(workers) == 3


def test_what_has_no_plan_is_refused() -> None:
    from comfyui_ferry.core.comfy_adapter import make_parallel_vae

    with pytest.raises(RequestError, match=r"_Autoencoder.*VAEs with a plan are AutoencoderKL"):
        make_parallel_vae(tiny_vae(), gpus=2)
    vae = wan_vae()
    with pytest.raises(RequestError, match="parallel already"):
        make_parallel_vae(make_parallel_vae(vae, gpus=2), gpus=2)
    with pytest.raises(RequestError, match="gpus=0"):
        make_parallel_vae(vae, gpus=0)
