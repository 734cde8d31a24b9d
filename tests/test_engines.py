"""The engines, the exchange behind the cohort, and what the debug engine catches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import BEHAVIOUR, Probe, probe, replies

from pfed import Each, Experiment, Federation, Method, RunError, Tensors, UserError, compare, step
from pfed.engines.debug import StepError

every_engine = pytest.mark.parametrize("engine", ["serial", "processes"])


def test_debug_catches_a_change_of_what_was_received(tiny: Federation) -> None:
    def careless(client: Any, params: Tensors) -> None:
        params["layers.1.weight" if "layers.1.weight" in params else next(iter(params))].add_(1)

    with pytest.raises(StepError, match=r"Probe\.update on client 0 in round 1 changed the received \['params'\]"):
        probe(tiny, careless, "debug").run()


def test_debug_names_step_client_and_round(tiny: Federation) -> None:
    def broken(client: Any, params: Tensors) -> None:
        if client.id == 2:
            raise ZeroDivisionError("oops")

    with pytest.raises(StepError, match=r"Probe\.update on client 2 in round 1 raised ZeroDivisionError: oops"):
        probe(tiny, broken, "debug").run()


def test_debug_refuses_a_stream_used_by_two_steps(tiny: Federation) -> None:
    @dataclass(frozen=True)
    class Twice(Probe):
        def round(self, server: Any, cohort: Any) -> None:
            cohort.call(self.update, **self.download(server))
            cohort.call(self.again)

        @step
        def again(self, client: Any) -> None:
            client.rng("noise")

    BEHAVIOUR[0] = lambda client, params: client.rng("noise") and None
    with pytest.raises(StepError, match=r"again on client 0 in round 1 draws from stream 'noise', which update used"):
        Experiment(Twice(), tiny, "mlp", rounds=1, engine="debug").run()


def test_what_cannot_be_sent_is_named(tiny: Federation) -> None:
    with pytest.raises(StepError, match=r"The reply of Probe\.update: 'bad' is a list"):
        probe(tiny, lambda client, params: {"bad": [1, 2]}, "debug").run()


@every_engine
def test_a_client_that_raises_is_a_failure_and_the_others_go_on(tiny: Federation, engine: str) -> None:
    """Its state is as if the step had not run."""

    def update(client: Any, params: Tensors) -> dict[str, Any]:
        client.state["seen"] = 1
        if client.id == 1:
            raise ValueError("no disk")
        return {"id": client.id}

    experiment = probe(tiny, update, engine)
    result = experiment.run()
    assert sorted(replies(experiment)) == [0, 2, 3]
    assert [(e["client"], e["kind"], e["text"]) for e in result.events] == [
        (1, "error", "update raised ValueError: no disk")
    ]
    session = experiment.session
    assert session is not None
    assert sorted(session.exchange.versions) == [0, 2, 3]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda p: {"params": p * float("nan")}, r"params\['.*'\] is not finite"),
        (lambda p: {"params": Tensors({n: t.double() for n, t in p.items()})}, r"is float64 .*, not float32"),
        (lambda p: {"params": Tensors({n: t[None] for n, t in p.items()})}, r"is float32 \(1, .*, not float32"),
        (lambda p: {"params": Tensors(strange=torch.zeros(1))}, r"'strange'\] is a name that the model does not have"),
        (lambda p: {"x": torch.zeros(2**25)}, r"sent 134217728 bytes, more than the limit"),
        (lambda p: {"x": float("nan")}, r"x is not a number"),
    ],
)
@every_engine
def test_a_bad_reply_is_a_failure_with_its_reason(tiny: Federation, reply: Any, reason: str, engine: str) -> None:
    experiment = probe(tiny, lambda client, params: reply(params) if client.id == 3 else {}, engine)
    result = experiment.run()
    assert sorted(replies(experiment)) == [0, 1, 2]
    assert [event["kind"] for event in result.events] == ["bad reply"]
    assert re.search(reason, result.events[0]["text"])


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda p: {}, "there is no 'params' in it"),
        (lambda p: {"params": p.only(list(p)[:1])}, "params does not fit that of the other clients"),
    ],
)
@pytest.mark.parametrize("how", ["mean", "call"])
@every_engine
def test_what_cannot_be_combined_is_a_failure(tiny: Federation, reply: Any, reason: str, how: str, engine: str) -> None:
    @dataclass(frozen=True)
    class Averaging(Probe):
        def round(self, server: Any, cohort: Any) -> None:
            getattr(cohort, how)(self.update, "params", **self.download(server))

    BEHAVIOUR[0] = lambda client, params: reply(params) if client.id == 2 else {"params": params}
    result = Experiment(Averaging(), tiny, "mlp", rounds=1, engine=engine).run()
    assert [(event["client"], event["text"]) for event in result.events] == [(2, reason)]


def test_too_few_clients_stop_the_run_with_the_traceback_of_the_first(tiny: Federation) -> None:
    def broken(client: Any, params: Tensors) -> None:
        raise KeyError("my bug")

    with pytest.raises(
        RunError, match=r"0 clients answered, min_clients is 1\. Client client-0: update raised KeyError"
    ) as e:
        probe(tiny, broken).run()
    assert "in broken" in str(e.value)  # the user's own line is in the traceback


def test_each_differs_per_client(tiny: Federation) -> None:
    @dataclass(frozen=True)
    class Own(Probe):
        def download(self, server: Any) -> dict[str, Any]:
            return {"params": Each({0: 5, 1: 7}, default=1)}

        def predictor(self, client: Any, params: Any) -> Any:
            return client.model()

    BEHAVIOUR[0] = lambda client, params: {"twice": 2 * params}
    experiment = Experiment(Own(), tiny, "mlp", rounds=1)
    experiment.run()
    assert {client: reply["twice"] for client, reply in replies(experiment).items()} == {0: 10, 1: 14, 2: 2, 3: 2}


def test_an_engine_runs_steps_only(tiny: Federation) -> None:
    """A function that is not marked @step can't be called on a client."""

    @dataclass(frozen=True)
    class Unmarked(Probe):
        def round(self, server: Any, cohort: Any) -> None:
            cohort.call(self.predictor, **self.download(server))

    with pytest.raises(RunError, match="There is no step of Unmarked 'predictor'"):
        Experiment(Unmarked(), tiny, "mlp", rounds=1).run()


def test_sampling_by_fraction(tiny: Federation) -> None:
    """Half of four clients are two, a tiny share is still one, and rounds differ."""
    chosen = {}
    for fraction in (0.5, 0.01):
        experiment = Experiment("fedavg", tiny, "mlp", rounds=6, fraction=fraction, eval_every=0)
        experiment.run()
        assert experiment.session is not None
        chosen[fraction] = [experiment.session._chosen(t) for t in range(1, 7)]
    assert {len(ids) for ids in chosen[0.5]} == {2}
    assert {len(ids) for ids in chosen[0.01]} == {1}
    assert len({tuple(ids) for ids in chosen[0.5]}) > 1


def test_different_architectures_are_refused_where_weights_are_averaged(tiny: Federation) -> None:
    with pytest.raises(UserError, match="fedavg needs the same architecture at every client"):
        Experiment("fedavg", tiny, "mlp,cnn-small", rounds=1).run()


def test_simulated_seconds(tiny: Federation) -> None:
    """A thousand samples a second; the slowest of the round counts: 26 samples are 0.026 s, a straggler's 0.26 s."""
    plain = Experiment("fedavg", tiny, "mlp", rounds=1).run()
    slow = Experiment("fedavg", tiny, "mlp", rounds=1, stragglers=1.0).run()
    assert plain.rounds[1]["simulated"] == pytest.approx(0.026)
    assert slow.rounds[1]["simulated"] == pytest.approx(0.26)


@pytest.mark.parametrize("need", ["public", "validation"])
def test_data_that_a_method_needs(need: str) -> None:
    """Without them one sentence; in a comparison they are taken out for all methods alike."""

    @dataclass(frozen=True)
    class Needy(Probe):
        needs = frozenset({need})

    BEHAVIOUR[0] = lambda client, params: {}
    with pytest.raises(UserError, match=rf"needy needs {need} data\. Set run\.{need}, for example to 0\.1\."):
        Experiment(Needy(), "digits", "mlp", rounds=1).run()
    both = compare([Needy(), "local"], data="digits", model="mlp", rounds=1)
    assert [result.config[need] for result in both.results] == [0.1, 0.1]


@dataclass(frozen=True)
class Server(Method):
    """Notes what a server sees: who answered, a stream in common with the clients, and logs about clients."""

    def round(self, server: Any, cohort: Any) -> None:
        if cohort.round == 1:
            cohort.call(self.update)
        else:
            server["mean"] = cohort.mean(self.update, "draw")
        server[cohort.round] = {"answered": ",".join(map(str, cohort.answered))}
        server["draw"] = float(cohort.common_rng("dice", 1).random())
        cohort.log(own=1)
        cohort.log(2, about=3)

    @step
    def update(self, client: Any) -> Any:
        if (client.id, client.round) in ((0, 1), (3, 2)):
            raise ValueError
        client.log(seen=client.id)
        return {"draw": client.common_rng("dice", 1).random()}

    def predictor(self, client: Any, **download: Any) -> Any:
        return client.model()


def test_the_server_knows_who_answered_shares_a_stream_and_logs_about_clients(tiny: Federation) -> None:
    experiment = Experiment(Server(), tiny, "mlp", rounds=2)
    result = experiment.run()
    assert experiment.session is not None
    server = experiment.session.server
    assert [server[round]["answered"] for round in (1, 2)] == ["1,2,3", "0,1,2"]
    assert server["mean"] == server["draw"]  # all clients drew what the server drew
    logs = {(round, client, name): value for round, client, name, value in result.logs}
    assert logs[1, -1, "own"] == 1
    assert logs[2, 2, "about"] == 3
    assert logs[2, 0, "seen"] == 0


@dataclass(frozen=True)
class Picky(Server):
    """Wants three rounds."""

    def check(self, options: Any, federation: Any) -> None:
        if options.rounds < 3:
            raise UserError(f"Picky needs 3 rounds with {len(federation.clients)} clients. Got {options.rounds}.")


def test_a_method_can_refuse_a_run_before_it_begins(tiny: Federation, tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"Picky needs 3 rounds with 4 clients\. Got 2\."):
        Experiment(Picky(), tiny, "mlp", rounds=2).run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_take_the_data_is_refused_before_anything_is_written(
    tiny: Federation, tmp_path: Any
) -> None:
    with pytest.raises(UserError, match=r"^Linear can't be run on an input of shape \(1, 8, 8\): mat1 and mat2 shapes"):
        Experiment("fedavg", tiny, torch.nn.Linear(5, 10), rounds=1).run(tmp_path)
    assert not list(tmp_path.iterdir())
