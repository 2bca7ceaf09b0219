"""The Grafana dashboard's queries, as Prometheus gets them."""

import json
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "onebox.json"

ONLY_SOME_MACHINES = {
    "onebox:power_watts",
    "onebox:temperature_celsius",
    "onebox:clock_hertz",
    "onebox:throttled",
}
"""Absent where the system does not tell."""


class Query(NamedTuple):
    """One query of a panel, a variable or an annotation."""

    place: str
    expression: str
    """Without Grafana's variables."""
    legend_labels: frozenset[str] = frozenset()
    """Labels that its legend shows."""
    is_event: bool = False
    """It compares something with 0, and finds it only when that happens."""


def dashboard():
    return json.loads(DASHBOARD.read_text())


def expanded(expression, interval="1m"):
    for name, value in (("$__rate_interval", interval), ("$__range", interval), ("$model", ".*"), ("$instance", ".+")):
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries(interval="1m"):
    for panel in panels():
        for target in panel["targets"]:
            legend = target["legendFormat"]
            labels = {part.split("}}")[0].strip() for part in legend.split("{{")[1:]}
            yield Query(panel["title"], expanded(target["expr"], interval), frozenset(labels))
    for annotation in dashboard()["annotations"]["list"]:
        yield Query(annotation["name"], expanded(annotation["expr"], interval), is_event=True)
    for selector, _ in variables().values():
        yield Query("variables", selector)


def variables():
    """(selector, label) of each variable that has the values of a label."""
    found = {}
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = variable["definition"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            found[variable["name"]] = expanded(selector), label
    return found
