"""What is sent until an accuracy is reached, and the papers' own countings to the last digit."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import federation
from papers_figures import FIGURES
from torch import nn

from pfed import Experiment, Samples, costs, models
from pfed.data.base import ClientData, Federation

METHODS = ("fedavg", "fedprox", "fedper", "fedrep", "fedbn", "spherefed", "fedrod", "fedetf", "dualfed")
ROUNDS = {  # until 85, 75, 70 % on PACS, DomainNet, Office-Home
    "fedavg": (22, 23, 29),
    "fedprox": (21, 23, 29),
    "fedper": (19, 19, 23),
    "fedrep": (31, 38, 43),
    "fedbn": (17, 21, 24),
    "spherefed": (36, 64, 210),
    "fedrod": (13, 15, 19),
    "fedetf": (135, 178, 183),
    "dualfed": (7, 10, 14),
}
CLASSES = (7, 10, 65)


def resnet18(classes: int) -> nn.Module:
    with torch.device("meta"):  # to count, no numbers are needed
        return models.build("torchvision:resnet18+projector", classes=classes, shape=(3, 64, 64))


def test_the_27_entries_of_dualfeds_table_8_from_its_rounds() -> None:
    """Rounds x 2 directions x 4 bytes x P in MiB. P of FedAvg on PACS: 11,176,512 of ResNet-18 without its head,
    264,448 of the projector, 513 x 7 of the classifier and 22 batch counters."""
    networks = [resnet18(classes) for classes in CLASSES]
    assert costs.table8("fedavg", networks[0]) == 11_176_512 + 264_448 + 513 * 7 + 22
    printed = [[cell.strip() for cell in line.split("|")][1:] for line in FIGURES["dualfed-comm"].strip().splitlines()]
    found = [
        [
            f"{costs.by_rounds(rounds, costs.table8(method, network)) / costs.MIB:.2f}"
            for rounds, network in zip(ROUNDS[method], networks, strict=True)
        ]
        for method in METHODS
    ]
    assert found == printed
    assert sum(map(len, found)) == 27


def test_what_dualfed_really_sends_in_those_rounds() -> None:
    """Without the private projector and without batch counters: 8 bytes x (11,176,512 + 513 C) in each round."""
    networks = [resnet18(classes) for classes in CLASSES]
    private = sum(p.numel() for p in networks[0].get_submodule("projector").parameters())
    assert private == 264_448
    honest = [
        costs.by_rounds(rounds, sum(p.numel() for p in network.parameters()) - private) / costs.MIB
        for rounds, network in zip(ROUNDS["dualfed"], networks, strict=True)
    ]
    assert [round(value, 2) for value in honest] == [597.08, 853.09, 1197.34]


def hundred(count: int) -> Federation:
    """Two clients with some tiny samples of 100 classes, and a public set."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    samples = Samples.of(x, torch.arange(count) % 100)
    clients = tuple(ClientData(f"client {i}", samples, samples.part(range(10))) for i in range(2))
    return Federation(clients, tuple(map(str, range(100))), samples.part(range(10)), samples)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 100))


def per_client(method: str, rounds: int) -> float:
    result = Experiment(method, hundred(100), wide, rounds=rounds, local={"batch_size": 100}).run()
    points = costs.curve(result)
    return costs.sent(points, points[-1][0])


def test_fedcds_table_iii_to_the_byte() -> None:
    """200 rounds, both directions, float32: 64 x 100 logits, 100 x 100 logits, all of a ResNet-50's parameters."""
    assert costs.by_rounds(200, costs.table3("fedcd", 100, 64, None)) == 10_240_000
    assert costs.by_rounds(200, costs.table3("feddistill", 100, 0, None)) == 16_000_000
    with torch.device("meta"):
        network = models.build("resnet50", classes=100, shape=(3, 32, 32))
    assert costs.by_rounds(200, costs.table3("fedavg", 100, 0, network)) == 37_928_403_200


def test_fedcd_sends_what_its_table_says() -> None:
    """As counted in a run: every round brings an upload, and the last teacher is fetched after the last round."""
    assert [per_client("fedcd", rounds) for rounds in (1, 4)] == [51_200.0, 4 * 51_200.0]
    assert 200 * per_client("fedcd", 1) == 10_240_000


def test_fedavg_sends_its_parameters_and_feddistill_its_logits() -> None:
    parameters = sum(p.numel() for p in wide().parameters())
    assert per_client("fedavg", 3) == costs.by_rounds(3, costs.table3("fedavg", 100, 0, wide()))
    assert per_client("fedavg", 1) == 8 * parameters
    logits = per_client("feddistill", 3)
    assert (
        costs.by_rounds(2, 100 * 100) <= logits <= costs.by_rounds(3, 100 * 100) + 3 * 2 * 4 * 100
    )  # and which labels


def test_the_first_round_at_the_target_and_its_bytes() -> None:
    """Two clients, two features: three numbers per class and direction (weights and bias), 48 bytes a round."""
    data = federation(([[1.0, 0.0], [0.0, 1.0]], [0, 1]), ([[2.0, 0.0], [0.0, 2.0]], [0, 1]))
    result = Experiment(
        "fedavg", data, lambda: nn.Linear(2, 2), rounds=30, local={"lr": 0.5}, eval_every=2, hyper={"agg": "uniform"}
    ).run()
    points = costs.curve(result)
    at = costs.reached(points, 0.99)
    assert at is not None
    assert at % 2 == 0
    series = dict(result.series["personal/local-test"])
    assert min(series[at].values()) >= 0.99
    assert all(sum(values.values()) / 2 < 0.99 for t, values in series.items() if t < at)
    assert costs.sent(points, at) == at * 6 * 4 * 2
    assert costs.reached(points, 1.01) is None
    assert math.isclose(points[-1][2], result.bytes_up / 2 + result.bytes_down / 2)


def test_a_run_knows_its_count(tiny: Federation) -> None:
    """DualFed's model gets the projector that the others' has already."""
    own, other = (
        costs.counted(Experiment(method, tiny, model), ["cost:0.5:paper"])["cost"]
        for method, model in (("dualfed", "cnn-small"), ("fedavg", "cnn-small+projector"))
    )
    assert own == other
    assert costs.counted(Experiment("fedavg", tiny, "cnn-small"), ["personal/local-test", "cost:0.5:sent"]) == {}
    logits = costs.counted(Experiment("fedcd", tiny, "cnn-small", hyper={"batch": 7}), ["bytes:paper"])
    assert logits == {"bytes": 7 * 10}
    with pytest.raises(KeyError):
        costs.table8("ditto", nn.Linear(1, 1))
