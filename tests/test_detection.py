"""Object detection in the same core: engines, resume, privacy and bytes as in classification, and AP50 by domain."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from box_helpers import DOG, voc
from helpers import run
from test_contract import assert_same, states
from torch import nn

from pfed import Experiment, Federation, UserError, cli, compare, pictures, registry, report
from pfed.anatomy import SE, marks
from pfed.config import SplitOptions
from pfed.data import show, sources
from pfed.data.boxes import Scenes, to_dataset
from pfed.data.federate import federate
from pfed.data.scenes import composite
from pfed.method import ANY_TASK

MODEL = "fcos:seresnet18-small"
PREDICTOR = "head.classification_head.cls_logits"
LOCAL = {"lr": 0.01, "batch_size": 2}
QUICK = ["fedavg", "partialfed-adaptive"]
OTHERS = [name for name, cls in registry.methods().items() if cls.tasks == ANY_TASK and name not in (*QUICK, "all")]
every = pytest.mark.parametrize("method", [*QUICK, *(pytest.param(m, marks=pytest.mark.slow) for m in OTHERS)])


@pytest.fixture(scope="module")
def scenes() -> Federation:
    """Two clients with four scenes each, of five and of three classes."""
    photos = sources._scikit_learn_folder().parent / "images"
    made = composite(sources.load("digits"), photos, train=4, test=2, side=64, styles=("sketch", "inverted"))
    assert made.boxes is not None
    assert made.groups is not None
    domains = []
    for group, classes in enumerate((5, 3)):
        here = made.groups == group
        boxes = made.boxes[here].clone()
        boxes[boxes[..., 0] >= classes] = torch.tensor([-1.0, 0, 0, 0, 0, 0])
        names = made.group_classes[group][:classes]
        test = torch.isin(torch.where(here)[0], made.test)  # type: ignore[arg-type]
        domains.append(Scenes(made.group_names[group], made.x[here], boxes, names, test))
    return federate(to_dataset("scenes", domains), SplitOptions(), 0)


def short(method: str, data: Federation, **changes: Any) -> Experiment:
    return Experiment(method, data, MODEL, **{"task": "detection", "rounds": 2, "local": LOCAL, **changes})


def run_states(experiment: Experiment, runs: Path | None = None) -> dict[Any, Any]:
    experiment.run(runs)
    assert experiment.session is not None
    return states(experiment.session)


@every
def test_engines_agree(method: str, scenes: Federation) -> None:
    found = [
        run_states(short(method, scenes, rounds=1, engine=engine, workers=workers))
        for engine, workers in (("serial", None), ("debug", None), ("processes", 2))
    ]
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@every
def test_more_rounds_are_as_if_they_had_been_planned(method: str, scenes: Federation, tmp_path: Path) -> None:
    if registry.make(method, {}).fixed_rounds:
        pytest.skip("what it does depends on the number of rounds")
    one = short(method, scenes, rounds=1)
    one.run(tmp_path)
    (folder,) = tmp_path.iterdir()
    longer = short(method, scenes)
    longer.resume(folder)
    assert longer.session is not None
    assert_same(states(longer.session), run_states(short(method, scenes)))


@every
def test_class_heads_stay_at_their_clients(method: str, scenes: Federation) -> None:
    """Their shapes differ between domains; everything else that travels has the same shape everywhere."""
    done = run(method, scenes, MODEL, task="detection", rounds=1, local=LOCAL)
    own = marks(short(method, scenes)._pool().template(0)).local
    assert any("cls_logits" in name for name in own)
    for message in done.messages:
        assert not message.names & own
    up = sum(
        message.up[key].nbytes for message in done.messages for key in message.up if hasattr(message.up[key], "nbytes")
    )
    assert done.result.bytes_up == up


@pytest.mark.parametrize("method", [*QUICK, *OTHERS])
def test_every_method_takes_domains_with_classes_of_their_own(method: str, scenes: Federation) -> None:
    """Whose models differ in the class heads. What the methods then do with them is for the slow tests."""
    pool = short(method, scenes)._pool()
    shapes = [tuple(pool.template(client).state_dict()[f"{PREDICTOR}.bias"].shape) for client in range(2)]
    assert shapes == [(5,), (3,)]


def test_models_start_alike_but_for_their_class_heads(scenes: Federation) -> None:
    pool = short("fedavg", scenes)._pool()
    one, two = (pool.take(client).state_dict() for client in range(2))
    differing = {name for name in one if one[name].shape != two[name].shape or not torch.equal(one[name], two[name])}
    assert differing
    assert all("cls_logits" in name for name in differing)


def test_scores_are_average_precision(scenes: Federation) -> None:
    result = short("fedavg", scenes, rounds=1, eval_every=0).run()
    main = {
        name.removeprefix("personal/local-test") for name in result.metrics if name.startswith("personal/local-test")
    }
    assert {"", "/ap", "/ap50-voc07"} <= main
    assert any(name.startswith("/ap50/") for name in main)
    header, _ = compare(["fedavg"], data=scenes, model=MODEL, task="detection", rounds=0).cells()
    assert header[:5] == ["method", "AP50 %", "sketch", "inverted", "worst client"]
    assert "worst decile" not in header


def test_it_learns(scenes: Federation) -> None:
    """The loss of the last round is well below that of the first."""
    data = dataclasses.replace(scenes, clients=scenes.clients[:1])
    experiment = short("local", data, rounds=1, local={"lr": 0.02, "batch_size": 4})
    experiment.run()
    assert experiment.session is not None
    client = experiment.session._runner.client(0, 1, {})
    before = client.fit(client.model(), epochs=1).loss
    model = client.model()
    client.fit(model, epochs=15, stream="long")
    assert client.fit(model, epochs=1, stream="after").loss < 0.7 * before


@pytest.mark.parametrize("strategy", ["wo_se_bn", "wo_fb"])
def test_partialfed_loads_what_its_strategy_says(strategy: str, scenes: Federation) -> None:
    done = run(
        "partialfed-fix",
        scenes,
        MODEL,
        task="detection",
        rounds=2,
        local=LOCAL,
        hyper={"strategy": strategy, "finetune_epochs": 0, "skip_unused": True},
    )
    sent = {name for message in done.messages if message.round == 2 for name in message.names}
    squeeze = SE.names(short("local", scenes)._pool().template(0))
    first = {name for name in squeeze if ".0.se." in name}
    assert squeeze
    assert not sent & (squeeze if strategy == "wo_se_bn" else first)
    assert strategy == "wo_se_bn" or sent & (squeeze - first)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("fedproto", {}, r"fedproto does not do detection; it does classification\."),
        (
            "fedavg",
            {"new_test": "mean_prob"},
            r"run\.new_test is for classification\. Got it with run\.task 'detection'",
        ),
        (
            "fedavg",
            {"task": "classification"},
            r"The data have boxes, which is for run\.task 'detection'\. Got 'classif",
        ),
        ("fedavg", {"augment": "crop-flip"}, "crop-flip"),
        ("all", {}, r"all needs the same classes at every client\. Got 5 of sketch and 3 of inverted\."),
    ],
)
def test_what_does_not_fit_is_said(method: str, changes: dict[str, Any], message: str, scenes: Federation) -> None:
    with pytest.raises(UserError, match=message):
        short(method, scenes, **changes).run()


def test_labels_are_no_boxes(tiny: Federation) -> None:
    with pytest.raises(
        UserError, match=r"is for run\.task 'classification'\. Got 'detection'; data with boxes are 'composite'"
    ):
        Experiment("fedavg", tiny, MODEL, task="detection").run()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = {f"{i}": [DOG] for i in range(4)}
    for k in range(2):
        voc(tmp_path / "data" / f"hospital-{k}", images, train=["0", "1", "2"], test=["3"])
    words = ["run", "fedbn", "--task", "detection", "--data", str(tmp_path / "data"), "--image-size", "64"]
    assert cli.main([*words, "--rounds", "1", "--local.batch-size", "2", "--runs", str(tmp_path / "runs")]) == 0
    header, _, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["method", "AP50", "%", "hospital-0", "hospital-1"]
    assert row.split()[0] == "fedbn"


def test_pictures_show_what_is_there_and_what_is_found(scenes: Federation, tmp_path: Path) -> None:
    class Says(nn.Module):
        """One box, always the same."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.full((len(x), 2, 6), -1.0)
            out[:, 0] = torch.tensor([8.0, 8, 24, 24, 0.9, 1])
            return out

    drawn = np.asarray(pictures.draw(Says(), scenes.clients[0]))
    assert drawn.shape == (256, 2 * 256 + 4, 3)
    assert (drawn[4 * 8 : 4 * 24, 4 * 8] == pictures.FOUND).all()  # the left edge, four times enlarged
    _, boxes = scenes.clients[0].test.take()
    _, x1, y1, _, y2, _ = (int(4 * value) for value in boxes[0, 0])
    middle = drawn[(y1 + y2) // 2, x1]
    assert (middle == pictures.TRUE).all() or (middle == pictures.FOUND).all()


def test_of_several_boxes_at_one_place_the_likeliest_is_drawn_with_its_label_inside() -> None:
    """At the lower right corner: the stronger one's edges, nothing of the weaker one, and no label cut off."""
    blank = torch.zeros(3, 256, 256, dtype=torch.uint8)
    none = torch.full((1, 6), -1.0)
    strong, weak = torch.tensor([[200.0, 200, 250, 250, 0.9, 1], [204, 204, 254, 254, 0.4, 0]])
    alone = pictures._scene(blank, none, strong[None], ("dog", "a very long name of a class"))
    both = pictures._scene(blank, none, torch.stack([strong, weak]), ("dog", "a very long name of a class"))
    assert np.array_equal(np.asarray(alone), np.asarray(both))
    shown = (np.asarray(both) == pictures.FOUND).all(2)
    assert shown[220, 200]
    assert shown[240:, 20:190].any()  # the label, moved to the left and up
    assert not shown[:, 255].any()


def test_a_run_leaves_pictures_and_the_report_shows_them(scenes: Federation, tmp_path: Path) -> None:
    result = short("local", scenes, rounds=1).run(tmp_path)
    assert result.folder is not None
    assert [name for name, _ in pictures.files(result.folder)] == ["sketch", "inverted"]
    page = report.write([result], tmp_path / "page.html").read_text()
    assert page.count("data:image/png;base64") == 2
    assert "AP50 over rounds and bytes" in page
    assert "local, sketch: green what is there" in page
    assert "Training boxes of each client by class." in page


def test_boxes_are_counted_as_boxes(scenes: Federation) -> None:
    lines = show.text(scenes).splitlines()
    boxes = sum(int((client.train.take()[1][..., 0] >= 0).sum()) for client in scenes.clients)
    assert f"{boxes} training boxes, 2 clients" in lines[0]
    assert any(line.startswith("boxes:  · none") for line in lines)
    assert "samples" not in "".join(lines)
