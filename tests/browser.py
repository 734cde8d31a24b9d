"""A real browser for tests: Debian's Chromium by Playwright. Without it they are skipped, and say what installs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None

CHROMIUM = shutil.which("chromium")
needed = pytest.mark.skipif(
    sync_playwright is None or CHROMIUM is None, reason="needs a browser: 'make browser' installs it"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all tests of a module."""
    with sync_playwright() as playwright:
        # Chromium refuses to start its sandbox for root, as whom containers run.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


def watched(page: Any) -> list[str]:
    """All that the page complains about from now on: its console, its errors, what its policy refused."""
    heard: list[str] = []
    page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("requestfailed", lambda request: heard.append(request.url))
    return heard
