"""Federations behind the wire give the same bits as a simulation; with sites inside this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: install pfed[deploy]")

from deploy_helpers import NAMES, Near, conduct, left_behind, make_kit, make_server, same, simulate, write_data

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedrep": {"hyper": {"head_epochs": 2}},
    "scaffold": {},
    "fedpac": {},
    "cd2pfed": {"model": "cnn-small"},
    "fedcd": {"model": "mlp,cnn-small,cnn-small-bn", "hyper": {"batch": 16}},
    "dualfed": {"hyper": {"projector_bn": False}},
    "fedbsd": {"hyper": {"head_epochs": 2}},
    "partialfed-adaptive": {"model": "cnn-small-bn"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("federation")
    write_data(root)
    return root


@pytest.fixture
def root(data: Path, tmp_path: Path) -> Path:
    for name in ("data", "public"):
        (tmp_path / name).symlink_to(data / name)
    make_server(tmp_path, public=str(data / "public"))
    return tmp_path


def sites(root: Path, **settings: Any) -> dict[str, Path]:
    return {name: make_kit(root, name, public=str(root / "public"), **settings) for name in NAMES}


@pytest.mark.parametrize("method", METHODS)
def test_a_federation_gives_the_same_bits_as_a_simulation(method: str, root: Path) -> None:
    config = {"method": method, **METHODS[method]}
    kits = sites(root)
    result = conduct(root, Near(kits), config)
    expected, server, states = simulate(root, config)
    assert result.state == "complete"
    assert result.series == expected.series
    assert result.bytes_up == expected.bytes_up
    found, private = left_behind(root, result.run, kits)
    assert same(found, server)
    assert private.keys() == states.keys()
    assert all(same(private[client], states[client]) for client in states)
