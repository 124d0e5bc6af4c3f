"""Every query of the kit: recording rules, alerts, Grafana panels and variables, KEDA triggers."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parents[2]
RULES = sorted((DEPLOY / "prometheus/rules").glob("*.yml"))
DASHBOARD = DEPLOY / "grafana/baton.json"
KEDA = [DEPLOY / "keda/prefill.yaml", DEPLOY / "keda/decode.yaml"]


@dataclass(frozen=True)
class Query:
    kind: str  # record, alert, panel, variable or keda
    name: str
    expr: str

    def __str__(self):
        return f"{self.kind} {self.name}"


def all_queries():
    return [*rule_queries(), *panel_queries(), *keda_queries()]


def rules():
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def rule_queries():
    for rule in rules():
        kind = "record" if "record" in rule else "alert"
        lane = rule.get("labels", {}).get("lane")
        yield Query(kind, rule[kind] + (f" ({lane})" if lane else ""), rule["expr"])


def panels(dashboard):
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def panel_queries():
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            yield Query("panel", f"{panel['title']}, {target['refId']}", filled_in(target["expr"], dashboard))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            text = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
            asked = re.fullmatch(r"label_values\((.*), *(\w+)\)", text)
            if not asked:
                raise ValueError(f"variable {variable['name']}: not label_values(selector, label): {text}")
            yield Query("variable", variable["name"], f"count by ({asked[2]}) ({asked[1]})")


def filled_in(expr, dashboard):
    """The query as Grafana sends it while every variable stands at its default; `All` is sent as its allValue."""
    values = {"__rate_interval": "1m", "__range": "1h", "__interval": "15s"}
    for variable in dashboard["templating"]["list"]:
        value = variable.get("current", {}).get("value", variable.get("query"))
        values[variable["name"]] = variable.get("allValue", ".*") if value in ("$__all", ["$__all"]) else value
    # A variable that the dashboard lacks stays as it is, and Prometheus refuses the query.
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: str(values.get(m[1] or m[2], m[0])), expr)


def keda_queries():
    for path in KEDA:
        for document in yaml.safe_load_all(path.read_text()):
            for trigger in document["spec"]["triggers"]:
                yield Query("keda", f"{path.name}, {trigger['name']}", trigger["metadata"]["query"])
