"""HTML from Python, in which text can't be mistaken for HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already; any other text is escaped."""


def join(parts: Iterable[str]) -> Html:
    return Html("\n".join(part if isinstance(part, Html) else escape(part) for part in parts))


def tag(name: str, *content: str, **attributes: str) -> Html:
    """An element; a trailing underscore lets an attribute have the name of a Python keyword.

    >>> tag("p", "a < b, ", tag("b", "or not"), class_="note")
    '<p class="note">a &lt; b, <b>or not</b></p>'
    """
    given = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    inner = "".join(part if isinstance(part, Html) else escape(part) for part in content)
    return Html(f"<{name}{given}>{inner}</{name}>")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> Html:
    """A table that scrolls sideways on a small screen; `kind` is "numbers" (to the right) or "words"."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=kind), class_="scroll")


def figure(picture: Html, caption: str) -> Html:
    return tag("figure", tag("div", picture, class_="scroll"), tag("figcaption", caption))
