"""Charts of runs for notebooks: those of the report, as altair charts."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import altair as alt

from pfed.errors import UserError, unknown
from pfed.report import charts, numbers
from pfed.report.gains import gains, span
from pfed.result import Comparison, Result

KINDS = ("rounds", "bytes", "gains", "data")
WIDTH, HEIGHT = 330, 220  # more than the report has, and two fit beside each other
COLUMNS = 3  # charts beside each other


def plot(comparison: Comparison, kind: str) -> alt.TopLevelMixin:
    """One of KINDS as a chart, which can be changed, put beside others and saved."""
    if kind not in KINDS:
        raise unknown("kind of plot", kind, KINDS)
    shown = [_shown(result, comparison.label(result)) for result in comparison.results]
    if kind == "data":
        return _data(shown)
    judged = Comparison([result for result in shown if result.values])
    if not judged.results:
        raise UserError("There is nothing to plot: no run was evaluated.")
    return _gains(judged) if kind == "gains" else _curves(judged, kind)


def _shown(result: Result, label: str) -> Result:
    """A run under its name in the table, which tells settings of one method apart, and with harmless names.

    A notebook gets a chart as a script, and altair lets a text in it end that script and begin another.
    """
    shown = copy.copy(result)
    shown.method = _harmless(label)
    shown.classes = [_harmless(name) for name in result.classes]
    shown.clients = copy.copy(result.clients)
    shown.clients[:] = [{**row, "name": _harmless(row["name"])} for row in result.clients]
    return shown


def _harmless(text: str) -> str:
    return text.replace("<", "‹")


def _curves(shown: Comparison, kind: str) -> alt.LayerChart:
    rows = numbers.curves(shown.results)
    if kind == "bytes" and not any(row["bytes"] for row in rows):
        raise UserError("There are no bytes to plot: nothing was sent.")
    methods = list(numbers.by_method(shown.results))
    across = "round" if kind == "rounds" else kind
    drawn = charts.curves(rows, across, methods, shown.results[0].score, told=True).draw()
    wide: alt.LayerChart = drawn.properties(width=WIDTH, height=HEIGHT)
    return wide


def _gains(shown: Comparison) -> alt.ConcatChart:
    found = gains(shown)
    if not found:
        raise UserError("Gains need a run of another method and one of 'local' on the same clients, in one comparison.")
    drawn = [charts.gains(method, each, span(found)).draw() for method, each in found.items()]
    return alt.concat(*drawn, columns=COLUMNS)


def _data(shown: Sequence[Result]) -> alt.HConcatChart:
    """That of the first run, as in the report: other seeds divide the data in the same way."""
    first = next((result for result in shown if result.clients), None)
    if first is None or not any(sum(row["counts"]) for row in first.clients):
        raise UserError("There are no data to plot: the run counted no samples by class.")
    classes = first.classes or [str(i) for i in range(len(first.clients[0]["counts"]))]
    drawn: alt.HConcatChart = charts.data(first.clients, classes, first.counted).draw()
    return drawn
