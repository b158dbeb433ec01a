"""What another process is asked to compute is what this one would."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.training import LOSSES, MicroStep, Sample, draw_batches, generator, seed_torch
from comfyui_ferry.core.training.loss import sample_losses
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


def test_calls_that_draw_random_numbers_give_the_same_losses_in_any_order(monkeypatch):
    """Three calls (two captions and a dropped one) of a network with dropout, computed from the last on."""
    from comfyui_ferry.core.comfy_adapter.recorded_calls import micro_step_calls
    from comfyui_ferry.core.comfy_adapter.training import ComfyProcess
    from comfyui_ferry.core.comfy_adapter.training_inputs import Caption, plain_entry

    tiny = PATCHERS["sd3"]
    model = tiny.build()
    network = model.model.diffusion_model
    plain = type(network).forward

    def forward(self, x, *args, **kwargs):
        return torch.nn.functional.dropout(plain(self, x, *args, **kwargs), 0.5)

    monkeypatch.setattr(type(network), "forward", forward)

    def caption(tokens):
        return Caption(plain_entry(tiny.caption(tokens, tokens)[0]), latent)

    seed, number = 4, 7
    latent = tiny.latent(1)["samples"].clone()
    samples = [
        Sample(latent, caption(5)),
        Sample(latent, caption(9)),
        Sample(latent, caption(5), unconditional=caption(2), dropout=1.0),
    ]
    process = ComfyProcess(model, torch.device("cpu"), seed=seed)
    (batch,) = draw_batches(samples, seed=seed, micro_step=number)
    with torch.no_grad():
        seed_torch(generator(seed, "torch", number, 0).initial_seed(), process.device)
        expected = sample_losses(
            process,
            batch.clean,
            batch.conditions,
            noise=batch.noise,
            positions=batch.positions,
            loss=LOSSES["L1"],
        )
        calls = micro_step_calls(process, MicroStep(number, [batch]), seed=seed)
        assert len(calls) == 3
        found = []
        for call in reversed(calls):
            seed_torch(call["random"], process.device)
            error = network(*call["args"], **call["kwargs"]).float() - call["target"]
            found.append(error.abs().flatten(1).mean(dim=1) * call["weight"])
    torch.testing.assert_close(torch.cat(found[::-1]), expected, rtol=1e-5, atol=0)
