"""HTML from Python, in which text can't be mistaken for HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Html(str):
    """Text that is HTML already; any other text is escaped."""


def join(parts: Iterable[str]) -> Html:
    return Html("\n".join(part if isinstance(part, Html) else escape(part) for part in parts))


def tag(name: str, *content: str, **attributes: str) -> Html:
    """An element. A trailing underscore lets an attribute have the name of a Python keyword, another is a hyphen.

    >>> tag("p", "a < b, ", tag("b", "or not"), class_="note")
    '<p class="note">a &lt; b, <b>or not</b></p>'
    """
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    inner = "".join(part if isinstance(part, Html) else escape(part) for part in content)
    return Html(f"<{name}{given}>{inner}</{name}>")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> Html:
    """A table that scrolls sideways on a small screen; `kind` is "numbers" (to the right) or "words".

    With "sortable" or "filterable" beside it the script lets a reader do that.
    """
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return scroll(tag("table", tag("thead", head), tag("tbody", *body), class_=kind), f"Table: {', '.join(header)}")


def scroll(content: Html, label: str) -> Html:
    """What is wider than a phone; the keyboard can reach it, to scroll it."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def data(value: Any) -> Html:
    """Numbers and texts for the script, in which no text can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json">{text}</script>')


def figure(picture: Html, caption: str) -> Html:
    return tag("figure", tag("div", picture, class_="picture"), tag("figcaption", caption))
