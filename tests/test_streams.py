"""Random streams: fixed by their name, all different, statistically sane, and never leaking."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pfed.streams import rng, torch_rng, torch_scope

NAMES: list[tuple[int, str, tuple[int | str, ...]]] = [
    (0, "init", ()),
    (1, "init", ()),
    (0, "partition", ()),
    (0, "init", (1,)),
    (0, "init", ("1",)),
    (0, "init", (1, 2)),
    (0, "init", (12,)),
    (0, "init", (2, 1)),
    (0, "init", ("1, 2",)),
    (0, "init", (2**32 + 1,)),
    (0, "init", (2**64 + 1,)),
    (-1, "init", ()),
]


def test_the_name_alone_fixes_the_stream():
    assert rng(3, "batch_order", 7, "head").random(5).tolist() == rng(3, "batch_order", 7, "head").random(5).tolist()
    a, b = (torch.rand(5, generator=torch_rng(3, "dropout", 7)) for _ in range(2))
    assert torch.equal(a, b)


def test_streams_are_the_same_on_every_machine_and_in_every_release():
    assert rng(0, "init").integers(0, 1000, 4).tolist() == [723, 52, 978, 284]
    assert torch.randint(1000, (4,), generator=torch_rng(0, "init")).tolist() == [728, 255, 727, 470]


def test_different_names_give_different_streams():
    numpy_draws = {tuple(rng(seed, purpose, *key).integers(0, 2**32, 4)) for seed, purpose, key in NAMES}
    torch_draws = {
        tuple(torch.randint(2**31, (4,), generator=torch_rng(seed, purpose, *key)).tolist())
        for seed, purpose, key in NAMES
    }
    assert len(numpy_draws) == len(torch_draws) == len(NAMES)


def test_numpy_integers_name_the_same_stream_as_python_ones():
    assert rng(0, "init", int(np.int64(5))).random() == rng(0, "init", np.int64(5)).random()  # type: ignore[arg-type]


def test_torch_runs_a_mersenne_twister_on_the_624_words_of_the_numpy_stream():
    """NumPy's own MT19937, given the same words, must produce what torch produces."""
    words = rng(4, "gumbel", 1).integers(0, 2**32, 624, dtype=np.uint64)
    reference = np.random.MT19937()
    reference.state = {"bit_generator": "MT19937", "state": {"key": words.astype(np.uint32), "pos": 624}}
    drawn = torch.randint(2**16, (2000,), generator=torch_rng(4, "gumbel", 1))
    assert drawn.tolist() == (reference.random_raw(2000) % 2**16).tolist()


def test_torch_draws_have_the_right_moments():
    """Uniform: mean 1/2, variance 1/12. Normal: 0, 1. The bounds are about five standard errors of 100,000 draws."""
    generator = torch_rng(0, "batch_order", 1, 2)
    uniform, normal = torch.rand(100_000, generator=generator), torch.randn(100_000, generator=generator)
    assert uniform.mean().item() == pytest.approx(0.5, abs=5e-3)
    assert uniform.var().item() == pytest.approx(1 / 12, abs=2e-3)
    assert normal.mean().item() == pytest.approx(0, abs=0.016)
    assert normal.var().item() == pytest.approx(1, abs=0.025)


def test_streams_of_neighbouring_keys_are_uncorrelated():
    draws = np.stack([torch.rand(10_000, generator=torch_rng(0, "batch_order", k)).numpy() for k in range(6)])
    off_diagonal = np.corrcoef(draws)[~np.eye(6, dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.05


def test_a_scope_uses_its_stream_and_leaves_no_trace():
    torch.manual_seed(11)
    torch.randn(3)  # leaves a cached normal behind: it must come back too
    before = torch.get_rng_state()
    with torch_scope(0, "dropout", 2):
        inside = torch.rand(4)
    assert torch.equal(inside, torch.rand(4, generator=torch_rng(0, "dropout", 2)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_scope_restores_after_an_exception_and_nests():
    before = torch.get_rng_state()
    with pytest.raises(TypeError), torch_scope(0, "init"):
        torch.rand(1) + None
    assert torch.equal(torch.get_rng_state(), before)
    with torch_scope(0, "init"):
        first = torch.rand(1)
        with torch_scope(0, "dropout"):
            torch.rand(5)
        second = torch.rand(1)
    assert torch.equal(torch.cat([first, second]), torch.rand(2, generator=torch_rng(0, "init")))
