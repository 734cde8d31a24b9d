"""From a data set to a federation: every option's effect, what is kept apart, and the sentences for bad requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfed import Experiment
from pfed.config import SplitOptions
from pfed.data.base import ClientData, Dataset, Federation, Samples, pooled
from pfed.data.federate import describe, federate
from pfed.data.shift import label_permutations, shift_images
from pfed.errors import UserError


def dataset(n: int = 600, classes: int = 5, groups: int = 0, official: bool = False) -> Dataset:
    """Each image has its own row number as the first pixels, so that a sample can be traced."""
    order = np.random.default_rng(0).permutation(n)
    x = torch.zeros(n, 1, 4, 4, dtype=torch.uint8)
    x[:, 0, 0, 0], x[:, 0, 0, 1] = torch.arange(n) % 256, torch.arange(n) // 256
    return Dataset(
        name="toy",
        x=x,
        y=torch.from_numpy(order % classes),
        classes=tuple("abcdefghijklmnop"[:classes]),
        train=torch.arange(n - n // 4) if official else None,
        test=torch.arange(n - n // 4, n) if official else None,
        groups=torch.from_numpy(order // classes % groups) if groups else None,
        group_names=tuple(f"site {g}" for g in range(groups)),
        mean=(0.25,),
        std=(0.5,),
    )


def split(data: Dataset | None = None, seed: int = 0, **options: Any) -> Federation:
    return federate(data or dataset(), SplitOptions(**{"clients": 4, **options}), seed)


def rows(parts: list[Samples]) -> list[int]:
    return sorted(torch.cat([part.rows for part in parts]).tolist())


def same(a: Federation, b: Federation) -> bool:
    return all(
        torch.equal(one.train.rows, other.train.rows) and torch.equal(one.test.rows, other.test.rows)
        for one, other in zip(a.clients, b.clients, strict=True)
    )


class TestApart:
    @settings(deadline=None, max_examples=25, derandomize=True)
    @given(
        st.sampled_from(
            [
                *("iid", "replicated", "classes", "dirichlet", "quantity"),
                *("femnist", "domain", "natural", "concept", "feature"),
            ]
        ),
        st.sampled_from([0.0, 0.2]),
        st.sampled_from([0.0, 0.1]),
        st.booleans(),
        st.integers(0, 9),
    )
    def test_training_validation_public_and_test_never_meet(self, kind, validation, public, official, seed):
        data = dataset(groups=4, official=official)
        extra = {"classes": {"classes_per_client": 5}, "dirichlet": {"alpha": 0.5}}.get(kind, {})
        fed = split(data, seed, partition=kind, validation=validation, public=public, **extra)
        trained = rows([client.train for client in fed.clients])
        kept = [part for part in (*(client.validation for client in fed.clients), fed.public) if part is not None]
        apart = rows(kept) if kept else []
        tested = rows([fed.test])
        assert not set(tested) & {*trained, *apart}
        assert {row for client in fed.clients for row in client.test.rows.tolist()} <= set(tested)
        if kind == "replicated":  # whose clients all hold the same samples
            trained, apart = sorted(set(trained)), sorted(set(apart))
        if kind != "femnist":  # whose clients may hold the same sample
            assert sorted(trained + apart + tested) == list(range(600))

    def test_the_official_split_is_kept(self):
        fed = split(dataset(official=True))
        assert rows([fed.test]) == list(range(450, 600))
        assert rows([c.test for c in fed.clients]) == list(range(450, 600))
        assert not any("official" in note for note in fed.notes)

    def test_training_rows_are_the_rest_where_only_the_test_set_is_given(self):
        fed = split(replace(dataset(official=True), train=None))
        assert rows([c.train for c in fed.clients]) == list(range(450))

    def test_a_missing_test_set_is_made_stratified_and_does_not_depend_on_the_partition(self):
        data = dataset(groups=3)
        fed, other = split(data, test_fraction=0.1), split(data, test_fraction=0.1, alpha=0.5)
        assert rows([fed.test]) == rows([other.test])
        assert fed.test.counts(5).tolist() == [12] * 5
        groups = data.groups[fed.test.rows].bincount()
        assert groups.max() - groups.min() <= 3
        assert fed.notes == ("no official test set: 10% of the samples were set apart for testing",)
        assert rows([split(data, 1, test_fraction=0.1).test]) != rows([fed.test])

    def test_the_public_set_is_a_stratified_share_of_training_and_the_same_for_all_splits(self):
        fed, other = split(public=0.25), split(public=0.25, clients=7, alpha=1.0)
        assert fed.public is not None
        assert other.public is not None
        assert fed.public.counts(5).tolist() == [24] * 5  # a quarter of 480 / 5
        assert torch.equal(fed.public.rows, other.public.rows)
        assert split().public is None

    def test_the_public_set_may_stay_in_training(self):
        fed, apart, whole = split(public=0.25, public_in_train=True), split(public=0.25), split()
        assert fed.public is not None
        assert apart.public is not None
        assert torch.equal(fed.public.rows, apart.public.rows)
        assert set(rows([fed.public])) <= set(rows([c.train for c in fed.clients]))
        assert same(fed, whole)
        assert not set(rows([apart.public])) & set(rows([c.train for c in apart.clients]))
        assert "the public set is part of the training samples too" in fed.notes
        assert not any("public" in note for note in apart.notes)

    def test_validation_is_a_stratified_share_of_each_client(self):
        fed = split(validation=0.25)
        for client in fed.clients:
            assert client.validation is not None
            assert client.validation.counts(5).tolist() == [6] * 5
            assert client.train.counts(5).tolist() == [18] * 5
        assert all(client.validation is None for client in split().clients)

    def test_a_cap_takes_evenly_from_a_clients_classes_and_leaves_its_test_data(self):
        whole, capped = split(partition="iid"), split(partition="iid", train_cap=20)
        assert [len(client.train) for client in capped.clients] == [20] * 4
        for client, before in zip(capped.clients, whole.clients, strict=True):
            assert set(client.train.rows.tolist()) < set(before.train.rows.tolist())
            assert client.train.counts(5).tolist() == [4] * 5
            assert torch.equal(client.test.rows, before.test.rows)
        assert same(whole, split(partition="iid", train_cap=10_000))
        copies = split(partition="replicated", train_cap=30, validation=0.1).clients
        assert all(torch.equal(copies[0].train.rows, other.train.rows) for other in copies[1:])

    def test_a_client_with_one_sample_keeps_it(self):
        fed = split(dataset(n=30), clients=24, validation=0.5)
        assert [len(client.train) for client in fed.clients] == [1] * 24
        assert [len(client.validation or ()) for client in fed.clients] == [0] * 24

    def test_some_samples_stay_whatever_the_share(self):
        fed = split(dataset(n=30), clients=12, validation=0.99)
        assert [(len(client.train), len(client.validation or ())) for client in fed.clients] == [(1, 1)] * 12


class TestPartitions:
    def test_auto_follows_the_options_given(self):
        assert same(split(), split(partition="iid"))
        assert same(split(classes_per_client=5), split(partition="classes", classes_per_client=5))
        assert same(split(alpha=0.5), split(partition="dirichlet", alpha=0.5))
        assert not same(split(), split(alpha=0.5))

    def test_auto_makes_a_client_of_each_domain_unless_told_otherwise(self):
        data = replace(dataset(groups=4), domains=True)
        assert same(split(data), split(data, partition="domain"))
        assert [client.name for client in split(data).clients] == [f"site {g}" for g in range(4)]
        assert same(split(data, alpha=0.5), split(data, partition="dirichlet", alpha=0.5))
        assert same(split(data, classes_per_client=5), split(data, partition="classes", classes_per_client=5))
        assert not same(split(data), split(data, partition="iid"))
        other = replace(data, domains=False)  # such as writers
        assert same(split(other), split(data, partition="iid"))

    def test_central_training_has_each_sample_once(self):
        copies, divided = (pooled(split(partition=kind)) for kind in ("replicated", "iid"))
        assert copies.train.rows.tolist() == sorted(divided.train.rows.tolist())
        assert copies.test.rows.tolist() == sorted(divided.test.rows.tolist())

    def test_replicated_gives_every_client_all_samples_and_the_same_validation_set(self):
        fed = split(dataset(official=True), partition="replicated", clients=3, validation=0.2)
        assert len(fed.clients) == 3
        for client in fed.clients:
            assert client.validation is not None
            assert rows([client.train, client.validation]) == list(range(450))
            assert rows([client.test]) == list(range(450, 600))
        assert len({tuple(client.train.rows.tolist()) for client in fed.clients}) == 1
        assert fed.notes == ("every client holds all training samples",)

    def test_the_seed_decides(self):
        data = dataset(official=True)
        assert same(split(data, seed=3), split(data, seed=3))
        assert not same(split(data, seed=3), split(data, seed=4))

    def test_options_reach_their_partition(self):
        def held(fed: Federation) -> list[int]:
            return [int((client.train.counts(5) > 0).sum()) for client in fed.clients]

        assert held(split(clients=15, classes_per_client=2, distinct_classes=True)) == [2] * 15
        assert held(split(clients=15, classes_per_client=2)) != [2] * 15
        assert not same(split(alpha=0.3), split(alpha=0.3, balance_cap=False))
        assert min(describe(split(alpha=0.3, min_size=100))["sizes"]) >= 100 > min(describe(split(alpha=0.3))["sizes"])
        skews = [describe(split(partition="quantity", sigma=sigma))["quantity_skew"] for sigma in (0.1, 1.0)]
        assert skews[0] < 0.2 < skews[1]
        assert not same(split(partition="femnist"), split(partition="femnist", femnist_pointer="released"))

    def test_dirichlet_is_tested_on_the_whole_test_set_and_others_on_their_like(self):
        fed = split(alpha=0.5)
        assert all(torch.equal(client.test.rows, fed.test.rows) for client in fed.clients)
        matched = split(alpha=0.5, test_split="matched")
        assert rows([c.test for c in matched.clients]) == rows([fed.test])
        assert rows([c.test for c in split().clients]) == rows([fed.test])
        assert all(len(client.test) == len(fed.test) for client in split(test_split="global").clients)

    def test_all_clients_share_one_pool_and_its_normalisation(self):
        data = dataset()
        fed = split(data, public=0.1, validation=0.1)
        parts = [fed.test, fed.public, *(p for c in fed.clients for p in (c.train, c.test, c.validation))]
        assert all(part is not None and part.x is data.x and part.y is data.y for part in parts)
        assert all(part is not None and (part.mean, part.std) == ((0.25,), (0.5,)) for part in parts)
        assert [client.name for client in fed.clients] == [f"client-{k}" for k in range(4)]
        assert (fed.source, fed.classes) == ("toy", ("a", "b", "c", "d", "e"))

    def test_clients_without_test_samples_are_counted(self):
        fed = split(dataset(n=40), clients=10)
        assert any(note == "2 of 10 clients have no test samples" for note in fed.notes)


class TestGroups:
    def test_each_client_is_a_group_with_its_name(self):
        data = dataset(groups=3)
        for clients in (20, 3):  # the default, and the number of groups
            fed = split(data, partition="domain", clients=clients)
            assert [client.name for client in fed.clients] == ["site 0", "site 1", "site 2"]
            for g, client in enumerate(fed.clients):
                assert set(data.groups[torch.cat([client.train.rows, client.test.rows])].tolist()) == {g}
            assert fed.external is None

    def test_domains_left_out_are_external(self):
        data = dataset(groups=4)
        fed = split(data, partition="domain", clients=3)
        assert fed.external is not None
        assert set(data.groups[fed.external.rows].tolist()) == {3}
        assert set(data.groups[fed.test.rows].tolist()) == {0, 1, 2}

    def test_a_group_without_training_data_is_external(self):
        data = dataset(groups=4)
        outside = data.groups == 2
        data = replace(
            data,
            train=torch.where(~outside)[0][50:],
            test=torch.cat([torch.where(~outside)[0][:50], torch.where(outside)[0]]),
        )
        for kind in ("domain", "natural"):
            fed = split(data, partition=kind, clients=20)
            assert [client.name for client in fed.clients] == ["site 0", "site 1", "site 3"]
            assert fed.external is not None
            assert rows([fed.external]) == torch.where(outside)[0].tolist()
            assert len(fed.test) == 50

    def test_a_cap_on_users_leaves_the_others_out(self):
        fed = split(replace(dataset(groups=30), group_names=()), partition="natural", clients=6)
        assert len(fed.clients) == 6
        assert fed.external is None
        assert fed.clients[0].name.startswith("group-")
        assert len(fed.test) == sum(len(client.test) for client in fed.clients)


class TestShifts:
    def test_feature_changes_each_clients_own_pixels_in_one_pool(self):
        data = dataset()
        iid, fed = split(data, public=0.1), split(data, partition="feature", shift="inversion", public=0.1)
        assert same(iid, fed)
        pool = fed.test.x
        for k, (client, plain) in enumerate(zip(fed.clients, iid.clients, strict=True)):
            assert client.train.x is client.test.x is pool
            for part, before in ((client.train, plain.train), (client.test, plain.test)):
                assert torch.equal(part.x[part.rows], 255 - before.x[before.rows] if k % 2 else before.x[before.rows])
        assert fed.public is not None
        assert torch.equal(fed.public.x[fed.public.rows], data.x[fed.public.rows])
        assert torch.equal(data.x, dataset().x)

    def test_feature_uses_the_kind_and_the_seed(self):
        data = dataset()
        fed = split(data, seed=7, partition="feature", shift="noise")
        client = fed.clients[2]
        owned = torch.cat([client.train.rows, client.test.rows])
        assert torch.equal(client.train.x[owned], shift_images(data.x[owned], "noise", 2, 4, seed=7))

    @pytest.mark.parametrize("shift", [{"partition": "feature", "shift": "inversion"}, {"partition": "concept"}])
    def test_a_public_set_in_training_is_shifted_for_its_owners_only(self, shift):
        data = dataset()
        fed = split(data, public=0.25, public_in_train=True, **shift)
        assert fed.public is not None
        assert fed.public.x is data.x
        assert fed.public.y is data.y
        held = fed.clients[0].train
        assert not (torch.equal(held.x, data.x) and torch.equal(held.y, data.y))

    def test_concept_permutes_labels_by_group_of_clients(self):
        data = dataset()
        iid, fed = split(data), split(data, partition="concept", groups=3)
        table = torch.from_numpy(label_permutations(3, 5, seed=0))
        for k, (client, plain) in enumerate(zip(fed.clients, iid.clients, strict=True)):
            assert client.train.x is data.x
            for part, before in ((client.train, plain.train), (client.test, plain.test)):
                assert torch.equal(part.labels, table[k % 3][before.labels])
        assert not torch.equal(fed.clients[1].train.labels, iid.clients[1].train.labels)
        assert torch.equal(data.y, dataset().y)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"classes_per_client": 6}, "classes_per_client must be <= 5, the number of classes. Got 6."),
        ({"clients": 481}, "480 training samples are too few for 481 clients (one each); 480 clients would fit."),
        (
            {"partition": "domain"},
            "needs to know the group (domain, writer, hospital) of each sample, and toy has none;",
        ),
        ({"partition": "natural"}, "partition iid works with any data."),
        ({"partition": "classes"}, "Partition classes needs classes_per_client, for example 2."),
        ({"partition": "dirichlet"}, "Partition dirichlet needs alpha, for example 0.5."),
        (
            {"classes_per_client": 2, "alpha": 0.5},
            "alpha is an option of partition dirichlet, but the partition is classes",
        ),
        ({"partition": "iid", "alpha": 0.5}, "leave alpha out or set partition to dirichlet."),
        ({"alpha": 0.5, "sigma": 2.0}, "sigma is an option of partition quantity, but the partition is dirichlet"),
        (
            {"partition": "feature", "groups": 3},
            "groups is an option of partition concept, but the partition is feature",
        ),
        ({"partition": "concept", "test_split": "global"}, "Partition concept needs test_split matched"),
        ({"partition": "concept", "groups": 5}, "groups must be <= clients (4). Got 5."),
        ({"public_in_train": True}, "run.public_in_train needs run.public > 0. Got 0."),
        (
            {"partition": "replicated", "shift": "noise"},
            "shift is an option of partition feature, but the partition is",
        ),
        ({"clients": 0}, "run.clients must be >= 1. Got 0."),
        ({"partition": "shards"}, "run.partition must be 'auto' or 'classes'"),
    ],
)
def test_a_bad_request_is_one_clear_sentence(options, sentence):
    with pytest.raises(UserError) as error:
        split(**options)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{"public": 0.1}, {"public_in_train": True}])
def test_clients_with_their_own_data_give_none_of_it_to_a_public_set(options):
    with pytest.raises(
        UserError, match=r"run.public takes a share of a data set that pfed divides; these clients have"
    ):
        Experiment("local", split(), **options).federation()


def test_bad_data_are_one_clear_sentence():
    with pytest.raises(UserError, match=r"Labels of toy must lie in 0..3. Got 0..4."):
        split(replace(dataset(), classes=("a", "b", "c", "d")))
    with pytest.raises(UserError, match=r"toy needs samples, and a label for each. Got 600 and 5 labels"):
        split(replace(dataset(), y=torch.zeros(5, dtype=torch.int64)))
    with pytest.raises(UserError, match=r"clients must be <= 3, the number of groups in the data. Got 7"):
        split(dataset(groups=3), partition="domain", clients=7)


def test_describe_by_hand():
    """Clients with class counts (2, 0), (0, 2) and (2, 2): pooled half and half.

    Total variation: 1/2, 1/2, 0, mean 1/3. Sizes 2, 2, 4: mean 8/3, population variance 8/9, so their coefficient of
    variation is sqrt(8/9) / (8/3) = sqrt(1/8).
    """
    pool = Samples.of(torch.zeros(8, 1), torch.tensor([0, 0, 1, 1, 0, 1, 0, 1]))
    parts = [pool.part([0, 1]), pool.part([2, 3]), pool.part([4, 5, 6, 7])]
    clients = tuple(ClientData(f"c{k}", part, pool.part([0]), None) for k, part in enumerate(parts))
    found = describe(Federation(clients, ("x", "y"), test=pool, notes=("a note",)))
    assert found["sizes"] == [2, 2, 4]
    assert found["test_sizes"] == [1, 1, 1]
    assert found["class_counts"] == [[2, 0], [0, 2], [2, 2]]
    assert found["label_skew"] == pytest.approx(1 / 3)
    assert found["quantity_skew"] == pytest.approx(1 / 8**0.5)
    assert (found["clients"], found["test"], found["public"], found["notes"]) == (["c0", "c1", "c2"], 8, 0, ["a note"])


def test_described_skew_grows_as_alpha_falls():
    skews = [describe(split(alpha=alpha, min_size=1))["label_skew"] for alpha in (100.0, 0.5, 0.05)]
    assert skews[0] < 0.1 < skews[1] < skews[2]
