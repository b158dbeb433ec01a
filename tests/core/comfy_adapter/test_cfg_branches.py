"""CFG branches: any number of conditionings, other nodes' wrappers, errors and cancel."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from comfyui_ferry.core.errors import WorkerError
from ferry_support.sampling import (
    CFG_2,
    TOLERANCE,
    ULYSSES_2,
    difference,
    guide_by_two,
    parallel,
    prompts,
    sample,
    worker_processes,
)
from ferry_support.tiny_models import noise
from ferry_support.tiny_patchers import PATCHERS

pytestmark = [pytest.mark.comfy, pytest.mark.timeout(120)]

KIND = "wan"


@pytest.fixture(scope="module")
def model():
    return PATCHERS[KIND].build()


@pytest.fixture(scope="module")
def expected(model):
    return sample(model, KIND)


def cfg_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ferry-cfg")]


def wait_for_threads():
    until = time.monotonic() + 5
    while cfg_threads() and time.monotonic() < until:
        time.sleep(0.01)
    return cfg_threads()


def test_three_conditionings_on_two_branches(model):
    """The third waits for a free branch without keeping the others from coming back."""
    assert difference(guide_by_two(parallel(model, CFG_2), KIND), guide_by_two(model, KIND)) <= TOLERANCE


def guided_in_other_ways(patcher):
    """Each variant's latent: norm rescaling, CFG-Zero*, rescaled CFG, CFG++ and nested dual CFG."""
    import comfy.samplers
    import comfy_extras.nodes_custom_sampler as custom
    from comfy_extras.nodes_cfg import CFGNorm, CFGZeroStar
    from comfy_extras.nodes_model_advanced import RescaleCFG

    latents = {
        "norm": sample(CFGNorm.execute(patcher, 1.0).args[0], KIND),
        "zero star": sample(CFGZeroStar.execute(patcher).args[0], KIND),
        "rescaled": sample(RescaleCFG().patch(patcher, 0.7)[0], KIND),
        "cfg++": sample(patcher, KIND, sampler="euler_cfg_pp"),
    }
    captions = [PATCHERS[KIND].caption(seed, tokens) for seed, tokens in ((1, 11), (3, 8), (2, 5))]
    guider = custom.Guider_DualCFG(patcher)
    guider.set_conds(*captions)
    guider.set_cfg(2.0, 3.0, nested=True)
    start = PATCHERS[KIND].latent(4)["samples"]
    sampler = comfy.samplers.sampler_object("euler")
    with torch.inference_mode():
        sigmas = torch.tensor([1.0, 0.6, 0.2, 0.0])
        latents["nested"] = guider.sample(start, torch.zeros_like(start), sampler, sigmas, seed=4)
    return latents


def test_every_variant_of_guidance(model, expected):
    """Guidance is combined in ComfyUI's own loop, from all conditionings, wherever they were evaluated."""
    here, there = guided_in_other_ways(model), guided_in_other_ways(parallel(model, CFG_2))
    for name, latent in here.items():
        assert difference(latent, expected) > 1e-2, name
        assert difference(there[name], latent) <= TOLERANCE, name


@pytest.mark.parametrize("where", ["upstream", "downstream"])
def test_easycache_skips_the_same_steps(model, where):
    from comfy_extras.nodes_easycache import EasyCacheNode

    def cached(patcher):
        return EasyCacheNode.execute(patcher, 2.5, 0.1, 0.95, False).args[0]

    here = sample(cached(model), KIND, steps=8)
    assert difference(here, sample(model, KIND, steps=8)) > 1e-2  # it did skip
    there = parallel(cached(model), CFG_2) if where == "upstream" else cached(parallel(model, CFG_2))
    assert difference(sample(there, KIND, steps=8), here) <= TOLERANCE


def test_a_wrapper_inside_that_evaluates_conditionings_itself(model):
    """Its own batch, from within a branch, is not split again and does not hang."""
    import comfy.patcher_extension
    import comfy.samplers

    def again(apply_model, arguments):
        options = {"transformer_options": arguments["c"]["transformer_options"]}
        if not nested:
            nested.append(True)
            conds = [kept["conds"][0], kept["conds"][0]]
            comfy.samplers.calc_cond_batch(kept["model"], conds, kept["x"], kept["timestep"], options)
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    def keep(executor, base, conds, x, timestep, options):
        kept.update(model=base, conds=conds, x=x, timestep=timestep)
        return executor(base, conds, x, timestep, options)

    nested, kept = [], {}
    wrapped = parallel(model, CFG_2).clone()
    wrapped.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.CALC_COND_BATCH, "keep", keep)
    wrapped.set_model_unet_function_wrapper(again)
    assert difference(sample(wrapped, KIND), sample(model, KIND)) <= TOLERANCE
    assert nested


def test_an_error_of_another_node_in_one_branch(model, expected):
    """It reaches the caller as it is; no thread is left, and the workers go on."""
    calls = []

    def fail(apply_model, arguments):
        calls.append(None)
        if len(calls) == 2:
            raise ValueError("planted")
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    sample(parallel(model, CFG_2), KIND)
    before = worker_processes()
    failing = model.clone()
    failing.set_model_unet_function_wrapper(fail)
    with pytest.raises(ValueError, match="planted"):
        sample(parallel(failing, CFG_2), KIND)
    assert wait_for_threads() == []
    assert difference(sample(parallel(model, CFG_2), KIND), expected) <= TOLERANCE
    assert worker_processes() == before


@pytest.mark.parametrize("how", ["cancel", "ctrl-c"])
def test_a_sampling_that_is_cancelled_in_mid_call_ends_at_once(model, expected, how):
    """Both branches give up; the workers finish what they do and take the next prompt.

    They stand still meanwhile: giving up late would be a lost worker's error instead (``stall_s``).
    """
    import comfy.model_management as management

    # What a shell starts in the background ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sample(parallel(model, CFG_2), KIND)
    workers = worker_processes()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    if how == "cancel":
        timer = threading.Timer(0.3, management.interrupt_current_processing, [True])
    else:
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    try:
        with pytest.raises((management.InterruptProcessingException, KeyboardInterrupt)):
            sample(parallel(model, CFG_2), KIND)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    assert wait_for_threads() == []
    assert difference(sample(parallel(model, CFG_2), KIND), expected) <= TOLERANCE
    assert worker_processes() == workers


def test_an_error_in_a_worker_names_the_rank_and_holds_its_traceback(model, expected):
    bad = prompts(KIND) | {"negative": [[noise(1, 5, 33), {}]]}
    with pytest.raises(WorkerError, match=r"rank [01] raised RuntimeError.*5x33") as caught:
        sample(parallel(model, CFG_2), KIND, conditioning=bad)
    assert "Traceback" in str(caught.value)
    assert wait_for_threads() == []
    assert worker_processes() == []
    assert difference(sample(parallel(model, CFG_2), KIND), expected) <= TOLERANCE


def test_other_degrees_in_one_prompt(model, expected):
    for degrees in (CFG_2, ULYSSES_2):
        assert difference(sample(parallel(model, degrees), KIND), expected) <= TOLERANCE
    assert len(worker_processes()) == 2
