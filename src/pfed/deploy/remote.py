"""An experiment whose clients are sites: what server and sites must build alike, from the same description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from pfed.config import SplitOptions
from pfed.data.base import ClientData, Federation, Samples
from pfed.data.user import read_user
from pfed.errors import UserError
from pfed.experiment import Experiment
from pfed.runner import Runner
from pfed.session import Carrier
from pfed.store import Store
from pfed.tasks import task

# Settings of a simulation that have no meaning where the data are the sites' own, or that would move them.
SIMULATED = {
    "dropout": "sites drop out by themselves",
    "stragglers": "sites are slow by themselves",
    "new_test": "no site has the others' test data",
    "external": "no site has the data of a domain that nobody has",
    "representation": "it compares features of common samples",
    "public": "the public set is given by 'server --public' and 'join --public'",
    "public_in_train": "the public set is given by 'server --public' and 'join --public'",
    "together": "a site is one client",
    "track": "the server's record has the numbers",
}
OWN = {"clients", "test_fraction", "validation"}  # settings of a split that sites have in common


@dataclass(frozen=True)
class Facts:
    """What a site says of its data before it has agreed to anything."""

    shape: tuple[int, ...]
    pixels: bool  # whether inputs are bytes
    classes: int
    labels: str  # a digest of the names of the classes, so that sites can be seen to agree without telling them
    model: str  # the architecture that the site wants, or nothing

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Facts:
        """From what has crossed as JSON."""
        values = {field.name: found[field.name] for field in fields(cls)}
        sizes = (*values["shape"], values["classes"])
        texts = type(values["labels"]) is type(values["model"]) is str
        if any(type(size) is not int or size < 1 for size in sizes) or type(values["pixels"]) is not bool or not texts:
            raise TypeError("these are no facts of a site")
        return cls(**{**values, "shape": tuple(values["shape"])})


class Remote(Experiment):
    """An experiment on sites, from the configuration that came with the run."""

    def __init__(self, config: Mapping[str, Any], federation: Federation, carrier: Carrier | None = None):
        values = {key: value for key, value in config.items() if key not in ("method", "model", "data")}
        super().__init__(config["method"], federation, config["model"], **values)
        self.carrier = carrier
        self.sizes: dict[int, tuple[int, int]] = {}  # training and test samples, of sites that tell them

    def runner(self) -> Runner:
        """What runs the steps of the clients that are here."""
        return Runner(self.method, self.federation(), self._pool(), self.options, task(self.options.task))

    def _describe(self, opened: Store) -> None:
        super()._describe(opened)
        names = [client.name for client in self.federation().clients]
        known = {row["client"]: (row["train"], row["test"]) for row in opened.record.clients()} | self.sizes
        opened.record.add_clients((i, name, *known.get(i, (0, 0)), []) for i, name in enumerate(names))


def check(config: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a run between real sites; what makes no sense there is refused before anybody is asked."""
    if ".py" in str(config.get("method")):
        raise UserError(f"A method must be installed at every site: no code is sent. Got {config['method']!r}.")
    experiment = Experiment.from_config(config)
    method, options = experiment.method, experiment.options
    usual = type(options)(clients=options.clients)
    split = {field.name: "each site has its own data" for field in fields(SplitOptions) if field.name not in OWN}
    for name, why in {**split, **SIMULATED}.items():
        if getattr(options, name) != getattr(usual, name):
            raise UserError(f"run.{name} is for simulations: {why}. Got {getattr(options, name)}.")
    if options.task != "classification":
        raise UserError(f"pfed deploy does classification. Got run.task {options.task!r}.")
    if "pooled" in method.needs:
        raise UserError(f"{method.label} needs all data in one place, which no site gives away.")
    return {**experiment.config(), "engine": "nvflare"}


def federation(
    names: Sequence[str], facts: Facts, public: Samples | None, own: Mapping[int, ClientData] | None = None
) -> Federation:
    """Sites by name, with the data of those that are here and nothing of the others."""
    dtype = torch.uint8 if facts.pixels else torch.float32
    nothing = Samples(torch.zeros(0, *facts.shape, dtype=dtype), torch.zeros(0, dtype=torch.int64), torch.arange(0))
    clients = tuple((own or {}).get(i, ClientData(name, nothing, nothing)) for i, name in enumerate(names))
    here = next(iter((own or {}).values()), None)
    classes = tuple(str(i) for i in range(facts.classes))
    return Federation(clients, classes, here.test if here else nothing, public)


def agree(facts: Mapping[str, Facts], model: str) -> tuple[Facts, str]:
    """What all sites have in common, and their models: one, or one for each."""
    first, *others = facts.items()
    for name, found in others:
        for what in ("shape", "pixels", "classes", "labels"):
            if getattr(found, what) != getattr(first[1], what):
                raise UserError(_differ(what, first, (name, found)))
    models = [found.model or model for found in facts.values()]
    return replace(first[1], model=""), models[0] if len(set(models)) == 1 else ",".join(models)


def _differ(what: str, one: tuple[str, Facts], other: tuple[str, Facts]) -> str:
    if what == "labels":
        hint = "agree on one list and give it to 'pfed deploy join --classes'"
        return f"Sites {one[0]} and {other[0]} have classes of other names; {hint}."
    words = {"shape": "inputs of shape", "pixels": "images in bytes:", "classes": "this many classes:"}
    values = [getattr(facts, what) for _, facts in (one, other)]
    return f"Site {one[0]} has {words[what]} {values[0]}, but site {other[0]} {values[1]}."


def public(path: str | None, classes: Sequence[str] | None, image_size: int | None) -> Samples | None:
    """The labelled set that server and sites have in common."""
    if path is None:
        return None
    from pfed.data.pool import class_indices

    pool = read_user(Path(path), image_size=image_size)
    if pool.clients:
        raise UserError(f"A public set must be CLASS/image, without clients above. Got {path!r}.")
    y, _ = class_indices(pool.labels, classes)
    return Samples.of(pool.x, y)
