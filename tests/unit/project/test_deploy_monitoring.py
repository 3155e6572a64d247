"""Alerts and the dashboard in `deploy/monitoring`, against the metrics that kvcore exports."""

from __future__ import annotations

import json
import re
from typing import Any

from kvcore.errors import Mismatch
from kvcore.telemetry.metrics import PAGE_SPECS, SPECS, Kind, MissReason, SaveSkip
from support.deployment import DEPLOY, ROOT, documents, tool
from support.together import for_every

ADDED_LABELS = {"instance", "job", "model_name", "engine", "le"}
"""By Prometheus when it scrapes, by vLLM, and by a histogram's buckets."""

LABEL_VALUES = {
    "reason": {reason.value for reason in (*MissReason, *SaveSkip, *Mismatch)},
    "result": {"hit", "miss"},
    "outcome": {"found", "absent", "late", "failed", "published", "dropped", "unsent"},
}


def exported() -> dict[str, set[str]]:
    """Every name that a scrape shows, with its labels."""
    names = {}
    for spec in (*SPECS, *PAGE_SPECS):
        suffixes = ("_bucket", "_sum", "_count") if spec.kind is Kind.HISTOGRAM else ("",)
        for suffix in suffixes:
            names[spec.name + suffix] = set(spec.labels)
    return names


def alerts() -> list[dict[str, Any]]:
    [rules] = documents(DEPLOY / "monitoring" / "alerts.yaml")
    return [rule for group in rules["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [rule["expr"] for rule in alerts()] + shown


def parsed(expression: str) -> Any:
    """Grafana's variables stand for what a query may hold."""
    plain = expression.replace("$__rate_interval", "5m").replace("$instance", ".*")
    return tool("promql_parser").parse(plain)


@for_every(expressions())
def test_every_metric_and_label_is_one_that_is_exported(expression: str) -> None:
    known = exported()
    names = set(re.findall(r"\bkvcore_\w+", expression))
    assert names, "watches nothing of kvcore's"
    assert names <= known.keys(), "no such metric"
    labels = set.union(*(known[name] for name in names)) | ADDED_LABELS
    grouped = [name.strip() for by in re.findall(r"by \(([^)]*)\)", expression)
               for name in by.split(",")]  # fmt: skip
    matched = re.findall(r'(\w+)=~?"([^"]*)"', expression)
    assert {*grouped, *(label for label, _ in matched)} <= labels, "no such label"
    for label, values in matched:
        if label in LABEL_VALUES:
            assert set(values.split("|")) <= LABEL_VALUES[label], "no such value"


@for_every(expressions())
def test_every_expression_is_promql(expression: str) -> None:
    parser = tool("promql_parser")
    found: set[str] = set()
    parser.walk(
        parsed(expression),
        pre_visit=lambda node: (
            found.add(node.name) if isinstance(node, parser.VectorSelector) else None
        ),
    )
    assert found == set(re.findall(r"\bkvcore_\w+", expression))


def test_labels_of_an_alerts_words_are_left_by_its_expression() -> None:
    for rule in alerts():
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = {n.strip() for by in re.findall(r"by \(([^)]*)\)", rule["expr"])
                for n in by.split(",")}  # fmt: skip
        assert used <= kept, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_alerts_are_the_ones_that_are_explained() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert set(re.findall(r"`(Kvcore\w+)`", page)) == set(names)


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_shows_every_kind_of_trouble() -> None:
    shown = " ".join(t["expr"] for panel in panels() for t in panel["targets"])
    unseen = [spec.name for spec in (*SPECS, *PAGE_SPECS) if spec.name not in shown]
    assert unseen == ["kvcore_blend_seconds"], "a metric that the dashboard does not show"
