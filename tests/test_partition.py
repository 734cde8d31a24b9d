"""Partitions: what each rule promises, by hand on small cases and by invariant on drawn ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfed.data import partition
from pfed.data.partition import Parts
from pfed.errors import UserError

FEW = settings(deadline=None, max_examples=25, derandomize=True)


def labels(classes: int, each: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), each))


def assert_deals_all(rows: list[np.ndarray], n: int) -> None:
    assert sorted(np.concatenate(rows).tolist()) == list(range(n))


class TestClasses:
    def test_one_class_each_by_hand(self):
        """2 clients x 1 class, 2 classes: q = 1 * 2 / 2 = 1 shard, so each client has all samples of one class."""
        train, test = np.array([3, 7, 3, 7, 7]), np.array([7, 3] * 100)  # labels may have gaps
        parts = partition.classes(train, test, clients=2, per_client=1, seed=0)
        assert {tuple(rows) for rows in parts.train} == {(0, 2), (1, 3, 4)}
        for rows, tested in zip(parts.train, parts.test, strict=True):
            assert set(train[rows]) == set(test[tested])
            assert len(tested) == 100

    def test_shards_are_stretches_in_data_set_order_and_the_first_take_the_remainder(self):
        """One class of 5 for 2 clients: q = 2 shards, rows 0-2 and 3-4."""
        parts = partition.classes(np.zeros(5, dtype=int), np.zeros(1, dtype=int), clients=2, per_client=1, seed=0)
        assert {tuple(rows) for rows in parts.train} == {(0, 1, 2), (3, 4)}

    @FEW
    @given(st.sampled_from([(10, 2), (20, 2), (20, 5), (5, 4), (30, 10), (10, 1)]), st.booleans(), st.integers(0, 99))
    def test_promises(self, shape, distinct, seed):
        clients, per_client = shape
        train, test = labels(10, 63), labels(10, 301, 1)
        parts = partition.classes(train, test, clients, per_client, seed, distinct=distinct)
        assert_deals_all(parts.train, len(train))
        if len(test) >= 100 * clients:
            assert_deals_all(parts.test, len(test))
        for rows, tested in zip(parts.train, parts.test, strict=True):
            held = set(train[rows])
            assert len(held) == per_client if distinct else len(held) <= per_client
            assert set(test[tested]) == held

    def test_few_test_samples_are_shared(self):
        train, test = labels(10, 20), labels(10, 30)
        parts = partition.classes(train, test, clients=10, per_client=2, seed=0)
        for rows, tested in zip(parts.train, parts.test, strict=True):
            assert len(tested) == 30 * len(set(train[rows]))
        assert any("shared" in note for note in parts.notes)

    def test_clients_with_one_class_are_counted(self):
        train, test = labels(10, 500), labels(10, 1000)
        parts = partition.classes(train, test, clients=100, per_client=2, seed=0)
        alone = sum(len(set(train[rows])) == 1 for rows in parts.train)
        assert 2 <= alone <= 20  # about 10 of 100 by chance
        assert parts.notes == (f"{alone} of 100 clients hold one class only, which is trivially right for them",)
        assert partition.classes(train, test, 100, 2, seed=0, distinct=True).notes == ()

    def test_rows_of_the_papers_rule_repeat_classes(self):
        """N = 100, s = C = 10: a row of 10 draws names about 10 * (1 - 0.9^10) = 6.5 distinct classes."""
        train = labels(10, 500)
        parts = partition.classes(train, train, clients=100, per_client=10, seed=0)
        assert np.mean([len(set(train[rows])) for rows in parts.train]) == pytest.approx(6.5, abs=0.4)

    @pytest.mark.parametrize(
        ("clients", "per_client", "sentence"),
        [
            (15, 3, "multiple of the number of classes (10). Got 3 * 15; classes_per_client 2 or clients 10 would"),
            (25, 7, "Got 7 * 25; classes_per_client 6 or clients 20 would work"),
            (16, 3, "Got 3 * 16; classes_per_client 5 or clients 20 would work"),
            (7, 3, "Got 3 * 7; classes_per_client 10 or clients 10 would work"),
            (20, 11, "classes_per_client must be <= 10, the number of classes. Got 11."),
            (
                1000,
                2,
                "into 200 shards (classes_per_client * clients / classes), but the smallest class has 40 training",
            ),
            (1000, 2, "; 200 clients would fit."),
        ],
    )
    def test_impossible_requests_name_what_would_work(self, clients, per_client, sentence):
        with pytest.raises(UserError) as error:
            partition.classes(labels(10, 40), labels(10, 40), clients, per_client, seed=0)
        assert sentence in str(error.value)

    @FEW
    @given(st.integers(2, 40), st.integers(1, 60), st.integers(1, 40))
    def test_what_the_error_names_does_work(self, n_classes, clients, per_client):
        if per_client > n_classes or clients * per_client % n_classes == 0:
            return
        with pytest.raises(UserError) as error:
            partition._shards_per_class(n_classes, clients, per_client)
        words = str(error.value).replace(";", "").split()
        near_s, near_n = int(words[words.index("or") - 1]), int(words[words.index("would") - 1])
        assert partition._shards_per_class(n_classes, clients, near_s) >= 1
        assert partition._shards_per_class(n_classes, near_n, per_client) >= 1


class TestDirichlet:
    @FEW
    @given(st.sampled_from([0.05, 0.5, 100.0]), st.booleans(), st.integers(0, 99))
    def test_promises(self, alpha, cap, seed):
        train, test = labels(7, 60), labels(9, 20, 1)  # two classes have no training data
        parts = partition.dirichlet(train, test, 5, alpha, seed, balance_cap=cap, min_size=5)
        assert_deals_all(parts.train, len(train))
        assert_deals_all(parts.test, len(test))
        assert min(map(len, parts.train)) >= 5

    def test_test_proportions_are_those_of_training(self):
        train, test = labels(5, 1000), labels(5, 500, 1)
        parts = partition.dirichlet(train, test, 4, 0.5, seed=0)
        for rows, tested in zip(parts.train, parts.test, strict=True):
            difference = np.bincount(train[rows], minlength=5) - 2 * np.bincount(test[tested], minlength=5)
            assert np.abs(difference).max() <= 3  # floors only

    def test_alpha_is_the_concentration(self):
        """One client's share of a class has variance (1/N)(1-1/N)/(alpha N + 1): N = 4, alpha = 1: 0.0375."""
        train = labels(100, 200)
        parts = partition.dirichlet(train, train, 4, 1.0, seed=0, balance_cap=False)
        shares = np.stack([np.bincount(train[rows], minlength=100) for rows in parts.train]) / 200
        assert shares.var() == pytest.approx(0.0375, rel=0.25)

    def test_the_cap_stops_clients_at_their_fair_share(self):
        """Classes of 10 samples, fair share 100: whoever has 100 gets nothing more, so nobody has over 109."""
        train = labels(40, 10)
        capped = partition.dirichlet(train, train, 4, 0.5, seed=0)
        plain = partition.dirichlet(train, train, 4, 0.5, seed=0, balance_cap=False)
        assert max(map(len, capped.train)) <= 109 < max(map(len, plain.train))

    def test_min_size_that_cannot_be_met_is_one_sentence(self):
        with pytest.raises(
            UserError, match=r"20 training samples are too few for 3 clients \(min_size = 10 each\); 2 "
        ):
            partition.dirichlet(labels(2, 10), labels(2, 10), 3, 0.5, seed=0)
        with pytest.raises(UserError, match=r"No draw of Dirichlet\(alpha=0.01\) over 20 .* larger alpha would work"):
            partition.dirichlet(labels(2, 150), labels(2, 10), 20, 0.01, seed=0)

    def test_the_min_size_it_names_does_work(self):
        train = labels(10, 30)
        with pytest.raises(UserError) as error:
            partition.dirichlet(train, train, 20, 0.5, seed=0, min_size=15)
        words = str(error.value).split()
        best = int(words[words.index("or") - 1])
        assert 1 <= best < 15
        partition.dirichlet(train, train, 20, 0.5, seed=0, min_size=best)


class TestEvenDeals:
    @FEW
    @given(st.integers(1, 30), st.lists(st.integers(0, 4), min_size=30, max_size=80), st.integers(0, 99))
    def test_iid_differs_by_at_most_one_in_size_and_in_every_class(self, clients, drawn, seed):
        train = np.array(drawn)
        parts = partition.iid(train, train[:7], clients, seed)
        assert_deals_all(parts.train, len(train))
        assert_deals_all(parts.test, 7)
        counts = np.stack([np.bincount(train[rows], minlength=5) for rows in parts.train])
        assert np.ptp(counts, axis=0).max() <= 1
        assert np.ptp(counts.sum(1)) <= 1

    def test_more_clients_than_samples(self):
        with pytest.raises(
            UserError, match=r"^20 training samples are too few for 21 clients \(one each\); 20 clients"
        ):
            partition.iid(labels(2, 10), labels(2, 10), 21, seed=0)

    def test_concept_and_feature_are_the_iid_deal(self):
        train = labels(3, 20)
        deal = partition.iid(train, train, 4, seed=3)
        for other in (partition.concept(train, train, 4, 2, seed=3), partition.feature(train, train, 4, seed=3)):
            assert all(map(np.array_equal, deal.train + deal.test, other.train + other.test))
            assert other.notes
        with pytest.raises(UserError, match=r"groups must be <= clients \(4\). Got 5."):
            partition.concept(train, train, 4, 5, seed=3)

    def test_replicated_gives_everything_to_everybody(self):
        """More clients than samples are no problem."""
        parts = partition.replicated(labels(2, 3), labels(2, 2), 8)
        assert [rows.tolist() for rows in parts.train] == [[0, 1, 2, 3, 4, 5]] * 8
        assert [rows.tolist() for rows in parts.test] == [[0, 1, 2, 3]] * 8
        assert parts.notes == ("every client holds all training samples",)

    @FEW
    @given(st.integers(1, 40), st.sampled_from([0.1, 1.0, 5.0]), st.integers(0, 99))
    def test_quantity_varies_sizes_and_keeps_the_class_mix(self, clients, sigma, seed):
        train, test = labels(4, 100), labels(4, 15)
        parts = partition.quantity(train, test, clients, sigma, seed)
        assert_deals_all(parts.train, 400)
        assert_deals_all(parts.test, 60)
        assert min(map(len, parts.train)) >= 1
        for rows in parts.train:
            assert np.ptp(np.bincount(train[rows], minlength=4)) <= 2

    def test_quantity_sizes_are_log_normal(self):
        sizes = [len(r) for r in partition.quantity(labels(2, 50_000), labels(2, 9), 400, 0.7, seed=0).train]
        assert np.log(sizes).std() == pytest.approx(0.7, rel=0.1)

    def test_apportion_by_hand(self):
        """10 for weights 1, 1, 2: one each, then 7 * (1/4, 1/4, 1/2) = 1.75, 1.75, 3.5: floors 1, 1, 3, and 2 left."""
        assert partition._apportion(10, np.array([1.0, 1.0, 2.0])).tolist() == [3, 3, 4]
        assert partition._apportion(2, np.array([1.0, 1.0, 2.0])).sum() == 2


class TestFemnist:
    def test_sizes_and_classes(self):
        """n = lognormal(4, 1) + 100: at least 100, median e^4 + 100 = 155; a third per class, a tenth for tests."""
        train, test = labels(10, 3600), labels(10, 400, 1)
        parts = partition.femnist(train, test, 150, seed=0)
        for u, (rows, tested) in enumerate(zip(parts.train, parts.test, strict=True)):
            assert set(train[rows]) == set(test[tested]) == {u % 10, (u + 1) % 10, (u + 2) % 10}
        totals = np.array([len(a) + len(b) for a, b in zip(parts.train, parts.test, strict=True)])
        assert totals.min() >= 98
        assert np.median(totals) == pytest.approx(155, rel=0.15)
        assert sum(map(len, parts.test)) / totals.sum() == pytest.approx(0.1, abs=0.02)
        assert_no_overlap(parts)
        assert parts.notes == ()

    def test_wrap_gives_each_client_the_next_slice_and_released_the_first(self):
        train, test = labels(10, 3600), labels(10, 400, 1)
        wrap = partition.femnist(train, test, 11, seed=0)
        released = partition.femnist(train, test, 11, seed=0, pointer="released")
        of_class = np.flatnonzero(train == 0)  # which clients 0, 8, 9 and 10 hold
        mine = [rows[train[rows] == 0].tolist() for rows in (wrap.train[k] for k in (0, 8, 9, 10))]
        assert [row for rows in mine for row in rows] == of_class[: sum(map(len, mine))].tolist()
        for rows in (released.train[k] for k in (0, 8, 9, 10)):
            held = rows[train[rows] == 0]
            assert held.tolist() == of_class[: len(held)].tolist()
        assert any("also held by an earlier client" in note for note in released.notes)

    def test_a_class_that_is_used_up_starts_again(self):
        """Slices of 4 out of 10: 0-3, 4-7, and then from the start, for 8-11 does not fit."""
        slices = partition._slices([np.arange(10)] * 3, np.array([4, 4, 4]), "wrap")
        assert [rows[:4].tolist() for rows in slices] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]

    @FEW
    @given(st.integers(9, 200), st.integers(1, 30), st.integers(3, 12), st.integers(0, 99))
    def test_small_data_scale_the_sizes(self, each, each_test, classes, seed):
        parts = partition.femnist(labels(classes, each), labels(classes, each_test), 20, seed)
        assert all(len(set(rows)) == len(rows) for rows in parts.train + parts.test)
        largest = max(map(len, parts.train))
        assert largest <= 3 * each
        assert any("scaled" in note for note in parts.notes) or largest >= 90

    def test_data_that_are_too_small_or_too_simple(self):
        with pytest.raises(UserError, match=r"at least 9 training samples .* Got 8 and 5 of the smallest."):
            partition.femnist(labels(10, 8), labels(10, 5), 5, seed=0)
        with pytest.raises(UserError, match="gives each client 3 classes, but the data have 2"):
            partition.femnist(labels(2, 80), labels(2, 80), 5, seed=0)


def assert_no_overlap(parts: Parts) -> None:
    for rows in (parts.train, parts.test):
        given_out = np.concatenate(rows)
        assert len(set(given_out)) == len(given_out)


class TestGroups:
    train, test = np.array([5, 2, 2, 5, 9, 7]), np.array([9, 5, 2, 2, 4])

    def test_one_group_per_client(self):
        parts = partition.domain(self.train, self.test)
        assert parts.groups == (2, 5, 7, 9)
        assert [rows.tolist() for rows in parts.train] == [[1, 2], [0, 3], [5], [4]]
        assert [rows.tolist() for rows in parts.test] == [[2, 3], [1], [], [0]]
        assert partition.natural(self.train, self.test, seed=0).groups == parts.groups

    def test_a_cap_takes_the_first_domains_but_random_users(self):
        assert partition.domain(self.train, self.test, 2).groups == (2, 5)
        many = np.arange(100)
        chosen = partition.natural(many, many, seed=0, clients=10).groups
        assert list(chosen) == sorted(set(chosen))
        assert len(chosen) == 10
        assert chosen != tuple(range(10))
        assert chosen != partition.natural(many, many, seed=1, clients=10).groups

    def test_too_many_clients(self):
        with pytest.raises(UserError, match=r"^clients must be <= 4, the number of groups in the data. Got 5.$"):
            partition.domain(self.train, self.test, 5)


@pytest.mark.parametrize(
    "rule",
    [
        lambda y, seed: partition.classes(y, y, 20, 2, seed),
        lambda y, seed: partition.classes(y, y, 20, 2, seed, distinct=True),
        lambda y, seed: partition.dirichlet(y, y, 5, 0.5, seed),
        lambda y, seed: partition.iid(y, y, 5, seed),
        lambda y, seed: partition.quantity(y, y, 5, 1.0, seed),
        lambda y, seed: partition.femnist(y, y, 5, seed),
    ],
)
def test_the_seed_decides(rule):
    a, b, c = (rule(labels(10, 200), seed) for seed in (1, 1, 2))
    for one, same, other in ((a.train, b.train, c.train), (a.test, b.test, c.test)):
        assert all(map(np.array_equal, one, same))
        assert not all(map(np.array_equal, one, other))


class TestChecks:
    """The checks that run at construction do find broken partitions."""

    train, test = np.array([0, 0, 1, 1]), np.array([0, 1])
    table = np.array([[0], [1]])
    good = Parts([np.array([0, 1]), np.array([2, 3])], [np.array([0]), np.array([1])])

    def test_a_good_one_passes(self):
        partition._check_deal("x", self.good, self.train, 2, 2)
        partition._check_classes(self.good, self.train, self.test, self.table, 1)

    @pytest.mark.parametrize(
        ("rows", "what"),
        [
            ([[0, 1], [2]], "lost or doubled"),
            ([[0, 1, 2], [2, 3]], "lost or doubled"),
            ([[0, 1, 2, 3], []], "fewer than 1"),
            ([[0, 1, 2, 3]], "wrong number of clients"),
        ],
    )
    def test_lost_doubled_and_empty(self, rows, what):
        broken = replace(self.good, train=[np.array(r, dtype=int) for r in rows])
        with pytest.raises(AssertionError, match=what):
            partition._check_deal("x", broken, self.train, 2)

    def test_lost_test_samples(self):
        with pytest.raises(AssertionError, match="a test sample is lost"):
            partition._check_deal("x", replace(self.good, test=[np.array([0]), np.array([0])]), self.train, 2, 2)

    def test_wrong_classes_and_sizes(self):
        mixed = replace(self.good, train=[np.array([0, 2]), np.array([1, 3])])
        with pytest.raises(AssertionError, match="differ from its row"):
            partition._check_classes(mixed, self.train, self.test, self.table, 1)
        swapped = replace(self.good, test=self.good.test[::-1])
        with pytest.raises(AssertionError, match="test classes differ"):
            partition._check_classes(swapped, self.train, self.test, self.table, 1)
        short = replace(self.good, train=[np.array([0]), np.array([2, 3])])
        with pytest.raises(AssertionError, match="size differs"):
            partition._check_classes(short, self.train, self.test, self.table, 1)

    def test_femnist(self):
        labels3 = np.array([0, 1, 2, 0])
        one = Parts([np.array([0, 1, 2])], [np.array([0, 1, 2])])
        partition._check_femnist(one, labels3, labels3, np.arange(3))
        with pytest.raises(AssertionError, match="differ in size"):
            partition._check_femnist(replace(one, train=[np.arange(4)]), labels3, labels3, np.arange(3))
        with pytest.raises(AssertionError, match="three neighbours"):
            partition._check_femnist(replace(one, test=[np.arange(2)]), labels3, labels3, np.arange(3))
