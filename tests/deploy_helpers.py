"""What tests of federations share: sites with small data, and a link to them inside this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pfed import Experiment, Federation, Result, Samples, Tensors, load, store
from pfed.data.user import open_user
from pfed.deploy import remote
from pfed.engines.base import Engine, States
from pfed.engines.nvflare import Link
from pfed.engines.serial import Serial
from pfed.runner import Runner
from pfed.store import Store
from pfed.wire import Payload

NAMES = ("alba", "bonn", "oslo")
TINY: dict[str, Any] = {"rounds": 2, "model": "mlp", "local": {"lr": 0.05, "batch_size": 8}}


def write_data(root: Path, sites: Iterable[str] = NAMES, each: int = 40, public: int = 40) -> None:
    """A folder of images for each site under `data`, and a common one under `public`: ten classes each."""
    digits = load("digits")
    rows = np.random.default_rng(3).permutation(len(digits.y))
    for name, count in [*((f"data/{site}", each) for site in sites), ("public", public)]:
        chosen, rows = rows[:count], rows[count:]
        for row in chosen:
            _save(root / name / str(int(digits.y[row])) / f"{row}.png", digits.x[row, 0])
        for label in range(10):  # no site is without a class
            if not (root / name / str(label)).exists():
                row = next(row for row in rows if digits.y[row] == label)
                _save(root / name / str(label) / f"{row}.png", digits.x[row, 0])


def _save(path: Path, pixels: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scaled = pixels if pixels.dtype == torch.uint8 else (pixels * 255).byte()
    Image.fromarray(scaled.numpy()).save(path)


def make_kit(root: Path, site: str, **settings: Any) -> Path:
    """A site's kit without certificates: enough for what happens behind the wire."""
    kit = root / "kits" / site
    for name in ("startup", "local"):
        (kit / name).mkdir(parents=True, exist_ok=True)
    (kit / "startup" / "fed_client.json").write_text(json.dumps({"client": {"fqsn": site}}))
    told = {"data": str(root / "data" / site), "approve_within": 1000.0, **settings}
    (kit / "local" / "pfed.json").write_text(json.dumps(told))
    return kit


def make_server(root: Path, **settings: Any) -> Path:
    kit = root / "kits" / "server"
    (kit / "local").mkdir(parents=True, exist_ok=True)
    (kit / "local" / "pfed.json").write_text(json.dumps({"runs": str(root / "runs"), **settings}))
    return kit


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data of three sites, and a public set."""
    root = tmp_path_factory.mktemp("federation")
    write_data(root, each=20, public=10)
    return root


@pytest.fixture
def root(data: Path, tmp_path: Path) -> Path:
    """A place with these data and a server's kit."""
    for name in ("data", "public"):
        (tmp_path / name).symlink_to(data / name)
    make_server(tmp_path)
    return tmp_path


class Near(Link):
    """A link to sites in this process: all but NVFlare's sockets, and all messages to be seen."""

    def __init__(self, kits: Mapping[str, Path]):
        from nvflare.apis.utils.decomposers import flare_decomposers

        from pfed.deploy import message
        from pfed.deploy.site import Site

        flare_decomposers.register()  # before the first message, as NVFlare does: a session of a later test needs it
        message.register()
        self.sites = {name: Site(kit) for name, kit in kits.items()}
        self.received: list[bytes] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.change: Callable[[str, dict[str, Any], Payload], tuple[dict[str, Any], Payload] | None] | None = None
        self.silent: set[str] = set()
        self._thread = ThreadPoolExecutor(1)  # one after another: they share torch's generator, and SQLite wants it

    @property
    def aborted(self) -> bool:
        return False

    def echo(self, site: str) -> bool:
        return site in self.sites and site not in self.silent

    def ask(self, site: str, about: Mapping[str, Any], payload: Payload, timeout: float, given_up: Any = None) -> Any:
        if not self.echo(site):
            return None
        return self._thread.submit(self._answer, site, about, payload).result()

    def _answer(self, site: str, about: Mapping[str, Any], payload: Payload) -> Any:
        from nvflare.fuel.utils import fobs

        from pfed.deploy import message, worker

        question, sent = message.unpack(fobs.loads(fobs.dumps(message.pack(about, payload))))
        self.asked.append((site, question))
        told, found = worker.answer(self.sites[site].answer, question, sent)
        if self.change is not None and about["kind"] == "step":
            changed = self.change(site, {**question, **told}, found)
            if changed is None:
                return None
            told, found = changed
        data = fobs.dumps(message.pack(told, found))
        self.received.append(data)
        return fobs.loads(data)


def near(root: Path, **settings: Any) -> Near:
    return Near({name: make_kit(root, name, **settings) for name in NAMES})


def job(link: Near, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What the server tells the sites when a run begins."""
    settings = remote.check({**TINY, **config, "clients": len(NAMES)})
    facts = link.sites["alba"].facts()
    told = {"run": "test-1", "config": settings, "sites": list(NAMES), "records": False, "privacy": None, **more}
    return {**told, "facts": json.loads(json.dumps(asdict(facts)))}


def begun(root: Path, config: Mapping[str, Any], **more: Any) -> tuple[Any, dict[str, Any]]:
    """A site in a run, and the manifest that it has agreed to."""
    link = near(root)
    told, _ = link.sites["alba"].answer({"kind": "begin", "job": job(link, config, **more)}, {})
    return link.sites["alba"], told["manifest"]


def planned(root: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a run that nobody begins."""
    link = near(root)
    return link.sites["alba"].plan(job(link, config))


def body_of(listed: Mapping[str, Any]) -> Tensors:
    """A body that fits what the manifest of FedRep lists."""
    names = listed["calls"]["update"]["values"]["body"]["names"]
    return Tensors({name: torch.zeros(shape) for name, (_, *shape) in names.items()})


def ask(at: Any, step: str, payload: Payload, **more: Any) -> dict[str, Any]:
    """What a site says of a step, beside the payload."""
    from pfed.deploy import worker

    about = {"kind": "step", "run": "test-1", "step": step, "round": 1, "base": 0, "version": 1, "since": 0, **more}
    return worker.answer(at.answer, about, payload)[0]


def conduct(root: Path, link: Link, config: Mapping[str, Any], **more: Any) -> Result:
    """A run at the server, through the link."""
    from pfed.deploy.controller import Conductor

    run = plan(root, config, **more)
    again(root, link, run, Conductor)
    return Result.load(root / "runs" / run)


def plan(root: Path, config: Mapping[str, Any], **more: Any) -> str:
    """A run's folder at the server with its job."""
    settings = remote.check({**TINY, **config, "clients": len(NAMES)})
    with contextlib.closing(store.create(root / "runs", settings["method"].replace("+", "-"))) as opened:
        job = {"run": opened.run, "config": settings, "sites": list(NAMES), "deadline": 60.0}
        opened.record.set(job={"records": False, "privacy": None, **job, **more})
        return opened.run


def again(root: Path, link: Link, run: str, conductor: Any) -> None:
    with contextlib.closing(store.Record(root / "runs" / run / "record.sqlite", readonly=True)) as record:
        job = record.get("job")
    conductor(link, job, root / "kits" / "server").run()


def simulate(root: Path, config: Mapping[str, Any]) -> tuple[Result, dict[str, Any], dict[int, Any]]:
    """The same run by the serial engine on the same data: its result, the server's state and the clients'."""
    data = open_user(root / "data")
    assert isinstance(data, Federation)
    public = open_user(root / "public")
    common = Samples.of(public.x, public.y)  # type: ignore[union-attr]
    values = {**TINY, **config}
    method, model = values.pop("method"), values.pop("model")
    experiment = Experiment(method, replace(data, public=common), model, **values)
    kept: list[States] = []

    def carrier(runner: Runner, states: States) -> Engine:
        kept.append(states)
        return Serial(runner, states)

    experiment.carrier = carrier
    result = experiment.run()
    assert experiment.session is not None
    versions = experiment.session.exchange.versions
    return result, experiment.session.server, {c: kept[0].load(c, v) for c, v in versions.items()}


def left_behind(root: Path, run: str, kits: Mapping[str, Path]) -> tuple[dict[str, Any], dict[int, Any]]:
    """The server's state after a run, and the private states of its sites."""
    with contextlib.closing(Store(root / "runs" / run)) as opened:
        checkpoint = opened.restore()
    assert checkpoint is not None
    states = {}
    for client, version in checkpoint.versions.items():
        file = kits[NAMES[client]] / "runs" / run / f"version-{version:08d}"
        states[client] = store.read_tree(file)
    return checkpoint.server, states


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        alike = isinstance(one, Tensors) == isinstance(other, Tensors) and one.keys() == other.keys()
        return alike and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)
