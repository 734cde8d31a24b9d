"""Pages of the report that tests can look into."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from pfed.report import page
from pfed.report.figures import Figure
from pfed.report.markup import Html
from pfed.result import Result


class Page(HTMLParser):
    """The text of a page, its tables and its elements."""

    def __init__(self, text: str):
        super().__init__()
        self.raw, self.tags, self.rows, self.words = text, [], [], []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())
        self.svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["style"], ["script"]):
            self.words.append(data)
        if self.tags[-1:] in (["td"], ["th"]) and data.strip():
            self.rows[-1].append(data)


def show(*results: Result) -> Page:
    return Page(page.render(results))


def tell(*results: Result) -> Page:
    """The page without its charts, which take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "inline", lambda _: Html("<svg></svg>"))
        return show(*results)
