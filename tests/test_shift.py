"""Feature shifts: deterministic, bounded, different from client to client; label permutations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfed.data.shift import CYCLE, label_permutations, permute_labels, plan, shift_images
from pfed.errors import UserError

KINDS = ("mixed", "rotation", "inversion", "colour", "noise", "blur")


def images(n: int = 3, channels: int = 1, size: tuple[int, int] = (8, 8), uint8: bool = True) -> torch.Tensor:
    x = torch.rand(n, channels, *size, generator=torch.Generator().manual_seed(0))
    return (x * 255).to(torch.uint8) if uint8 else x


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 12),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
    st.sampled_from([(8, 8), (5, 9)]),
)
def test_every_shift_keeps_shape_type_and_range_and_repeats_itself(kind, client, channels, uint8, size):
    x = images(4, channels, size, uint8)
    before = x.clone()
    once, twice = (shift_images(x, kind, client, 13, seed=5) for _ in range(2))
    assert torch.equal(once, twice)
    assert torch.equal(x, before)
    assert once.shape == x.shape
    assert once.dtype == x.dtype
    assert once.min() >= 0
    assert once.max() <= (255 if uint8 else 1)
    assert torch.equal(once, x) == (plan(kind, client, 13)[1] == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_client_0_sees_the_original_and_one_client_alone_too(kind):
    x = images()
    for clients in (1, 7):
        seen = shift_images(x, kind, 0, clients, seed=0)
        assert torch.equal(seen, x)
        assert seen.data_ptr() != x.data_ptr()


def test_the_plan_of_each_kind():
    assert [plan("rotation", k, 4)[1] * 360 for k in range(4)] == [0, 90, 180, 270]
    assert [plan("inversion", k, 4)[1] for k in range(4)] == [0, 1, 0, 1]
    assert [plan("noise", k, 5)[1] for k in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    mixed = [plan("mixed", k, 12) for k in range(12)]
    assert [name for name, _ in mixed] == 2 * list(CYCLE)
    assert [strength for _, strength in mixed] == [0, 1 / 3, 1, 0.5, 0.5, 0.5, 0, 2 / 3, 1, 1, 1, 1]


def test_quarter_turns_are_exact_and_other_angles_turn_the_same_way():
    x = images(1, 1, (9, 9), uint8=False)
    assert torch.equal(shift_images(x, "rotation", 1, 4, seed=0), torch.rot90(x, 1, (2, 3)))
    nearly = shift_images(x, "rotation", 2501, 10_000, seed=0)  # 90.036 degrees
    assert (nearly - torch.rot90(x, 1, (2, 3)))[..., 1:-1, 1:-1].abs().max() < 0.02


def test_rotation_of_a_wide_image_keeps_distances():
    """A dot 3 pixels right of the centre of a 9 x 15 image lies 3 pixels above it after (nearly) a quarter turn."""
    x = torch.zeros(1, 1, 9, 15)
    x[0, 0, 4, 10] = 1
    turned = shift_images(x, "rotation", 2501, 10_000, seed=0)
    assert divmod(int(turned.argmax()), 15) == (1, 7)


def test_inversion_is_exact_for_every_grey_value():
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(shift_images(x, "inversion", 1, 2, seed=0), 255 - x)


def test_noise_has_the_planned_deviation_and_its_own_draw_per_client_and_seed():
    x = torch.full((50, 1, 20, 20), 0.5)
    for client, sigma in ((1, 0.075), (2, 0.15)):
        noisy = shift_images(x, "noise", client, 5, seed=0) - x
        assert float(noisy.std()) == pytest.approx(sigma, rel=0.03)
        assert float(noisy.mean()) == pytest.approx(0, abs=0.005)
    draws = [shift_images(x, "mixed", client, 24, seed) - x for client, seed in ((4, 0), (10, 0), (4, 1))]
    a, b, c = (d.flatten() for d in draws)
    assert abs(float(torch.corrcoef(torch.stack([a, b, c]))[0, 1:].abs().max())) < 0.05


def test_blur_spreads_a_dot_as_a_gaussian():
    """A dot keeps its sum; its variance in each direction is sigma² = 1.5² (a little less: cut at 3 sigma)."""
    x = torch.zeros(1, 2, 21, 21)
    x[0, :, 10, 10] = 1
    blurred = shift_images(x, "blur", 1, 2, seed=0)
    position = torch.arange(21.0) - 10
    for channel in blurred[0]:
        assert float(channel.sum()) == pytest.approx(1, abs=1e-5)
        assert float(channel.sum(0) @ position**2) == pytest.approx(2.25, rel=0.05)
        assert torch.allclose(channel, channel.T, atol=1e-6)


def test_colour_changes_grey_by_a_tint_only_of_up_to_half():
    grey = torch.full((1, 3, 2, 2), 0.8)
    seen = torch.stack([shift_images(grey, "colour", 2, 3, seed)[0, :, 0, 0] for seed in range(30)])
    assert 0.4 - 1e-6 <= float(seen.min()) < 0.42
    assert 0.78 < float(seen.max()) <= 0.8 + 1e-6


def test_clients_have_colours_of_their_own():
    """Clients 1 and 2 of 3 have half and full strength: with one common draw, tints would be in proportion 1 to 2."""
    grey = torch.full((1, 3, 2, 2), 0.8)
    half, full = (0.8 - shift_images(grey, "colour", client, 3, seed=0)[0, :, 0, 0] for client in (1, 2))
    assert not torch.allclose(2 * half, full, atol=0.02)


def test_colour_of_grey_images_keeps_the_order_of_brightness():
    ramp = torch.linspace(0, 1, 50).view(1, 1, 5, 10)
    for client in (1, 2, 3):
        seen = shift_images(ramp, "colour", client, 4, seed=0).flatten()
        assert torch.all(seen.diff() > 0)
        assert not torch.allclose(seen, ramp.flatten(), atol=0.02)


def test_what_is_no_image_is_refused():
    with pytest.raises(UserError, match=r"needs images \(channels, height, width\). Got samples of shape \(64,\)"):
        shift_images(torch.zeros(5, 64), "blur", 1, 2, seed=0)
    with pytest.raises(UserError, match=r"pixels in \[0, 1\] \(or uint8\). Got 0 to 16."):
        shift_images(torch.linspace(0, 16, 16).view(1, 1, 4, 4), "blur", 1, 2, seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_without_samples(kind):
    assert shift_images(images(0), kind, 1, 3, seed=0).shape == (0, 1, 8, 8)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(st.integers(1, 6), st.integers(3, 30), st.integers(0, 99))
def test_permutations_are_bijections_all_different_and_the_first_is_the_identity(groups, classes, seed):
    table = label_permutations(groups, classes, seed)
    assert table.shape == (groups, classes)
    assert table[0].tolist() == list(range(classes))
    assert all(sorted(row) == list(range(classes)) for row in table.tolist())
    assert len(set(map(tuple, table.tolist()))) == groups
    assert np.array_equal(table, label_permutations(groups, classes, seed))


def test_two_classes_have_two_orders_and_no_third():
    assert label_permutations(2, 2, seed=0).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(UserError, match=r"groups must be <= 2, the number of orders of 2 classes. Got 3."):
        label_permutations(3, 2, seed=0)


def test_permute_labels_and_back():
    permutation = label_permutations(2, 9, seed=0)[1]
    y = torch.arange(9)
    seen = permute_labels(y, permutation)
    assert seen.tolist() == permutation.tolist()
    assert torch.equal(permute_labels(seen, np.argsort(permutation)), y)
    assert math.isclose(float(seen.float().mean()), 4)
