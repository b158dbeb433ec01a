"""Every plan through the shared tester: real gloo processes, tiny models of ComfyUI's own classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from comfyui_ferry.core.parallel import ModelPlan, ParallelDims, check_plan, parallelize
from comfyui_ferry.core.parallel.attention import lse, ring
from comfyui_ferry.core.parallel.plan import InputAction, Replicated
from ferry_support.model_matrix import layout_name, render_page, render_rows
from ferry_support.model_sections import check_section, read_section, skip_without_results
from ferry_support.parity import (
    MORE_OF_EIGHT,
    TOLERANCE,
    CaseReport,
    fits,
    layouts_of,
    model_report,
    plan_of,
    pool_dims,
    relative_error,
    run_alone,
    run_parallel,
    sequence_group,
)
from ferry_support.rank_pool import RankPool
from ferry_support.ranks import run_ranks
from ferry_support.tiny_cases import CASES
from ferry_support.tiny_models import (
    Inputs,
    build_flux,
    build_hunyuan,
    build_ltxv,
    build_qwen,
    build_sd3,
    build_wan,
    build_z_image,
    flux_call,
    is_newer_comfyui,
    noise,
    qwen_call,
)
from torch import nn

pytestmark = pytest.mark.comfy

Prepared = tuple[nn.Module, ModelPlan, Inputs, torch.Tensor]


def skip_if_missing(name: str) -> None:
    if CASES[name].newer_only and not is_newer_comfyui():
        pytest.skip("this ComfyUI has no such model")


def model_and_plan(name: str) -> tuple[nn.Module, ModelPlan]:
    skip_if_missing(name)
    model = CASES[name].build()
    return model, plan_of(model)


def prepare(name: str) -> Prepared:
    """Return model, plan, inputs and one rank's output of a case."""
    model, plan = model_and_plan(name)
    inputs = CASES[name].inputs()
    return model, plan, inputs, run_alone(model, inputs)


@pytest.fixture(scope="module")
def pool():
    """Four ranks for all cases."""
    for build in (build_flux, build_qwen, build_wan, build_z_image, build_sd3, build_hunyuan, build_ltxv):
        build()  # imports, once instead of in every rank
    ranks = RankPool(4)
    yield ranks
    ranks.close()


def check(reports: list[CaseReport], layouts: Iterable[ParallelDims]) -> dict[ParallelDims, float]:
    """Check what the ranks saw and return the worst error of each layout."""
    worst: dict[ParallelDims, float] = {}
    for rank, seen in enumerate(reports):
        assert seen.inputs_kept, rank
        assert seen.restored, rank
        assert seen.left == [], rank
        for dims, error in seen.errors.items():
            assert error <= TOLERANCE, (rank, dims, error)
            worst[dims] = max(worst.get(dims, 0.0), error)
    assert worst.keys() == set(layouts)
    return worst


# Case -> layout -> error, of this run.
SEEN: dict[str, dict[str, float]] = {}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_rank(pool: RankPool, name: str, record_property: Callable[[str, object], None]) -> None:
    """Every method and product on two, three and four ranks.

    Tokens and heads are uneven everywhere; with four ranks and three heads one rank has none.
    """
    model, plan = model_and_plan(name)
    reports = pool.call("ferry_support.parity:case_report", name)
    worst = check(reports, [dims for dims in pool_dims() if fits(model, plan, dims)])
    SEEN[name] = {layout_name(dims): error for dims, error in worst.items()}
    record_property("parity", {name: SEEN[name]})
    broken = reports[1].without_exchange
    # A key mask made from this rank's tokens fits its own attention; a whole mask does not.
    if isinstance(broken, str):
        assert "expanded size" in broken or "must match" in broken
    else:
        assert broken > 1e-2


def test_the_published_table_is_what_was_seen() -> None:
    expected = {name for name, case in CASES.items() if is_newer_comfyui() or not case.newer_only}
    skip_without_results(SEEN.keys() != expected)
    if is_newer_comfyui():
        check_section("denoisers", render_page(SEEN))
    else:
        assert set(render_rows(SEEN).values()) <= set(read_section("denoisers").splitlines())


def check_on_eight(model: nn.Module, inputs: Inputs) -> None:
    plan = plan_of(model)
    reports = run_ranks(model_report, 8, model, plan, inputs)
    check(reports, [dims for dims in (*layouts_of(8), *MORE_OF_EIGHT) if fits(model, plan, dims)])


@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_five_text_tokens_on_eight_ranks(family: str) -> None:
    """An empty negative prompt: three ranks have no text."""
    if family == "flux":
        check_on_eight(build_flux(), flux_call(text=5))
    else:
        # Enough heads for tensor parallel over eight as well.
        check_on_eight(build_qwen(num_attention_heads=9), qwen_call(text=5))


@pytest.mark.parametrize("name", ["qwen edit-2511", "flux2 timestep zero", "flux1-kontext control"])
def test_references_and_residuals_on_eight_ranks(name: str) -> None:
    """Some ranks hold only reference tokens, some only image tokens."""
    skip_if_missing(name)
    check_on_eight(CASES[name].build(), CASES[name].inputs())


@pytest.mark.parametrize("name", CASES)
def test_the_plan_resolves(name: str) -> None:
    model, plan = model_and_plan(name)
    check_plan(model.to("meta"), plan)


def broken_error(pool: RankPool, name: str, plan: ModelPlan, changes: Inputs | None = None) -> float | str:
    """Return the error of a case under a wrong plan, or the message with which it was refused."""
    return pool.call("ferry_support.parity:plan_error", name, plan, changes or {})[1]


def left_whole(plan: ModelPlan, argument: str) -> ModelPlan:
    """Return the plan with an argument wrongly declared as having no tokens."""

    def change(action: InputAction) -> InputAction:
        return Replicated(argument, optional=action.optional) if action.argument == argument else action

    rules = [replace(rule, inputs=tuple(map(change, rule.inputs))) for rule in plan.rules]
    return replace(plan, rules=tuple(rules))


def test_the_second_attention_of_sd3_medium_is_over_the_image_alone(pool: RankPool) -> None:
    """Its role is told by the number of the call: over both streams it would not fit, and be refused."""
    _, plan = model_and_plan("sd3.5-medium batch 2")
    rules = tuple(rule for rule in plan.rules if not rule.having)
    error = broken_error(pool, "sd3.5-medium batch 2", replace(plan, rules=rules))
    assert isinstance(error, str)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("hunyuan-1.0 short text", {"guiding_frame_index": torch.zeros(1)}),
        ("hunyuan-1.0 short text", {"ref_latent": noise(1, 9, 1, 5, 4), "control": None}),
        # A guide that is attended to at half strength.
        ("ltxv guide", {"guide_attention_entries": [{"pre_filter_count": 20, "strength": 0.5}]}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_a_plan_does_not_cover_is_refused(pool: RankPool, name: str, changes: Inputs) -> None:
    model, plan = model_and_plan(name)
    run_alone(model, CASES[name].inputs() | changes)
    error = broken_error(pool, name, plan, changes)
    assert isinstance(error, str)
    at_once = "whose sequence is shared among GPUs" in error and "Set ulysses_degree" in error
    assert at_once or ("blocks.0, argument" in error and name == "ltxv guide")


@pytest.mark.parametrize("broken", ["_Transfer.wait", "PartialAttention.merge"])
@pytest.mark.parametrize("name", ["flux1-dev full mask", "qwen text mask, batch 2", "wan t2v"])
def test_a_broken_ring_is_seen_by_the_tester(name: str, broken: str) -> None:
    """Keys that never travel, and parts that are not merged."""
    model, plan, inputs, reference = prepare(name)

    def body() -> float:
        if broken == "_Transfer.wait":
            ring._Transfer.wait = lambda self: [work.wait() for work in self.works] and self.receive.zero_()
        else:
            lse.PartialAttention.merge = lambda self, other: self
        handle = parallelize(model, plan, group=sequence_group(ParallelDims(ring=2)))
        return relative_error(run_parallel(model, handle, inputs), reference)

    assert min(run_ranks(body, 2)) > 1e-2


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("flux1-dev", "pe"),
        ("flux2 timestep zero", "modulation_dims"),
        ("qwen", "image_rotary_emb"),
        ("qwen edit-2511", "timestep_zero_index"),
        ("wan t2v", "freqs"),
        ("wan ti2v", "e"),
        ("z-image", "freqs_cis"),
        ("z-image references", "timestep_zero_index"),
        ("sd3.5-medium batch 2", "args[0]"),
        ("hunyuan-1.5", "pe"),
        ("ltxv token times", "timestep"),
        ("ltx2", "v_pe[0]"),
        ("ltx2", "v_cross_pe[0]"),
        ("ltx2 frame times, batch 2", "v_timestep"),
        ("ltx2 token times, perturbed attention", "v_cross_gate_timestep"),
    ],
)
def test_an_argument_left_whole_is_seen_by_the_tester(pool: RankPool, name: str, argument: str) -> None:
    """Several of these raise no error in the model: the rope kernels cut a long table silently."""
    _, plan = model_and_plan(name)
    error = broken_error(pool, name, left_whole(plan, argument))
    assert isinstance(error, str) or error > 1e-3


def test_uncut_residuals_are_seen_by_the_tester(pool: RankPool) -> None:
    _, plan = model_and_plan("flux1-kontext control")
    error = broken_error(pool, "flux1-kontext control", replace(plan, control=None))
    assert isinstance(error, str) or error > 1e-3


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("flux1-dev full mask", "attention_mask"),
        ("flux1-kontext control", "control"),
        ("flux1-kontext control", "ref_latents"),
        ("flux1-dev post_input", "transformer_options"),
        ("flux2 timestep zero", "ref_latents_method"),
        ("qwen text mask, batch 2", "attention_mask"),
        ("qwen edit, control", "control"),
        ("qwen edit-2511", "ref_latents"),
        ("wan2.1 i2v clip", "clip_fea"),
        ("wan reference, frame timesteps", "reference_latent"),
        ("wan time concat", "time_dim_concat"),
        ("wan context latents", "context_latents"),
        ("z-image references", "ref_latents"),
        ("sd3.5-medium short text, control", "control"),
        ("hunyuan-1.5", "txt_byt5"),
        ("hunyuan-1.5", "clip_fea"),
        ("hunyuan-1.5 text mask", "attention_mask"),
        ("hunyuan-1.5 text mask", "control"),
        ("hunyuan-1.5 guiding frame", "guiding_frame_index"),
        ("hunyuan-1.0 short text", "control"),
        ("ltxv, text mask, batch 2", "attention_mask"),
        ("ltx2 token times, perturbed attention", "transformer_options"),
        ("sdxl control", "control"),
    ],
)
def test_the_special_input_of_a_case_changes_its_output(name: str, argument: str) -> None:
    """Otherwise parity would say nothing about it."""
    model, _, inputs, reference = prepare(name)
    if name.startswith("qwen text mask") and not is_newer_comfyui():
        pytest.skip("0.3.75 ignores Qwen's text mask")
    if name.startswith("ltxv"):
        inputs[argument] = None
    else:
        del inputs[argument]
    if argument == "reference_latent":
        inputs["timestep"] = inputs["timestep"][:, 1:]
    if argument == "clip_fea" and name.startswith("wan"):
        inputs["clip_fea"] = torch.zeros(2, 257, 1280)
    assert relative_error(run_alone(model, inputs), reference) > 1e-3
