"""What a step can do with its client: models, batches, training of parts, streams, memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pfed import BACKBONE, HEAD, NORM, Federation, Tensors, features, head, params, snapshot
from pfed.anatomy import marks, of
from pfed.client import Client, schedule
from pfed.config import Local, RunOptions
from pfed.forward import Batch, quiet
from pfed.models import build
from pfed.pool import Pool
from pfed.shortcuts import Shortcuts
from pfed.tasks.classification import Classification, crop_flip, flip


def make(tiny: Federation, model: str = "cnn-small-bn", round: int = 1, id: int = 0, **options: Any) -> Client:
    local = Local(**{"lr": 0.1, "batch_size": 4, **options.pop("local", {})})
    torch.manual_seed(0)
    pool = Pool([build(model, classes=10, shape=(1, 8, 8))])
    run = RunOptions(rounds=10, local=local, **options)
    return Client(id, round, {}, tiny.clients[id], 10, run, pool, Classification())


def changed(before: Tensors, model: nn.Module) -> set[str]:
    return {name for name, tensor in snapshot(model).items() if not torch.equal(tensor, before[name])}


def test_model_takes_the_given_then_the_kept_then_the_initial(tiny: Federation) -> None:
    client = make(tiny)
    initial = snapshot(client.model())
    model = client.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5)
    client.keep(model, HEAD)
    names = HEAD.names(model)
    given = Tensors({name: torch.full_like(initial[name], 7) for name in list(names)[:1]})
    loaded = snapshot(client.model(given))
    for name, tensor in loaded.items():
        if name in given:
            assert (tensor == 7).all()
        elif name in names:
            assert (tensor == 5).all()
        else:
            assert torch.equal(tensor, initial[name])


def test_two_models_of_one_step_are_two_modules(tiny: Federation) -> None:
    client = make(tiny)
    assert client.model() is not client.model()


def test_a_name_that_the_model_lacks_is_an_error(tiny: Federation) -> None:
    with pytest.raises(KeyError, match="the model has no"):
        make(tiny).model(Tensors(strange=torch.zeros(1)))


def test_keeping_one_part_leaves_what_was_kept_of_another(tiny: Federation) -> None:
    client = make(tiny)
    model = client.model()
    client.keep(model, HEAD)
    client.keep(model, NORM)
    assert set(client.state["kept"]) >= HEAD.names(model) | NORM.names(model)


def test_share_lets_no_counter_out(tiny: Federation) -> None:
    client = make(tiny)
    model = client.model()
    shared = client.share(model)
    assert shared.keys() == params(model).keys()
    assert set(snapshot(model)) - set(shared) == {n for n in snapshot(model) if n.endswith("num_batches_tracked")}


@pytest.mark.parametrize(("only", "rest"), [(HEAD, BACKBONE), (BACKBONE, HEAD)])
def test_only_the_named_part_is_trained(tiny: Federation, only: Any, rest: Any) -> None:
    """Not even the running statistics or counters of a frozen part move."""
    client = make(tiny)
    model = client.model()
    before = snapshot(model)
    client.fit(model, only=only)
    moved = changed(before, model)
    assert moved
    assert moved <= only.names(model)
    assert not moved & rest.names(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_frozen_modules_in_train_mode_move_their_statistics(tiny: Federation) -> None:
    client = make(tiny)
    model = client.model()
    before = snapshot(model)
    client.fit(model, only=HEAD, frozen="train")
    assert {name for name in changed(before, model) if "running_mean" in name}


def test_batches(tiny: Federation) -> None:
    """17 samples by 4: five batches, the last of one, dropped where BatchNorm trains; each sample once an epoch."""
    plain = list(make(tiny, "cnn-small").batches(1))
    assert [len(batch.y) for batch in plain] == [4, 4, 4, 4, 1]
    assert sorted(torch.cat([batch.index for batch in plain]).tolist()) == list(range(17))
    normed = list(make(tiny).batches(2))
    assert [len(batch.y) for batch in normed] == [4] * 8
    assert [batch.epoch for batch in normed] == [0] * 4 + [1] * 4
    assert [batch.step for batch in normed] == list(range(8))
    x, y = tiny.clients[0].train.take()
    assert torch.equal(plain[1].x, x[plain[1].index])
    assert torch.equal(plain[1].y, y[plain[1].index])


def test_large_data_are_gathered_batch_by_batch(tiny: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = list(make(tiny).batches(1))
    monkeypatch.setattr("pfed.client.GATHER", 0)
    one_by_one = list(make(tiny).batches(1))
    assert all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in zip(at_once, one_by_one, strict=True))


def test_steps_limit_and_cycle(tiny: Federation) -> None:
    client = make(tiny, "cnn-small")
    assert client.fit(client.model(), steps=7).steps == 7
    assert client.fit(client.model(), steps=2).steps == 2
    assert client.fit(client.model(), epochs=2).steps == 10
    assert client.fit(client.model(), epochs=0).steps == 0


def test_a_stream_is_opened_anew_and_differs_by_name_round_client_and_seed(tiny: Federation) -> None:
    def order(client: Client, stream: str = "train") -> list[int]:
        return torch.cat([batch.index for batch in client.batches(1, stream)]).tolist()

    client = make(tiny, "cnn-small")
    assert order(client) == order(client)
    others = [order(client, "head"), order(make(tiny, "cnn-small", round=2)), order(make(tiny, "cnn-small", seed=1))]
    assert len({tuple(o) for o in [order(client), *others]}) == 4


def test_each_epoch_and_grad_are_called(tiny: Federation) -> None:
    """After every epoch, the last included; before every step, with the gradients there."""
    client = make(tiny, "cnn-small")
    model = client.model()
    epochs, gradients = [], []
    client.fit(
        model,
        epochs=3,
        each_epoch=lambda m: epochs.append(m is model),
        grad=lambda batch: gradients.append(model.get_parameter("fc2.weight").grad is not None),
    )
    assert epochs == [True] * 3
    assert gradients == [True] * 15


def test_an_optimiser_of_torch_can_be_given(tiny: Federation) -> None:
    client = make(tiny, "cnn-small")
    ours, theirs = client.model(), client.model()
    client.fit(ours)
    client.fit(theirs, opt=torch.optim.SGD(theirs.parameters(), lr=0.1))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_schedules() -> None:
    """Cosine starts at 1; steps divide by ten from their fraction of the rounds on; outside the rounds it is 1."""
    assert [schedule("cosine", t, 4) for t in (1, 3)] == pytest.approx([1.0, 0.5])
    assert [schedule("step:0.5,0.75", t, 8) for t in (1, 4, 5, 6, 7, 8)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert [schedule("cosine", t, 4) for t in (0, 5)] == [1.0, 1.0]


class Noisy(nn.Module):
    """A model whose features depend on chance in train mode, in a way that no module type tells."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(nn.functional.dropout(self.body(x.flatten(1)), training=self.training))
        return out


class Scaled(nn.Module):
    """A model that does something after its head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * self.fc(x.flatten(1))
        return out


@pytest.mark.parametrize(
    ("model", "cached"), [("cnn-small", True), ("cnn-small-bn", True), (Noisy, False), (Scaled, False)]
)
def test_features_are_computed_once_only_where_that_is_exact(
    tiny: Federation, model: Any, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    original = Shortcuts.of
    monkeypatch.setattr(Shortcuts, "of", lambda *args: used.append((found := original(*args)) is not None) or found)
    client = make(tiny, "cnn-small")
    client.pool = Pool([build(model, classes=10, shape=(1, 8, 8)) if isinstance(model, str) else model()])
    client.fit(client.model(), only=HEAD, epochs=2)
    assert set(used) == {cached}
    assert bool(client.notes) != cached


def test_shortcuts_agree_with_the_long_way(tiny: Federation) -> None:
    results = []
    for exact in (True, False):
        client = make(tiny, exact_shortcuts=exact)
        model = client.model()
        client.fit(model, only=HEAD, epochs=3)
        results.append(params(model, HEAD))
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=1e-5, atol=1e-6)


def test_features_and_head_make_the_model(tiny: Federation) -> None:
    client = make(tiny, "cnn-small")
    model, batch = client.model().eval(), client.examples()
    with torch.no_grad():
        assert torch.equal(head(model, features(model, batch)), model(batch))
        assert torch.equal(model(batch), model(batch.x))
    assert isinstance(batch, Batch)
    assert len(batch.y) == client.n


def test_augmentation_draws_from_its_own_stream(tiny: Federation) -> None:
    """Batches come in the same order with and without it, and their pictures differ."""
    plain, flipped = (list(make(tiny, "cnn-small", augment=rule).batches(1)) for rule in ("none", "flip"))
    assert all(torch.equal(a.index, b.index) for a, b in zip(plain, flipped, strict=True))
    assert any(not torch.equal(a.x, b.x) for a, b in zip(plain, flipped, strict=True))


def test_flip_and_crop() -> None:
    """A flipped image is the image or its mirror; a crop is a window of the padded image, which may be mirrored."""
    x = torch.arange(2 * 3 * 6 * 6).view(2, 3, 6, 6).float() + 1
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(20):
        for image, out in zip(x, flip(x, rng), strict=True):
            mirrored = torch.equal(out, image.flip(-1))
            assert mirrored or torch.equal(out, image)
            seen.add(mirrored)
    assert seen == {True, False}
    wide = nn.functional.pad(x, (4, 4, 4, 4))
    windows = [wide[0, :, i : i + 6, j : j + 6] for i in range(9) for j in range(9)]
    for _ in range(20):
        out = crop_flip(x, rng)[0]
        assert any(torch.equal(out, w) or torch.equal(out, w.flip(-1)) for w in windows)


def test_fixed_tensors_neither_train_nor_travel(tiny: Federation) -> None:
    client = make(tiny, "cnn-small")
    model = client.model()
    marks(model).fixed = of(["fc2.weight"]).names(model)
    before = snapshot(model)
    client.fit(model)
    assert "fc2.weight" not in changed(before, model)
    assert "fc2.weight" not in client.share(model)
    client.keep(model, HEAD)
    assert "fc2.bias" in client.state["kept"]


def test_quiet_passes_use_the_batch_and_leave_the_running_statistics_alone(tiny: Federation) -> None:
    client = make(tiny)
    batch = client.examples()
    loud, hushed = client.model().train(), client.model().train()
    before = snapshot(hushed)
    with quiet(hushed):
        out = hushed(batch)
    assert torch.equal(out, loud(batch))
    assert not changed(before, hushed)
    assert changed(before, loud)
    hushed(batch)  # afterwards it counts again
    assert changed(before, hushed) == changed(before, loud)


def test_means_over_batches_are_logged_once(tiny: Federation) -> None:
    client = make(tiny)
    for value in (1.0, 2.0, 6.0):
        client.log_mean(loss=torch.tensor(value), half=value / 2)
    assert client.records == {"loss": 3.0, "half": 1.5}


def test_a_common_stream_is_the_same_for_all_clients_and_rounds_and_differs_by_name_and_key(tiny: Federation) -> None:
    def draw(client: Client, *key: Any) -> int:
        return int(client.common_rng(*key).integers(2**62))

    first = draw(make(tiny), "common_batch", 3)
    assert first == draw(make(tiny, id=2, round=5), "common_batch", 3)
    others = [
        draw(make(tiny), "common_batch", 4),
        draw(make(tiny), "other", 3),
        draw(make(tiny, seed=1), "common_batch", 3),
    ]
    assert len({first, *others}) == 4
