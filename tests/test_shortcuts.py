"""What does not change while a client trains is computed once, and only where that is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, blobs, mlp
from torch import Tensor, nn

from pfed import BACKBONE, HEAD, Experiment, features, params, snapshot
from pfed.client import Client
from pfed.config import Local, RunOptions
from pfed.forward import Batch
from pfed.pool import Pool
from pfed.result import Result
from pfed.shortcuts import Known, Shortcuts
from pfed.tasks.classification import Classification

DATA = blobs([12, 9, 10])
EPOCHS, N = 3, 12


class Net(nn.Module):
    """Counts the samples that go through its body, all copies together."""

    seen = 0

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body, self.dropout, self.head = nn.Linear(4, 5), nn.Dropout(dropout), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        Net.seen += len(x)
        out: Tensor = self.head(self.dropout(torch.tanh(self.body(x))))
        return out


def make(model: Callable[[], nn.Module] = Net, **options: Any) -> Client:
    torch.manual_seed(0)
    run = RunOptions(rounds=2, local=Local(lr=0.5, batch_size=5, epochs=EPOCHS), **options)
    return Client(0, 1, {}, DATA.clients[0], 3, run, Pool([model()]), Classification())


def other(client: Client) -> nn.Module:
    """A model with other values than the initial ones."""
    return client.model(params(client.model()) * 0.5)


def distilled(teacher: nn.Module, ask: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = ask(teacher, batch)
        return F.mse_loss(ask(model, batch), target)

    return loss


def counted(work: Callable[[], object]) -> int:
    Net.seen = 0
    work()
    return Net.seen


@pytest.mark.parametrize("ask", [lambda model, batch: model(batch), features], ids=["output", "features"])
@pytest.mark.parametrize("shortcuts", [True, False])
def test_a_fixed_teacher_is_run_once(ask: Any, shortcuts: bool) -> None:
    """Beside it the model that trains, in every epoch; and two more rows to see that the teacher is steady."""
    client = make(exact_shortcuts=shortcuts)
    teacher, model = other(client).eval(), client.model()
    seen = counted(lambda: client.fit(model, distilled(teacher, ask)))
    assert seen == (EPOCHS * N + N + 3 * 2 if shortcuts else 2 * EPOCHS * N)
    assert not client.notes


@pytest.mark.parametrize("ask", [lambda model, batch: model(batch), features], ids=["output", "features"])
def test_a_teacher_teaches_the_same_either_way(ask: Any) -> None:
    trained = []
    for shortcuts in (True, False):
        client = make(exact_shortcuts=shortcuts)
        teacher, model = other(client).eval(), client.model()
        client.fit(model, distilled(teacher, ask))
        trained.append(snapshot(model))
    for name, tensor in trained[0].items():
        torch.testing.assert_close(tensor, trained[1][name], rtol=1e-5, atol=1e-6)


def test_a_teacher_that_changes_is_run_again() -> None:
    """One that follows the student, as in self-distillation by moving averages."""
    client = make()
    teacher, model = other(client).eval(), client.model()

    def follow(model: nn.Module) -> None:
        with torch.no_grad():
            teacher.body.weight.lerp_(model.body.weight, 0.5)  # type: ignore[union-attr,arg-type]

    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            found = features(teacher, batch)
            assert torch.allclose(found, features(teacher, batch.x))
        seen.append(found)
        return client.loss(model, batch)

    client.fit(model, loss, each_epoch=follow)
    assert len(seen) == 3 * EPOCHS


def test_a_teacher_that_learns_too_is_never_looked_up() -> None:
    """Two models that train each other: gradients must reach both, also where one is in eval mode."""
    client = make()
    one, two = client.model(), other(client).eval()
    before = snapshot(two)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return client.loss(model, batch) + client.loss(two, batch)

    client.fit(one, loss, extra=[client.sgd(dict(two.named_parameters()))])
    assert all(not torch.equal(tensor, before[name]) for name, tensor in snapshot(two).items())


def test_a_teacher_equal_to_what_is_known_is_not_run_at_all() -> None:
    """FedBSD: below the head, which trained first, the model is what its teacher is."""
    client = make()
    body = params(other(client), BACKBONE)
    teacher, model = client.model(body).eval(), client.model(body)
    client.fit(model, only=HEAD, stream="head")
    seen = counted(lambda: client.fit(model, distilled(teacher, features), only=BACKBONE))
    assert seen == EPOCHS * N + 3 * 2


def test_a_model_that_moved_on_is_no_teacher() -> None:
    """What is known of a model is forgotten as soon as something below its head changes."""
    client = make()
    model = client.model()
    client.fit(model, only=HEAD, stream="head")
    client.fit(model, stream="all")
    teacher = client.model(snapshot(model)).eval()
    known = client._shortcuts.of(teacher, again=True)
    assert known is not None
    torch.testing.assert_close(known.features, features(teacher, client.examples().x))


def test_one_pass_over_part_of_the_data_is_not_worth_it() -> None:
    client = make()
    teacher, model = other(client).eval(), client.model()
    assert counted(lambda: client.fit(model, distilled(teacher, features), steps=2)) == 2 * 2 * 5


@pytest.mark.parametrize("what", ["augmentation", "dropout", "too many"])
def test_where_it_is_not_exact_it_says_so(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    why = {
        "augmentation": "the inputs are augmented",
        "dropout": "dropout or BatchNorm below the head is in training mode, or the head has not the last word",
        "too many": "they are more than 50 numbers",
    }[what]
    if what == "too many":
        monkeypatch.setattr("pfed.shortcuts.LIMIT", 50)
    client = make(lambda: Net(0.5 if what == "dropout" else 0.0))
    if what == "augmentation":
        client._augment = lambda x, y, rng: (x, y)
    model = client.model()
    seen = counted(lambda: client.fit(model, only=HEAD))
    assert seen == EPOCHS * N + {"augmentation": 0, "dropout": 3 * 2, "too many": N + 3 * 2}[what]
    assert client.notes == {f"features of frozen parts are computed again in every epoch: {why}"}
    client.notes.clear()
    client.fit(model, only=HEAD, epochs=1)
    assert not client.notes  # there is nothing to be saved


def test_a_run_says_it_once(tmp_path: Any) -> None:
    """In its notes, whatever the number of clients and rounds, also when it is resumed."""
    experiment = Experiment("fedrep", DATA, lambda: Net(0.5), rounds=2, checkpoint_every=1, hyper={"head_epochs": 2})
    result = experiment.run(tmp_path)
    (note,) = result.notes()
    assert note.startswith("features of frozen parts are computed again in every epoch: dropout")
    (folder,) = tmp_path.iterdir()
    assert Result.load(folder).notes() == [note]
    longer = Experiment("fedrep", DATA, lambda: Net(0.5), rounds=4, checkpoint_every=1, hyper={"head_epochs": 2})
    assert longer.resume(folder).notes() == [note]


@pytest.mark.parametrize("engine", ["debug", "processes"])
def test_a_run_on_any_engine_says_it(engine: str) -> None:
    settings = {"rounds": 2, "hyper": {"head_epochs": 2}, "engine": engine}
    assert len(Experiment("fedrep", DATA, lambda: Net(0.5), **settings).run().notes()) == 1


def test_what_is_known_of_another_kind_of_model_is_not_taken() -> None:
    known = Known(mlp(), torch.zeros(1))
    assert known.same(mlp()) is False
    assert known.same(Net()) is False
    assert known.same(known.model)


def test_examples_are_seen_in_their_order() -> None:
    client = make()
    model = client.model().eval()
    known = Shortcuts(client.data.train, lambda model: True, print).of(model, again=True)
    assert known is not None
    assert_same(known.features, features(model, client.examples().x).detach())
