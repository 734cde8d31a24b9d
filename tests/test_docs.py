"""The examples in README and docs run as they stand, and so do those in docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import pfed
from pfed import presets
from pfed.cli import _parse
from pfed.registry import methods

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [module.name for module in pkgutil.walk_packages(pfed.__path__, "pfed.") if module.name != "pfed.__main__"]


def _python_blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            if "import" in block:  # a sketch of an interface has none
                found.append((f"{page.name}-{i}", block))
    return found


@pytest.mark.parametrize(("name", "code"), _python_blocks(), ids=lambda value: value if len(value) < 40 else "")
def test_example_runs(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # where dataclasses look their names up
    exec(compile(code, name, "exec"), vars(module))


def _commands() -> list[str]:
    text = "\n".join(page.read_text() for page in PAGES)
    inline = re.findall(r"`(pfed [^`]+)`", text)
    lines = re.findall(
        r"^\$? ?(pfed .+)$", "\n".join(re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, re.DOTALL)), re.M
    )
    joined = [re.sub(r"\s*\\?\n\s*", " ", command) for command in [*inline, *lines]]
    return sorted({command.split(" #")[0] for command in joined if "…" not in command and "|" not in command})


@pytest.mark.parametrize("command", _commands())
def test_command_in_docs_is_valid(command: str) -> None:
    """Every command shown is one that the parser takes."""
    _parse(shlex.split(command)[1:])


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module: str) -> None:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "nvflare":
            raise
        pytest.skip("needs NVFlare: install pfed[deploy]")
    result = doctest.testmod(found, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_links_in_docs_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def page_of(method: str) -> Path:
    name = "partialfed" if method.startswith("partialfed-") else method
    return ROOT / "docs" / "methods" / f"{name}.md"


@pytest.mark.parametrize("method", list(methods()))
def test_every_method_has_a_page(method: str) -> None:
    page = page_of(method)
    assert f"(methods/{page.name})" in (ROOT / "docs" / "methods.md").read_text()
    for heading in ("Algorithm", "Hyper-parameters", "What crosses the wire", "Measured"):
        assert f"\n## {heading}\n" in page.read_text()


def _settings(own: Mapping[str, Mapping[str, Any]]) -> str:
    values = {**own.get("local", {}), **own.get("hyper", {})}
    return ", ".join(f"`{key}={str(v).lower() if isinstance(v, bool) else v}`" for key, v in values.items())


@pytest.mark.parametrize("preset", presets.others())
def test_pages_have_the_settings_of_every_preset(preset: str) -> None:
    for method, own in presets.load(preset).methods.items():
        which = f"`{preset}`, {method}" if method.startswith("partialfed-") else f"`{preset}`"
        assert f"| {which} | {_settings(own)} |" in page_of(method).read_text(), method
