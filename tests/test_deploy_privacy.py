"""What leaves a site: what its manifest lists, and nothing else; with sites inside this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")

from deploy_helpers import (
    NAMES,
    TINY,
    Near,
    ask,
    begun,
    body_of,
    conduct,
    data,
    job,
    make_kit,
    make_server,
    near,
    planned,
    root,
    simulate,
)

from pfed import Tensors
from pfed.deploy import manifest, message, site, worker
from pfed.errors import RunError, UserError

__all__ = ["data", "root"]  # fixtures
LABELS = [f"LABELMARK-{i}" for i in range(10)]
MARKS = [b"PATHMARK", b"LABELMARK", b"ERRORMARK", b"PRINTMARK", b"LOGMARK", b"NOTEMARK"]


def test_a_manifest_lists_what_a_method_sends(root: Path) -> None:
    """FedRep sends the body of the network and no head; numbers of samples only where they weigh."""
    plain = planned(root, {"method": "fedavg"})
    listed = planned(root, {"method": "fedrep"})
    values = listed["calls"]["update"]["values"]
    assert list(values) == ["body"]
    assert values["body"]["names"].keys() < plain["calls"]["update"]["values"]["params"]["names"].keys()
    assert listed["calls"]["update"]["bytes"] < plain["calls"]["update"]["bytes"]
    assert (listed["sizes"], plain["sizes"]) == (["test"], ["test", "train"])
    assert "personal/local-test" in listed["calls"]["@scores"]["values"]
    assert not any("correct" in key for call in listed["calls"].values() for key in call["values"])


def test_bytes_of_the_manifest_are_those_that_are_counted(root: Path) -> None:
    link = near(root)
    result = conduct(root, link, {"method": "fedrep"})
    listed = json.loads((root / "kits" / "alba" / "runs" / result.run / "manifest.json").read_text())
    up, _ = result.traffic[0]
    assert up == 2 * listed["calls"]["update"]["bytes"]


def test_the_same_promises_have_the_same_digest_and_others_not(root: Path) -> None:
    one = planned(root, {"method": "fedrep"})
    again = planned(root, {"method": "fedrep", "checkpoint_every": 1})  # of which nothing depends
    assert manifest.digest(one) == manifest.digest(again)
    assert manifest.digest(one) == manifest.digest(json.loads(json.dumps(one)))
    local = {**TINY["local"], "epochs": 2}
    for other in ({"rounds": 3}, {"seed": 5}, {"local": local}, {"test_fraction": 0.5}, {"eval_every": 2}):
        assert manifest.digest(one) != manifest.digest(planned(root, {"method": "fedrep", **other})), other


def test_a_run_begins_only_when_every_site_has_approved(root: Path) -> None:
    link = near(root, approve_within=None)
    with pytest.raises(RunError, match="Not approved yet at alba, bonn, oslo"):
        conduct(root, link, {"method": "fedrep"})
    for name in NAMES:
        (file,) = (root / "kits" / name / "manifests").iterdir()
        site.approve(root / "kits" / name, manifest.load(file))
    result = conduct(root, link, {"method": "fedrep"})
    assert result.state == "complete"
    with pytest.raises(RunError, match="Not approved yet at alba, bonn, oslo"):
        conduct(root, link, {"method": "fedrep", "hyper": {"head_epochs": 3}})


def test_a_manifest_of_another_site_can_not_be_approved(root: Path) -> None:
    _, listed = begun(root, {"method": "fedrep"})
    with pytest.raises(UserError, match="The manifest is of site 'alba', the kit of 'bonn'"):
        site.approve(make_kit(root, "bonn"), listed)


def test_what_fits_a_budget_is_approved_and_what_does_not_is_not(root: Path) -> None:
    _, listed = begun(root, {"method": "fedrep"})
    megabytes = listed["bytes_per_round"] / 1e6
    assert manifest.within(listed, megabytes)
    assert not manifest.within(listed, 0.99 * megabytes)
    listed["calls"]["update"]["values"]["word"] = {"kind": "text"}
    assert not manifest.within(listed, megabytes)


def test_a_site_refuses_what_is_not_in_its_manifest(root: Path) -> None:
    at, listed = begun(root, {"method": "fedrep", "hyper": {"head_epochs": 1}})
    body = body_of(listed)
    assert ask(at, "update", {"body": body})["code"] == "ok"
    assert ask(at, "update", {"body": body}, version=3, round=9) == {"code": "refused", "why": "round"}
    for step in ("@weights", "@new-test", "@representation", "predictor", "nothing"):
        assert ask(at, step, {"body": body}, version=None)["why"] == "step"
    assert ask(at, "update", {"body": body}, version=None)["why"] == "step"
    assert ask(at, "@accuracy", {"body": body}, version=4)["why"] == "step"
    assert ask(at, "update", {"body": body}, run="another")["why"] == "question"


def test_a_site_sends_nothing_that_it_did_not_list(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the step returns in the real run: a new name, the head, another type."""
    from pfed.methods.fedrep import FedRep

    at, listed = begun(root, {"method": "fedrep", "hyper": {"head_epochs": 1}})
    body = body_of(listed)
    sent: list[dict[str, Any]] = [
        {"body": body, "data": torch.zeros(3)},
        {"body": Tensors({**body, "head.weight": torch.zeros(2)})},
        {"body": Tensors({n: t.double() for n, t in body.items()})},
        {"body": Tensors(dict(list(body.items())[1:]))},
        {},
        {"body": 3.0},
        {"body": "a text"},
    ]
    for version, payload in enumerate(sent, start=1):

        def update(self: FedRep, client: Any, body: Any, payload: dict[str, Any] = payload) -> Any:
            return payload

        update._pfed_step = True  # type: ignore[attr-defined]
        monkeypatch.setattr(FedRep, "update", update)
        told = ask(at, "update", {"body": body}, round=version % 3, version=version)
        assert (told["code"], told["why"]) in {("refused", why) for why in ("name", "shape", "kind", "size", "lack")}, (
            payload
        )
    assert not list((root / "kits" / "alba" / "runs" / "test-1").glob("version-*"))


@pytest.mark.parametrize("run", ["../evil", "a/b", "", ".hidden"])
def test_the_name_of_a_run_is_no_path(run: str, root: Path) -> None:
    link = near(root)
    question = {"kind": "begin", "job": {**job(link, {"method": "fedrep"}), "run": run}}
    assert worker.answer(link.sites["alba"].answer, question, {})[0] == {"code": "refused", "why": "question"}


def test_methods_from_files_are_refused_at_the_site(root: Path, tmp_path: Path) -> None:
    link = near(root)
    told = job(link, {"method": "fedrep"})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    told["config"]["method"] = str(tmp_path / "evil.py")
    assert worker.answer(link.sites["alba"].answer, {"kind": "begin", "job": told}, {})[0]["code"] == "raised"
    assert not (tmp_path / "ran").exists()


def test_nothing_of_a_site_reaches_the_server(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks in paths, labels, errors, prints, logs and notes are at the site and nowhere else."""
    from pfed.methods.fedrep import FedRep

    original = FedRep.update

    def update(self: FedRep, client: Any, body: Tensors) -> Any:
        print("PRINTMARK")
        client.log(LOGMARK=1.0)
        client.notes.add("NOTEMARK")
        if client.id == 1 and client.round == 2:
            raise FileNotFoundError("ERRORMARK")
        return original(self, client, body)

    update._pfed_step = True  # type: ignore[attr-defined]
    monkeypatch.setattr(FedRep, "update", update)
    for name in NAMES:
        for label in range(10):
            target = tmp_path / "PATHMARK" / name / LABELS[label]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(data / "data" / name / str(label))
    make_server(tmp_path)
    link = Near({name: make_kit(tmp_path, name, data=str(tmp_path / "PATHMARK" / name)) for name in NAMES})
    result = conduct(tmp_path, link, {"method": "fedrep"})
    assert result.events[-1]["text"] == "update raised FileNotFoundError; its log says more"
    files = [file for place in ("runs", "kits/server") for file in (tmp_path / place).rglob("*") if file.is_file()]
    assert len(files) >= 3
    for content in [*link.received, *(file.read_bytes() for file in files)]:
        assert [mark for mark in MARKS if mark in content] == []
    own = b"".join(file.read_bytes() for file in (tmp_path / "kits" / "bonn").rglob("*") if file.is_file())
    assert [mark for mark in (b"PATHMARK", b"LABELMARK", b"LOGMARK", b"NOTEMARK") if mark not in own] == []


def test_numbers_of_samples_leave_only_where_they_weigh(root: Path) -> None:
    link = near(root)
    result = conduct(root, link, {"method": "fedrep"})
    assert [row["train"] for row in result.clients] == [0, 0, 0]
    assert all(row["test"] > 0 for row in result.clients)
    assert sum(row["samples"] for row in result.rounds) == 0
    weighed = conduct(root, near(root), {"method": "fedavg"})
    assert all(row["train"] > 0 for row in weighed.clients)
    assert [row["counts"] for row in weighed.clients] == [[], [], []]


def test_records_leave_only_where_they_are_asked_for_and_listed(root: Path) -> None:
    config = {"method": "fedbsd", "hyper": {"head_epochs": 1}}
    expected = simulate(root, config)[0].logs
    assert expected
    assert conduct(root, near(root), config).logs == [row for row in expected if row[1] == -1]
    assert conduct(root, near(root), config, records=True).logs == expected


def test_a_site_has_its_own_report_with_what_did_not_leave(root: Path) -> None:
    from pfed import Result

    link = near(root)
    result = conduct(root, link, {"method": "fedrep"})
    assert result.correct == {}
    own = Result.load(root / "kits" / "bonn" / "runs" / result.run)
    assert own.series["personal/local-test"][-1][1] == {0: result.values[1]}
    assert sum(own.correct[0]) / len(own.correct[0]) == result.values[1]
    assert own.clients[0]["name"] == "bonn"
    assert sum(own.clients[0]["counts"]) == own.clients[0]["train"] > 0


def test_classes_of_other_names_are_noticed_without_telling_them(root: Path) -> None:
    kits = {name: make_kit(root, name) for name in NAMES}
    kits["oslo"] = make_kit(root, "oslo", classes=list("9876543210"))
    with pytest.raises(UserError, match="Sites alba and oslo have classes of other names"):
        conduct(root, Near(kits), {"method": "fedavg"})


def test_each_site_may_have_its_own_architecture(root: Path) -> None:
    """As with a list of models in a simulation; a method that can't refuses."""
    models = dict(zip(NAMES, ["mlp", "cnn-small", "mlp"], strict=True))
    kits = {name: make_kit(root, name, model=model) for name, model in models.items()}
    config = {"method": "feddistill"}
    assert (
        conduct(root, Near(kits), config).series == simulate(root, {**config, "model": "mlp,cnn-small,mlp"})[0].series
    )
    for method, error in {"fedavg": "needs the same architecture at every client", "fedproto": "of one width"}.items():
        link = Near({name: make_kit(root, name, model=model) for name, model in models.items()})
        with pytest.raises(UserError, match=error):
            conduct(root, link, {"method": method})


def test_messages_hold_only_what_they_name(root: Path) -> None:
    packed = message.pack({"code": "ok"}, {"a": Tensors({"w": torch.ones(2).t()}), "b": 1.5, "c": torch.tensor(3)})
    about, payload = message.unpack(packed)
    assert about == {"code": "ok"}
    assert (payload["b"], payload["c"]) == (1.5, torch.tensor(3))
    packed["DXO"]["data"]["more"] = torch.ones(1)
    with pytest.raises(ValueError, match="tensors that it does not name"):
        message.unpack(packed)
