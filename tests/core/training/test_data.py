"""Pairing, order and noise: each a function of the inputs and the seed alone."""

from __future__ import annotations

import pytest
import torch
from comfyui_ferry.core.errors import RequestError
from comfyui_ferry.core.training import Sample, SampleOrder, draw_batches, pair_samples


def latents(count, *shape):
    return [torch.full((1, *(shape or (2, 3))), float(index)) for index in range(count)]


def test_each_latent_has_its_own_caption():
    samples = pair_samples(latents(3), ["a", "b", "c"])
    assert [(float(sample.latent.mean()), sample.condition) for sample in samples] == [
        (0.0, "a"),
        (1.0, "b"),
        (2.0, "c"),
    ]


def test_one_caption_is_shared():
    assert [sample.condition for sample in pair_samples(latents(3), ["a"])] == ["a"] * 3


@pytest.mark.parametrize("captions", [2, 4])
def test_any_other_count_is_refused_with_both_numbers(captions):
    with pytest.raises(RequestError, match=f"3 latents and {captions} captions"):
        pair_samples(latents(3), ["x"] * captions)


def test_nothing_to_learn_is_refused():
    with pytest.raises(RequestError, match="0 latents"):
        pair_samples([], ["a"])
    with pytest.raises(RequestError, match="0 captions"):
        pair_samples(latents(1), [])
    with pytest.raises(RequestError, match="is empty"):
        pair_samples([torch.empty(1, 4, 0)], ["a"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_latent_that_is_not_finite_is_refused(bad):
    broken = latents(2)
    broken[1][0, 1, 2] = bad
    with pytest.raises(RequestError, match=r"latent 1 .* has 1 NaN or infinite"):
        pair_samples(broken, ["a"])


def test_every_epoch_shows_every_sample_once_in_another_order():
    order = SampleOrder([None] * 7, batch_size=7, seed=5)
    epochs = [order.indices(step) for step in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_can_be_continued_anywhere():
    whole = SampleOrder([None] * 5, batch_size=3, seed=1)
    expected = [whole.indices(step) for step in range(10)]
    assert SampleOrder([None] * 5, batch_size=3, seed=1).indices(7) == expected[7]
    assert [SampleOrder([None] * 5, batch_size=3, seed=2).indices(step) for step in range(10)] != expected


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_a_batch_is_of_one_bucket_and_every_sample_gets_its_share(batch_size):
    buckets = ["wide", "tall", "wide", "square", "wide", "tall", "wide"]
    order = SampleOrder(buckets, batch_size=batch_size, seed=1)
    steps = 7 * batch_size
    batches = [order.indices(step) for step in range(steps)]
    assert all(len(batch) == batch_size for batch in batches)
    assert all(len({buckets[index] for index in batch}) == 1 for batch in batches)
    counts = torch.bincount(torch.tensor([index for batch in batches for index in batch]), minlength=7)
    # `batch_size**2` epochs of the set: a whole number for each bucket, so nobody is short.
    assert counts.tolist() == [batch_size**2] * 7
    assert len({tuple(sorted(batch)) for batch in batches}) > 1
    assert SampleOrder(buckets, batch_size=batch_size, seed=1).indices(steps - 2) == batches[-2]


def test_captions_are_dropped_at_the_rate_and_by_the_seed_alone():
    samples = [Sample(torch.zeros(1, 1), "caption", "", 0.25)] * 4000
    conditions = draw_batches(samples, seed=0, micro_step=0)[0].conditions
    # Four standard deviations of the mean of 4000 draws are 0.027.
    assert abs(conditions.count("") / 4000 - 0.25) < 0.03
    assert draw_batches(samples, seed=0, micro_step=0)[0].conditions == conditions
    assert draw_batches(samples, seed=0, micro_step=1)[0].conditions != conditions
    undisturbed = draw_batches([Sample(torch.zeros(1, 1), "caption")] * 4000, seed=0, micro_step=0)[0]
    assert torch.equal(undisturbed.noise, draw_batches(samples, seed=0, micro_step=0)[0].noise)


def test_noise_depends_on_seed_and_step_only():
    samples = [Sample(latent, index) for index, latent in enumerate(latents(2, 4, 8, 8))]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw_batches(samples, seed=3, micro_step=4)[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    again = draw_batches(samples, seed=3, micro_step=4)[0]
    assert torch.equal(first.noise, again.noise)
    assert torch.equal(first.positions, again.positions)
    for other in (draw_batches(samples, seed=3, micro_step=5), draw_batches(samples, seed=4, micro_step=4)):
        assert not torch.equal(first.noise, other[0].noise)
    assert not torch.equal(first.noise[0], first.noise[1])


def test_samples_of_one_shape_share_a_batch():
    shapes = [(4, 8, 8), (4, 6, 10), (4, 8, 8)]
    samples = [Sample(torch.full((1, *shape), float(index)), index) for index, shape in enumerate(shapes)]
    batches = draw_batches(samples, seed=0, micro_step=0)
    assert [(tuple(batch.clean.shape), batch.conditions) for batch in batches] == [
        ((2, 4, 8, 8), [0, 2]),
        ((1, 4, 6, 10), [1]),
    ]
    assert all(float(batches[0].clean[row].mean()) == sample for row, sample in enumerate((0, 2)))


def test_noise_levels_stay_off_both_ends():
    samples = [Sample(torch.zeros(1, 1), None)] * 5000
    positions = draw_batches(samples, seed=0, micro_step=0)[0].positions
    assert 1e-3 <= float(positions.min()) < 0.01
    assert 0.99 < float(positions.max()) <= 1 - 1e-3
    assert abs(float(positions.mean()) - 0.5) < 0.02
