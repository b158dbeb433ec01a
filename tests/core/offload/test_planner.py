"""Plans from made-up profiles whose right answers are known."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.offload.planner import GB, correct, plan_residency
from comfyui_ferry.core.offload.prediction import BucketProfile, OffloadProfile, predict

# Qwen-Image on an H200: 60 blocks, 53.9 GB/s; 0.35 s of forward, 0.7 s of recompute and backward.
BLOCK = int(0.68 * GB)


def qwen(blocks=60, forward_s=0.35, backward_s=0.7, link=53.9 * GB, **more):
    small = (BucketProfile("embed", 10**7, 1e-4, 2e-4),)
    large = tuple(
        BucketProfile(f"block{i}", BLOCK, forward_s / blocks, backward_s / blocks) for i in range(blocks)
    )
    values = {"pageable_bytes_per_s": 12 * GB, "other_s": 0.02, "other_bytes": 3 * GB} | more
    return OffloadProfile(small + large, link_bytes_per_s=link, **values)


def test_all_streamed_takes_what_the_link_takes():
    predicted = predict(qwen(), (), ring_bytes=2 * BLOCK)
    moved_bytes = (2 * 60 - 2) * BLOCK + 2 * 10**7  # the backward begins with two that are still there
    link_s = moved_bytes / (53.9 * GB)
    assert predicted.link_s == pytest.approx(link_s)
    assert link_s < predicted.step_s < 1.1 * link_s  # and the last computation of each pass
    assert predicted.bound == "link"
    assert predicted.moved_bytes == moved_bytes
    assert predicted.peak_bytes == 3 * GB + 2 * BLOCK + 10**7  # no block's slot serves the small one


def test_all_resident_takes_what_the_computation_takes():
    profile = qwen()
    predicted = predict(profile, [b.name for b in profile.buckets], ring_bytes=0)
    assert predicted.step_s == pytest.approx(0.35 + 0.7 + 0.02, rel=1e-3)
    assert (predicted.link_s, predicted.bound, predicted.moved_bytes) == (0, "compute", 0)


def test_without_room_ahead_copies_and_computation_take_turns():
    profile = qwen(other_s=0.0)
    serial = predict(profile, (), ring_bytes=BLOCK)
    # Only the small bucket's computation hides behind a copy.
    assert serial.step_s == pytest.approx(serial.link_s + serial.compute_s, rel=1e-2)
    on_cpu = predict(dataclasses.replace(profile, overlaps=False), (), ring_bytes=9 * BLOCK)
    assert on_cpu.step_s == pytest.approx(on_cpu.link_s + on_cpu.compute_s)


def test_a_larger_budget_is_never_slower_and_never_exceeded():
    steps = []
    for budget in (4.4, 6, 16, 60):
        plan = plan_residency(qwen(), vram_budget_bytes=int(budget * GB))
        assert plan.prediction.peak_bytes <= budget * GB
        steps.append(plan.prediction.step_s)
    assert all(later <= earlier * 1.005 for earlier, later in itertools.pairwise(steps))
    assert steps[-1] < 1.1 and steps[0] > 1.5


def test_no_memory_is_taken_for_nothing():
    """A compute-bound step keeps nothing, whatever the budget."""
    plan = plan_residency(qwen(link=500 * GB), vram_budget_bytes=100 * GB)
    assert plan.num_resident_blocks == 0
    assert plan.prediction.peak_bytes < 5 * GB


def test_residents_are_spread():
    plan = plan_residency(qwen(), vram_budget_bytes=int((3 + 0.02 + 22 * 0.68) * GB))
    kept = sorted(int(name[5:]) for name in plan.resident if name.startswith("block"))
    assert plan.num_resident_blocks == len(kept) >= 18
    gaps = [b - a for a, b in itertools.pairwise(kept)]
    assert max(gaps) <= 4
    assert "embed" in plan.resident


def test_memory_that_is_not_pinned_costs_its_rate():
    half = plan_residency(qwen(), vram_budget_bytes=5 * GB, pin_budget_bytes=20 * GB)
    full = plan_residency(qwen(), vram_budget_bytes=5 * GB)
    assert half.pinned_bytes == 20 * GB and full.pinned_bytes == full.streamed_bytes
    more_s = 2 * (full.streamed_bytes - 20 * GB) * (1 / (12 * GB) - 1 / (53.9 * GB))
    assert half.prediction.link_s - full.prediction.link_s == pytest.approx(more_s, rel=0.05)


def test_what_is_trained_on_the_host_does_not_stay():
    profile = qwen(blocks=4)
    buckets = tuple(dataclasses.replace(b, may_stay=b.name != "block1") for b in profile.buckets)
    plan = plan_residency(dataclasses.replace(profile, buckets=buckets), vram_budget_bytes=90 * GB)
    assert "block1" not in plan.resident and "block2" in plan.resident


@pytest.mark.parametrize("link_factor", [0.6, 1.5])
@pytest.mark.parametrize(("compute_factor", "budget"), [(0.7, 5), (1.4, 30)])
def test_after_a_correction_the_prediction_holds(link_factor, compute_factor, budget):
    """The truth differs from the profile; a measured step later the next plan is right within 10 %."""
    profile = qwen()
    truth = qwen(
        forward_s=0.35 * compute_factor, backward_s=0.7 * compute_factor, link=53.9 * GB * link_factor
    )
    plan = plan_residency(profile, vram_budget_bytes=budget * GB)

    def real_s(plan):
        return predict(truth, plan.resident, ring_bytes=plan.ring_bytes).step_s

    compute_s = sum(bucket.forward_s + bucket.backward_s for bucket in truth.buckets)
    corrected = correct(profile, plan, step_s=real_s(plan), passes_compute_s=compute_s)
    again = plan_residency(corrected, vram_budget_bytes=budget * GB)
    known = predict(corrected, plan.resident, ring_bytes=plan.ring_bytes).step_s
    assert known == pytest.approx(real_s(plan), rel=1e-3)
    assert again.prediction.step_s == pytest.approx(real_s(again), rel=0.1)


def test_what_does_not_fit_is_refused_with_what_it_needs():
    with pytest.raises(RequestError, match=r"needs 3.69 GB, 3.00 GB of it"):
        plan_residency(qwen(), vram_budget_bytes=3 * GB)
    with pytest.raises(RequestError, match=r"20.00 GB of host memory.*take 40.81 GB"):
        plan_residency(qwen(), vram_budget_bytes=9 * GB, ram_budget_bytes=20 * GB)


def test_the_line_for_people():
    line = plan_residency(qwen(), vram_budget_bytes=12 * GB, pin_budget_bytes=28 * GB).describe()
    assert line.startswith("keeps ") and " of 60 blocks, streams " in line
    assert "(28.0 pinned), about " in line and line.endswith("link-bound")
