"""Metrics: by hand, and against scikit-learn where it defines the same number."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from pfed.errors import UserError
from pfed.metrics import (
    SCORES,
    Ensemble,
    class_separation,
    cost_to_target,
    linear_cka,
    over_seeds,
    scores,
    select,
    summarise,
)

FEW = settings(deadline=None, max_examples=25, derandomize=True)


def drawn(n: int, classes: int, present: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities that know something, and labels of which only `present` classes occur."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(present, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator) + 1.5 * torch.nn.functional.one_hot(y, classes)
    return logits.softmax(1), y


class TestScores:
    @FEW
    @given(st.integers(2, 120), st.integers(2, 12), st.integers(1, 12), st.integers(0, 999))
    def test_agree_with_scikit_learn_whatever_classes_are_present(self, n, classes, present, seed):
        probs, y = drawn(n, classes, min(present, classes), seed)
        predicted, labels = probs.argmax(1).numpy(), y.numpy()
        found = scores(probs, y, SCORES)
        assert found["accuracy"] == pytest.approx(float((predicted == labels).mean()), abs=1e-12)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn warns of predicted classes that no label has
            assert found["balanced-accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted), abs=1e-9)
        assert found["macro-f1"] == pytest.approx(f1_score(labels, predicted, average="macro"), abs=1e-9)
        held = np.unique(labels)
        if len(held) < 2:
            assert found["auroc"] is None
        else:
            expected = np.mean([roc_auc_score(labels == c, probs[:, c].numpy()) for c in held])
            assert found["auroc"] == pytest.approx(expected, abs=1e-6)
        assert found["ece"] == pytest.approx(reference_ece(probs.numpy(), labels), abs=1e-6)

    def test_all_classes_present_is_the_ordinary_one_versus_rest_auroc(self):
        probs, y = drawn(200, 4, 4, seed=0)
        probs = (probs.double() / probs.double().sum(1, keepdim=True)).float()
        expected = roc_auc_score(y.numpy(), probs.double().numpy(), multi_class="ovr", average="macro")
        assert scores(probs, y, ["auroc"])["auroc"] == pytest.approx(expected, abs=1e-6)

    def test_by_hand(self):
        """Predictions 0, 0, 1, 2 for labels 0, 1, 1, 1 of four classes.

        Accuracy 2/4. Recalls 1 and 1/3: mean 2/3. F1: class 0 has one hit and one false: 2/3; class 1 one hit, two
        missed: 1/2; class 2 one false: 0; class 3 does not occur: mean 7/18. AUROC: class 0 is first among its column
        but for an equal 0.7: (2 + 1/2) / 3 = 5/6; class 1: 0.1 of label 0 below 0.2, 0.9 and 0.3: 1; mean 11/12. ECE:
        confidences 0.7, 0.7 (one right), 0.9 (right), 0.6 (wrong): (2 |1/2 - 0.7| + |1 - 0.9| + |0 - 0.6|) / 4 = 0.275.
        """
        probs = torch.tensor([[0.7, 0.1, 0.2, 0.0], [0.7, 0.2, 0.1, 0.0], [0.0, 0.9, 0.1, 0.0], [0.1, 0.3, 0.6, 0.0]])
        found = scores(probs, torch.tensor([0, 1, 1, 1]), SCORES)
        assert found["accuracy"] == 0.5
        assert found["balanced-accuracy"] == pytest.approx(2 / 3)
        assert found["macro-f1"] == pytest.approx(7 / 18)
        assert found["auroc"] == pytest.approx(11 / 12)
        assert found["ece"] == pytest.approx(0.275)

    def test_only_what_is_asked_for(self):
        probs, y = drawn(10, 3, 3, seed=0)
        assert list(scores(probs, y)) == ["accuracy"]
        assert list(scores(probs, y, ["ece", "accuracy"])) == ["ece", "accuracy"]

    def test_no_test_data_and_one_sample(self):
        assert scores(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), SCORES) == dict.fromkeys(SCORES)
        one = scores(torch.tensor([[0.2, 0.8]]), torch.tensor([1]), SCORES)
        assert one == pytest.approx(
            {"accuracy": 1.0, "balanced-accuracy": 1.0, "macro-f1": 1.0, "auroc": None, "ece": 0.2}
        )

    def test_a_diverged_model_knows_nothing(self):
        """Rows of nan count as half and half: class 0 is said of both, right for one; confidence 1/2, so ECE 0."""
        found = scores(torch.full((2, 2), math.nan), torch.tensor([0, 1]), SCORES)
        assert found == {
            "accuracy": 0.5,
            "balanced-accuracy": 0.5,
            "macro-f1": pytest.approx(1 / 3),
            "auroc": 0.5,
            "ece": 0.0,
        }

    def test_an_unknown_score_suggests_the_nearest(self):
        with pytest.raises(UserError, match=r"There is no score 'acuracy'. Did you mean 'accuracy'\?"):
            scores(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), ["acuracy"])


def reference_ece(probs: np.ndarray, y: np.ndarray) -> float:
    """Sum over 15 bins of confidence of |accuracy - confidence| times the bin's share."""
    confidence, right = probs.max(1), probs.argmax(1) == y
    bins = np.digitize(confidence, np.linspace(0, 1, 16, dtype=np.float32))
    parts = [(bins == b) for b in np.unique(bins)]
    return sum(abs(right[part].mean() - confidence[part].mean()) * part.mean() for part in parts)


class TestSummaries:
    def test_by_hand(self):
        """0.2, 0.4, 0.9 with 10, 10, 20 samples: mean 0.5; weighted (2 + 4 + 18) / 40 = 0.6; variance
        (0.09 + 0.01 + 0.16) / 3 = 0.26 / 3; fewer than ten clients, so the worst decile is the minimum."""
        found = summarise({2: 0.9, 0: 0.2, 1: 0.4}, {0: 10, 1: 10, 2: 20, 9: 1000})
        assert found == pytest.approx(
            {
                "mean": 0.5,
                "weighted": 0.6,
                "std": math.sqrt(0.26 / 3),
                "min": 0.2,
                "max": 0.9,
                "worst-decile": 0.2,
                "best-decile": 0.9,
            }
        )

    @pytest.mark.parametrize(("clients", "decile"), [(9, 1), (10, 1), (11, 2), (30, 3), (100, 10), (101, 11)])
    def test_a_decile_is_a_tenth_rounded_up(self, clients, decile):
        """Of values 0, 1, 2, … the lowest d have the mean (d - 1) / 2."""
        found = summarise({k: float(k) for k in range(clients)}, dict.fromkeys(range(clients), 1))
        assert found["worst-decile"] == pytest.approx((decile - 1) / 2)
        assert found["best-decile"] == pytest.approx(clients - 1 - (decile - 1) / 2)

    def test_no_clients(self):
        with pytest.raises(ValueError, match="no clients"):
            summarise({}, {})

    def test_over_seeds(self):
        """1, 2, 6: mean 3; squares 4 + 1 + 9 = 14 over n - 1 = 2."""
        assert over_seeds([1, 2, 6]) == pytest.approx((3, math.sqrt(7)))
        mean, deviation = over_seeds([0.5])
        assert mean == 0.5
        assert math.isnan(deviation)


class TestEnsemble:
    """Three models, two classes, one sample: probabilities of class 0 are 0.9, 0.4, 0.4."""

    models = tuple(torch.tensor([[p, 1 - p]]) for p in (0.9, 0.4, 0.4))

    def told(self, rule: str, models: tuple[torch.Tensor, ...]) -> list[int]:
        ensemble = Ensemble(rule)
        for probs in models:
            ensemble.add(probs)
        return ensemble.predict().tolist()

    def test_rules_by_hand(self):
        """Mean 0.567: class 0. Products 0.9 * 0.16 = 0.144 and 0.1 * 0.36 = 0.036: class 0. Votes 1 to 2: class 1."""
        assert self.told("mean_prob", self.models) == [0]
        assert self.told("mean_logprob", self.models) == [0]
        assert self.told("majority", self.models) == [1]

    def test_logarithms_punish_confident_mistakes(self):
        """0.9, 0.9, 0.001 of class 0: the mean is 0.6, but the products 0.00081 and 0.00999 say class 1."""
        models = tuple(torch.tensor([[p, 1 - p]]) for p in (0.9, 0.9, 0.001))
        assert self.told("mean_prob", models) == [0]
        assert self.told("mean_logprob", models) == [1]

    def test_a_vanished_probability_is_no_veto(self):
        """Class 1 has probability 0 in one model, class 0 1e-30 in two: log(1e-38) = -87, 2 * log(1e-30) = -138."""
        models = (torch.tensor([[1.0, 0.0]]), *(torch.tensor([[1e-30, 1.0]]) for _ in range(2)))
        assert self.told("mean_logprob", models) == [1]

    def test_a_tied_vote_goes_to_the_more_probable_class(self):
        models = (torch.tensor([[0.4, 0.6]]), torch.tensor([[0.9, 0.1]]))
        assert self.told("majority", models) == self.told("majority", models[::-1]) == [0]
        assert self.told("majority", (torch.tensor([[0.1, 0.9]]), torch.tensor([[0.6, 0.4]]))) == [1]

    @FEW
    @given(st.integers(1, 9), st.integers(0, 99))
    def test_votes_are_never_outweighed_by_probabilities(self, models, seed):
        probs = torch.rand(models, 20, 3, generator=torch.Generator().manual_seed(seed)).softmax(2)
        votes = torch.nn.functional.one_hot(probs.argmax(2), 3).sum(0)
        chosen = torch.tensor(self.told("majority", tuple(probs)))
        assert torch.equal(votes.gather(1, chosen[:, None])[:, 0], votes.max(1).values)

    def test_one_model_is_itself(self):
        probs, _ = drawn(50, 6, 6, seed=1)
        for rule in ("mean_prob", "mean_logprob", "majority"):
            assert self.told(rule, (probs,)) == probs.argmax(1).tolist()

    def test_bad_use(self):
        with pytest.raises(UserError, match=r"no ensemble rule 'mean_probs'. Did you mean 'mean_prob'"):
            Ensemble("mean_probs")
        with pytest.raises(ValueError, match="no models"):
            Ensemble().predict()


class TestSelect:
    """Two clients over three rounds: means 0.5, 0.7, 0.6."""

    series = ((1, {0: 0.2, 1: 0.8}), (2, {0: 0.6, 1: 0.8}), (3, {0: 0.7, 1: 0.5}))

    def test_rules_by_hand(self):
        assert select(self.series, "last") == {0: 0.7, 1: 0.5}
        assert select(self.series, "best_mean_round") == {0: 0.6, 1: 0.8}
        assert select(self.series, "best_per_client") == {0: 0.7, 1: 0.8}
        assert select(self.series, "mean_last_10") == pytest.approx({0: 0.5, 1: 0.7})
        assert select(self.series, "mean_last_10", k=2) == pytest.approx({0: 0.65, 1: 0.65})

    def test_mean_last_10_takes_ten(self):
        series = [(r, {0: float(r)}) for r in range(1, 31)]
        assert select(series, "mean_last_10") == {0: 25.5}

    def test_validation_chooses_the_round_and_the_test_series_gives_the_values(self):
        validation = ((1, {0: 0.9, 1: 0.9}), (2, {0: 0.1, 1: 0.1}), (3, {0: 0.9, 1: 0.9}))
        assert select(self.series, "validation", validation) == {0: 0.2, 1: 0.8}  # the first of equals
        assert select(self.series, "validation", [*validation, (4, {0: 1.0})]) == {0: 0.2, 1: 0.8}
        with pytest.raises(UserError, match="needs validation data"):
            select(self.series, "validation")

    def test_a_client_that_missed_a_round(self):
        series = [(1, {0: 0.4, 1: 0.6}), (2, {0: 0.8})]
        assert select(series, "mean_last_10") == pytest.approx({0: 0.6, 1: 0.6})
        assert select(series, "best_per_client") == {0: 0.8, 1: 0.6}

    def test_bad_use(self):
        with pytest.raises(UserError, match="no selection 'best'"):
            select(self.series, "best")
        with pytest.raises(ValueError, match="no rounds"):
            select([], "last")


class TestCost:
    def test_the_cost_that_dualfed_really_has(self):
        """PACS, 7 classes, target reached in round 7: 7 rounds x 8 bytes x (11,176,512 + 513 * 7) are 597.08 MiB."""
        series = [(r, 0.80 + 0.0025 * r) for r in range(1, 31)]
        shared = 11_176_512 + 513 * 7
        found = cost_to_target(series, 0.8174, 8 * shared)
        assert found is not None
        assert found[0] == 7
        assert found[1] / 2**20 == pytest.approx(597.08, abs=0.005)

    def test_reached_exactly_at_once_and_never(self):
        assert cost_to_target([(5, 0.5), (10, 0.7)], 0.5, 100) == (5, 500)
        assert cost_to_target([(5, 0.5), (10, 0.7)], 0.6, 100) == (10, 1000)
        assert cost_to_target([(5, 0.5)], 0.51, 100) is None
        assert cost_to_target([], 0.5, 100) is None


class TestRepresentations:
    @FEW
    @given(st.integers(0, 99), st.integers(2, 4))
    def test_class_separation_is_the_sum_over_all_pairs(self, seed, classes):
        """The O(n d) form against the definition: all ordered pairs, classes weighted equally."""
        generator = torch.Generator().manual_seed(seed)
        y = torch.cat([torch.arange(classes), torch.randint(classes, (15,), generator=generator)])
        x = torch.randn(len(y), 5, generator=generator).double()
        distance = 1 - torch.nn.functional.cosine_similarity(x[:, None], x[None], dim=2)
        blocks = [[distance[y == a][:, y == b].mean() for b in range(classes)] for a in range(classes)]
        within = torch.stack([blocks[a][a] for a in range(classes)]).mean()
        total = torch.stack([torch.stack(row) for row in blocks]).mean()
        assert class_separation(x, y) == pytest.approx(float(1 - within / total), abs=1e-9)

    def test_class_separation_of_extreme_cases(self):
        """Collapsed classes at right angles: 1. Two classes that are equal: 0. All features equal: undefined."""
        axes = torch.eye(2)
        assert class_separation(axes[[0, 0, 1]] * 3, torch.tensor([4, 4, 7])) == pytest.approx(1)
        assert class_separation(axes[[0, 1, 0, 1]], torch.tensor([0, 0, 1, 1])) == pytest.approx(0, abs=1e-9)
        assert class_separation(torch.ones(4, 3) / 3, torch.tensor([0, 0, 1, 1])) is None

    def test_cka_by_hand(self):
        """Centred columns x = (1, -1, 0), y = (1, 0, -1): (x·y)² / (|x|² |y|²) = 1 / 4."""
        x, y = torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
        assert linear_cka(x, y) == pytest.approx(0.25)

    @FEW
    @given(st.integers(0, 99), st.sampled_from([(30, 4, 6), (6, 20, 9), (8, 3, 30)]))
    def test_cka_is_bounded_symmetric_and_blind_to_rotation_and_scale(self, seed, shape):
        n, d1, d2 = shape
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(n, d1, generator=generator), torch.randn(n, d2, generator=generator)
        value = linear_cka(x, y)
        assert value is not None
        assert 0 <= value <= 1
        assert linear_cka(x, x) == pytest.approx(1)
        assert linear_cka(y, x) == pytest.approx(value)
        rotation = torch.linalg.qr(torch.randn(d1, d1, generator=generator).double())[0]
        assert linear_cka(7 * x.double() @ rotation + 2, y) == pytest.approx(value)
        stretch = torch.diag(torch.linspace(1, 9, d1))
        assert linear_cka(x @ stretch, y) != pytest.approx(value, abs=1e-4)

    def test_both_forms_of_cka_are_the_same_number(self):
        """Features beyond n give the Gram form; the definition on the same data must agree."""
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(6, 10, generator=generator).double(), torch.randn(6, 4, generator=generator).double()
        a, b = x - x.mean(0), y - y.mean(0)
        expected = (b.T @ a).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
        assert linear_cka(x, y) == pytest.approx(float(expected))

    def test_cka_with_a_constant_is_undefined(self):
        """In float64 the mean of seven times 0.1 is not 0.1, which must not pass for a signal."""
        constant = torch.full((7, 3), 0.1, dtype=torch.float64)
        assert not torch.equal(constant.mean(0), constant[0])
        assert linear_cka(constant, torch.eye(7)) is None
