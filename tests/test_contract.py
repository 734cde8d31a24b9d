"""The contract battery: every registered method faces it without test code of its own."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import safetensors.torch
import torch
from torch import Tensor

from pfed import Experiment, Federation, Result, Tensors, UserError, options, registry, wire
from pfed.data.base import ClientData
from pfed.engines.base import POOLED, Call, Reply
from pfed.engines.serial import Serial
from pfed.record import Record
from pfed.session import Session

METHODS = [*registry.methods(), "fedavg+ft", "ditto+ft", "partialfed-fix+ft"]
MODELS = ["cnn-small", "cnn-small-bn"]
LOCAL = {"lr": 0.1, "batch_size": 8, "momentum": 0.5}
QUICK: dict[str, dict[str, Any]] = {  # what takes long, and lets rounding grow
    "fedetf": {"alternations": 1},
    "feddf": {"server_steps": 20},
    "fedmd": {"public_epochs": 1, "private_epochs": 1},
}

every_method = pytest.mark.parametrize("method", METHODS)
every_model = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(autouse=True)
def _without_batchnorm_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(FedBN|SiloBN|PartialFed): the model has no BatchNorm")
        yield


def short(method: str, data: Federation, model: str = "cnn-small", **changes: Any) -> Experiment:
    settings = {"rounds": 2, "fraction": 0.5, "local": LOCAL, "hyper": QUICK.get(method), **changes}
    return Experiment(method, data, model, **settings)


def run(experiment: Experiment, runs: Path | None = None) -> Session:
    """Run it, and give back the session that holds server and client states."""
    experiment.run(runs)
    session = experiment.session
    assert session is not None
    return session


def states(session: Session) -> dict[Any, Any]:
    """Everything that a run leaves behind: the server's state and each client's."""
    versions = session.exchange.versions
    clients = {client: session.store.states.load(client, version) for client, version in sorted(versions.items())}
    return {"server": session.server, "clients": clients}


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {name: leaf for key, value in tree.items() for name, leaf in flat(value, f"{path}/{key}").items()}
    return {path: tree}


def assert_same(a: Any, b: Any) -> None:
    """Two trees hold the same bits."""
    one, two = flat(a), flat(b)
    assert one.keys() == two.keys()
    for name in one:
        same = torch.equal(one[name], two[name]) if isinstance(one[name], Tensor) else one[name] == two[name]
        assert same, name


@every_method
@every_model
def test_engines_agree(method: str, model: str, tiny: Federation) -> None:
    """Neither sending everything through bytes nor two processes change a bit of what a run leaves or finds."""
    engines = {"serial": None, "debug": None, "processes": 2}
    left, found = [], []
    for engine, workers in engines.items():
        experiment = short(method, tiny, model, engine=engine, workers=workers)
        result = experiment.run()
        assert experiment.session is not None
        left.append(states(experiment.session))
        found.append((result.series, result.logs, result.traffic, result.correct, result.events))
    assert_same(left[0], left[1])
    assert_same(left[0], left[2])
    assert found[0] == found[1] == found[2]


@every_method
@every_model
def test_shortcuts_agree_with_the_long_way(method: str, model: str, tiny: Federation) -> None:
    """What is frozen is computed once, or at each pass: up to the order of sums the same comes out."""
    local = {**LOCAL, "lr": 0.01, "epochs": 2}
    one, two = (
        flat(states(run(short(method, tiny, model, rounds=1, local=local, exact_shortcuts=exact))))
        for exact in (True, False)
    )
    assert one.keys() == two.keys()
    for name in one:
        if isinstance(one[name], Tensor):
            torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)


@every_method
@every_model
def test_resume_is_exact(method: str, model: str, tiny: Federation, tmp_path: Path) -> None:
    """Going on from the middle ends in the same bits as never having stopped."""
    straight = run(short(method, tiny, model, rounds=4, checkpoint_every=2), tmp_path)
    folder = straight.store.folder
    assert folder is not None
    last = sorted(folder.glob("checkpoint-*"))[-1]
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    (again / last.name).unlink()
    with_record = Record(again / "record.sqlite")
    with_record.set(state="stopped")
    with_record.close()
    before = short(method, tiny, model, rounds=4, checkpoint_every=2)
    result = before.resume(again)
    assert (again / last.name).is_file()
    assert before.session is not None
    assert_same(states(before.session), states(straight))
    assert result.metrics == short(method, tiny, model, rounds=4).run().metrics


@every_method
def test_a_finished_run_can_have_more_rounds(method: str, tiny: Federation, tmp_path: Path) -> None:
    """As if it had been planned so; refused where what was done depends on the number of rounds."""
    short(method, tiny, rounds=2, checkpoint_every=0).run(tmp_path)
    (folder,) = tmp_path.iterdir()
    longer = short(method, tiny, rounds=4, checkpoint_every=0)
    if longer.method.fixed_rounds:
        with pytest.raises(UserError, match=rf"must have 2 rounds: what {re.escape(longer.method.label)} does depends"):
            longer.resume(folder)
        assert Result.load(folder).state == "complete"
        return
    result = longer.resume(folder)
    straight = short(method, tiny, rounds=4, checkpoint_every=0)
    expected = straight.run()
    assert longer.session is not None
    assert straight.session is not None
    assert_same(states(longer.session), states(straight.session))
    assert result.metrics == expected.metrics
    assert (result.rounds[-1]["round"], result.config["rounds"]) == (expected.rounds[-1]["round"], 4)


class Spy(Serial):
    """Keeps what crosses, and can plant a sentinel in every float of the clients' private state."""

    sentinel: float | None = None

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.down: list[tuple[int, Mapping[str, Any]]] = []
        self.up: list[tuple[int, Mapping[str, Any]]] = []
        self.kept: dict[int, set[str]] = {}
        self.calls: set[tuple[int, int]] = set()  # client and round

    def map(self, call: Call) -> Iterator[tuple[int, Any]]:
        if self.sentinel is not None:
            for client in call.own:
                if call.base[client]:
                    state = self._states.load(client, call.base[client])
                    self._states.save(client, call.base[client], wire.map_tensors(state, self._plant))
        for client, answer in super().map(call):
            assert isinstance(answer, Reply), answer
            if call.version is not None:
                self.calls.add((client, call.round))
            if call.version is not None and client != POOLED:
                self.down.append((client, {**call.common, **call.own[client]}))
                self.up.append((client, answer.payload))
                after = self._states.load(client, call.version)
                self.kept[client] = {n for n, t in after.get("kept", {}).items() if t.is_floating_point()}
            yield client, answer

    def _plant(self, tensor: Tensor) -> Tensor:
        assert self.sentinel is not None
        return torch.full_like(tensor, self.sentinel) if tensor.is_floating_point() else tensor


@pytest.fixture
def spies(monkeypatch: pytest.MonkeyPatch) -> list[Spy]:
    made: list[Spy] = []

    def engine(name: str, *args: Any) -> Spy:
        made.append(Spy(*args))
        return made[-1]

    monkeypatch.setattr("pfed.session.engine", engine)
    return made


@every_method
def test_unsampled_clients_are_untouched(method: str, tiny: Federation, spies: list[Spy]) -> None:
    """With one of four clients in one round, no other is called in it, nor has it a state, unless all take part."""
    session = run(short(method, tiny, fraction=0.25, rounds=1))
    chosen = set(session._chosen(1))
    called = {client for client, round in spies[0].calls if round == 1 and client != POOLED}
    assert len(chosen) == (4 if session.method.participation == "all" else 1)
    assert called <= chosen
    before = {client for client, round in spies[0].calls if round < 1}  # what comes before the rounds is everybody's,
    if session.last == 1:  # and so is what comes after them, such as fine-tuning
        assert {client for client, state in states(session)["clients"].items() if state} <= chosen | before | {POOLED}


@every_method
@every_model
def test_private_names_never_leave(method: str, model: str, tiny: Federation, spies: list[Spy]) -> None:
    """What a client keeps for itself is in no message to the server; counters travel in neither direction."""
    run(short(method, tiny, model))
    for client, payload in spies[0].up:
        names = {name for value in payload.values() if isinstance(value, Tensors) for name in value}
        assert not names & spies[0].kept[client]
    for _, payload in [*spies[0].up, *spies[0].down]:
        tensors = [t for value in payload.values() if isinstance(value, Tensors) for t in value.values()]
        assert all(t.is_floating_point() for t in tensors)


@every_method
@every_model
def test_private_values_never_leave(
    method: str, model: str, tiny: Federation, spies: list[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number planted in every private element appears in no message, under whatever name."""
    if registry.make(method, {}).sends_all:
        pytest.skip("the method sends the whole model, by definition")
    monkeypatch.setattr(Spy, "sentinel", 3.0)
    local = {"lr": 1e-9, "batch_size": 8, "momentum": 0.0}
    run(short(method, tiny, model, fraction=1.0, local=local, eval_every=0, keep_optimizer=False))
    for _, payload in spies[0].up:
        for value in payload.values():
            for name, tensor in value.items() if isinstance(value, Tensors) else ():
                assert not torch.isclose(tensor, torch.tensor(3.0), rtol=1e-4).any(), name


@every_method
def test_counted_bytes_are_the_encoded_tensors(method: str, tiny: Federation, spies: list[Spy]) -> None:
    """The record's bytes equal the tensor part of what safetensors would put on a wire."""
    experiment = short(method, tiny, "cnn-small-bn", fraction=1.0)
    result = experiment.run()

    def encoded(payload: Mapping[str, Any]) -> int:
        tensors = {n: t.contiguous() for n, t in flat(payload).items() if isinstance(t, Tensor)}
        data = safetensors.torch.save(tensors)
        return len(data) - 8 - int.from_bytes(data[:8], "little")

    assert result.bytes_up == sum(encoded(payload) for _, payload in spies[0].up)
    assert result.bytes_down == sum(encoded(payload) for _, payload in spies[0].down)


@every_method
def test_config_round_trips(method: str) -> None:
    experiment = Experiment(method, rounds=3, local={"lr": 0.3}, classes_per_client=2)
    again = Experiment.from_config(json.loads(json.dumps(experiment.config())))
    assert again.config() == experiment.config()
    assert (again.options, again.method) == (experiment.options, experiment.method)


def _wrong_values() -> Iterator[tuple[str, str, Any]]:
    for method in METHODS:
        for field, cls in registry.fields(method).items():
            spec = {f.name: f for f in dataclasses.fields(cls)}[field]
            rules = spec.metadata.get("rules", {})
            hint = options.hints(cls)[field]
            number = float if float in (hint, *get_args(hint)) else int
            if rules:
                wrong = number(rules["ge"] - 1 if "ge" in rules else rules["gt"])
                yield method, field, (wrong,) if get_origin(hint) is tuple else wrong
            elif spec.metadata.get("check"):
                yield method, field, "no such thing"
            elif get_origin(hint) is Literal:
                yield method, field, f"not-{get_args(hint)[0]}"
            elif hint is bool:
                yield method, field, "perhaps"


@pytest.mark.parametrize(("method", "field", "value"), list(_wrong_values()))
def test_wrong_hyperparameters_are_named(method: str, field: str, value: Any) -> None:
    """`FedProx.mu must be >= 0. Got -1.0.`"""
    shown = value[0] if isinstance(value, tuple) else value
    with pytest.raises(UserError, match=rf"\.{field} must be .*\. Got .*{shown}"):
        registry.make(method, {field: value})


def test_every_option_has_a_rule() -> None:
    """An option without a range, a choice or a flag could take nonsense in silence."""
    checked = {(method, field) for method, field, _ in _wrong_values()}
    assert checked == {(method, field) for method in METHODS for field in registry.fields(method)}


@every_method
@every_model
def test_odd_clients(method: str, model: str, tiny: Federation) -> None:
    """One class only, one sample only, no test data: the run goes through and judges those that can be judged."""
    one_class, one_sample, no_test, ordinary = tiny.clients
    same = torch.where(one_class.train.labels == one_class.train.labels[0])[0]
    clients = (
        dataclasses.replace(one_class, train=one_class.train.part(same)),
        dataclasses.replace(one_sample, train=one_sample.train.part([0])),
        dataclasses.replace(no_test, test=no_test.test.part([])),
        ordinary,
    )
    result = short(method, dataclasses.replace(tiny, clients=clients), model, fraction=1.0).run()
    assert sorted(result.values) == [0, 1, 3]
    assert not [event for event in result.events if event["kind"] == "error"]


@every_method
def test_a_client_that_cannot_train_weighs_nothing(method: str, tiny: Federation) -> None:
    """With BatchNorm, one sample makes no batch; the average is that of the others."""
    others = tiny.clients[:3]
    single = dataclasses.replace(tiny.clients[3], train=tiny.clients[3].train.part([0]))
    with_it, without = (
        run(short(method, dataclasses.replace(tiny, clients=clients), "cnn-small-bn", fraction=1.0))
        for clients in ((*others, single), others)
    )
    if "pooled" in with_it.method.needs or method == "scaffold":
        return  # the union has one sample more; SCAFFOLD divides by the number of all clients
    for session in (with_it, without):
        session.server.pop("classifier", None)  # SphereFed's calibration counts every sample
    assert_same(with_it.server, without.server)


@every_method
def test_dropped_and_late_clients(method: str, tiny: Federation) -> None:
    """The round goes on with those that answer, and the record says who did not."""
    settings = {"dropout": 0.3, "stragglers": 0.5, "slowdown": 100.0, "deadline": 1.0, "rounds": 4, "fraction": 1.0}
    result = short(method, tiny, **settings, seed=3).run()
    kinds = {event["kind"] for event in result.events}
    assert kinds <= {"dropped", "late"}
    if "pooled" not in registry.make(method, {}).needs:
        assert kinds == {"dropped", "late"}
    assert result.state == "complete"


@every_method
def test_learns(method: str) -> None:
    """Ten classes, so chance is a tenth."""
    local = {"lr": 0.1, "batch_size": 32, "epochs": 2}
    public = 0.1 if "public" in registry.make(method, {}).needs else 0.0
    experiment = Experiment(method, "digits", "mlp", clients=4, rounds=4, local=local, eval_every=0, public=public)
    assert experiment.run().metrics["personal/local-test"] > 0.6


def _reductions() -> list[Any]:
    found = registry.methods().items()
    return [pytest.param(name, r, id=f"{name}-{r.settings}-{r.other}") for name, cls in found for r in cls.reduces_to]


@pytest.mark.parametrize(("method", "reduction"), _reductions())
@every_model
def test_declared_identities(method: str, reduction: Any, model: str, tiny: Federation) -> None:
    """With these settings the personal models are those of the other method, bit for bit."""
    plain = {"rounds": 3, "fraction": 1.0, "keep_optimizer": False}
    one = short(method, tiny, model, hyper=reduction.settings, **plain)
    two = short(reduction.other, tiny, model, hyper=reduction.other_settings, **plain)
    one_result, two_result = one.run(), two.run()
    for client in range(len(tiny.clients)):
        assert_same(one.model(client).state_dict(), two.model(client).state_dict())
    assert one_result.values == two_result.values


@every_method
def test_docstring_teaches(method: str) -> None:
    """One line with the paper, a runnable example, and what differs from the paper."""
    cls = type(registry.make(method, {}))
    text = inspect.getdoc(cls) or ""
    assert "Deviations from the paper" in text
    assert ">>>" in text
    assert method.endswith("+ft") or registry.describe(method)[0]["paper"]


@every_method
def test_personal_model_is_the_one_that_was_judged(method: str, tiny: Federation) -> None:
    """Save, load, same accuracy: the model handed out gives the accuracy that the run reports."""
    experiment = short(method, tiny)
    result = experiment.run()
    client: ClientData = tiny.clients[2]
    x, y = client.test.take()
    with torch.no_grad():
        right = (experiment.model(2)(x).argmax(1) == y).double().mean().item()
    assert right == pytest.approx(result.values[2], abs=1e-12)
