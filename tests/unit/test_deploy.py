"""What `deploy/` and the sizing chapter say, against the code and the formats' own schemas."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcore.config import load_config
from kvcore.layout import BlockShape
from kvcore.metrics import SPECS, Kind, MissReason, SaveSkip
from kvcore.plugins import PluginManager
from kvcore.schema_walk import node_at

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SETTINGS = sorted(DEPLOY.rglob("kvcore.toml"))
KUBERNETES = "1.34"

ADDED_LABELS = {"instance", "job", "model_name", "engine", "le"}
"""By Prometheus when it scrapes, by vLLM, and by a histogram's buckets."""

LABEL_VALUES = {
    "reason": {reason.value for reason in (*MissReason, *SaveSkip)},
    "result": {"hit", "miss"},
    "outcome": {"found", "absent", "late", "failed", "published", "dropped", "unsent"},
}


def tool(name: str) -> Any:
    """A package that knows a format; CI has it, others may not."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("REQUIRE_REMOTE_STORES"):
            raise
        return pytest.skip(f"{name} is not installed")


def exported() -> dict[str, set[str]]:
    """Every name that a scrape shows, with its labels."""
    names = {}
    for spec in SPECS:
        suffixes = ("_bucket", "_sum", "_count") if spec.kind is Kind.HISTOGRAM else ("",)
        for suffix in suffixes:
            names[spec.name + suffix] = set(spec.labels)
    return names


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


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


# -- metrics --------------------------------------------------------------------------------


@pytest.mark.parametrize("expression", expressions())
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


@pytest.mark.parametrize("expression", expressions())
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
    unseen = [spec.name for spec in SPECS if spec.name not in shown]
    assert unseen == ["kvcore_blend_seconds"], "a metric that the dashboard does not show"


# -- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_settings_are_of_the_schema_and_their_plugins_exist(path: Path) -> None:
    config = load_config(path, env={})
    PluginManager().check(config)
    assert config.disk.path is not None


def test_both_deployments_have_the_same_settings() -> None:
    assert len({path.read_text() for path in SETTINGS}) == 1


def environment() -> Iterator[str]:
    for path in sorted(DEPLOY.rglob("*.yaml")):
        yield from re.findall(r"\bKVCORE__\w+", path.read_text())


def test_variables_are_settings() -> None:
    names = set(environment())
    assert names
    for name in names:
        keys = tuple(name.removeprefix("KVCORE__").lower().split("__"))
        assert node_at(keys).field is not None, name


# -- formats --------------------------------------------------------------------------------


def resources() -> list[Any]:
    return [
        pytest.param(found, id=f"{path.name}-{found['kind']}-{found['metadata']['name']}")
        for path in MANIFESTS
        if path.name != "kustomization.yaml"
        for found in documents(path)
    ]


@pytest.mark.parametrize("resource", resources())
def test_manifests_are_kubernetes(resource: dict[str, Any]) -> None:
    tool("kubernetes_validate").validate(resource, KUBERNETES, strict=True)


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for path in MANIFESTS:
        for found in documents(path):
            if found["kind"] in ("Deployment", "StatefulSet"):
                yield found, found["spec"]["template"]


def test_parts_of_the_manifests_name_each_other() -> None:
    claims, ports, labels = set(), {}, []
    for found, pod in pods():
        assert found["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        labels.append(pod["metadata"]["labels"])
        claims = {
            claim["metadata"]["name"] for claim in found["spec"].get("volumeClaimTemplates", [])
        }
        volumes = {v["name"] for v in pod["spec"].get("volumes", [])} | claims
        for container in pod["spec"]["containers"]:
            names = {port["name"] for port in container["ports"]}
            ports[pod["metadata"]["labels"]["app.kubernetes.io/name"]] = names
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            probed = json.dumps(
                [container.get(f"{k}Probe") for k in ("startup", "readiness", "liveness")]
            )
            assert set(re.findall(r'"port": "([\w-]+)"', probed)) <= names
            assert container["resources"]["limits"]["memory"]
    for path in MANIFESTS:
        for found in documents(path):
            if found["kind"] == "Service":
                name = found["spec"]["selector"]["app.kubernetes.io/name"]
                assert {port["targetPort"] for port in found["spec"]["ports"]} <= ports[name]
            elif found["kind"] == "NetworkPolicy":
                name = found["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
                allowed = [p["port"] for rule in found["spec"]["ingress"] for p in rule["ports"]]
                assert set(allowed) <= ports[name]


def test_the_kustomization_lists_what_is_there() -> None:
    [listed] = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    there = {path.name for path in MANIFESTS} - {"kustomization.yaml"}
    assert set(listed["resources"]) == there - {"mooncake.yaml"}
    for generator in listed["configMapGenerator"]:
        assert all((DEPLOY / "kubernetes" / name).is_file() for name in generator["files"])


def test_addresses_in_the_settings_are_those_of_services() -> None:
    config = load_config(SETTINGS[0], env={})
    host = re.fullmatch(r"redis://([\w-]+):6379/0", config.tiers["shared"].options["url"])
    assert host is not None
    [compose] = documents(DEPLOY / "compose" / "compose.yaml")
    services = {
        f["metadata"]["name"] for p in MANIFESTS for f in documents(p) if f["kind"] == "Service"
    }
    assert host[1] in services & set(compose["services"])
    ports = {config.events.endpoint, config.events.replay_endpoint}
    [engine] = [pod for found, pod in pods() if found["metadata"]["name"] == "engine"]
    listed = {p["name"]: p["containerPort"] for p in engine["spec"]["containers"][0]["ports"]}
    assert ports == {f"tcp://*:{listed['events']}", f"tcp://*:{listed['events-replay']}"}


def test_the_compose_file_is_one_and_its_files_are_there() -> None:
    folder = DEPLOY / "compose"
    [compose] = documents(folder / "compose.yaml")
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
    ]
    for source in mounted:
        assert (
            (folder / source).is_file() if source.startswith(".") else source in compose["volumes"]
        )
    for service in compose["services"].values():
        assert set(service.get("depends_on", {})) <= compose["services"].keys()
        assert "image" in service


# -- sizing ---------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "deploy.md").read_text()
SIZES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.fullmatch(r"(\|[^|]+){8}\|", line) and re.search(r"\| \d+ \|", line)
]


@pytest.mark.parametrize("row", SIZES, ids=lambda row: row[0])
def test_bytes_of_a_token_are_those_of_the_layout(row: list[str]) -> None:
    layers, heads, dim, parts = map(int, row[1:5])
    shape = BlockShape(layers, heads, dim, 16, row[5], kv_factor=parts)
    assert int(row[6]) * 16 == shape.nbytes
    assert int(row[7]) == (16 << 30) // int(row[6])


def test_the_sizing_chapter_computes_right() -> None:
    of = {row[0]: int(row[6]) for row in SIZES}
    assert len(of) >= 6
    llama = of["Llama-3.1-8B"]
    assert f"{1000 * 8000 * llama / 1e9:,.0f} GB" == "1,049 GB"
    assert "that is 1,049 GB" in PAGE
    assert (16 << 30) // (8000 * llama) == 16, "the last 16 of them"
    assert f"{10_000 * llama / 1e9:.2f} GB/s" == "1.31 GB/s"
    assert "1.31 GB/s" in PAGE
    assert 16 * llama == 2 << 20, "a block of 16 tokens has 2 MiB"
