"""What `deploy/` and the sizing chapter say, against the code and the formats' own schemas."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvcore.cli import serve
from kvcore.cli.app import app
from kvcore.config import load_config
from kvcore.config.walk import node_at
from kvcore.model.shape import BlockShape
from kvcore.plugins import PluginManager
from kvcore.telemetry.metrics import SPECS, Kind, MissReason, SaveSkip

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SETTINGS = sorted(DEPLOY.rglob("kvcore.toml"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
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
        if "options" in keys:  # a plugin's own
            keys = keys[: keys.index("options") + 1]
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


WITH_PODS = ("DaemonSet", "Deployment", "StatefulSet")
NAME = "app.kubernetes.io/name"


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for path in MANIFESTS:
        for found in documents(path):
            if found["kind"] in WITH_PODS:
                yield found, found["spec"]["template"]


def check_parts(found: Sequence[dict[str, Any]]) -> None:
    """Selectors, volumes, claims, ports and probes of resources name what there is."""
    ports = {}
    for resource in found:
        if resource["kind"] not in WITH_PODS:
            continue
        spec, pod = resource["spec"], resource["spec"]["template"]
        assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | claims
        [container] = pod["spec"]["containers"]
        names = {port["name"] for port in container["ports"]}
        ports[pod["metadata"]["labels"][NAME]] = names
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
        probed = json.dumps(
            [container.get(f"{k}Probe") for k in ("startup", "readiness", "liveness")]
        )
        assert set(re.findall(r'"port": "([\w-]+)"', probed)) <= names
        assert container["resources"]["limits"]["memory"]
    for resource in found:
        if resource["kind"] == "Service":
            name = resource["spec"]["selector"][NAME]
            assert {port["targetPort"] for port in resource["spec"]["ports"]} <= ports[name]
        elif resource["kind"] == "NetworkPolicy":
            name = resource["spec"]["podSelector"]["matchLabels"][NAME]
            rules = resource["spec"]["ingress"]
            assert {port["port"] for rule in rules for port in rule.get("ports", [])} <= ports[name]


def test_parts_of_the_manifests_name_each_other() -> None:
    check_parts([found for path in MANIFESTS for found in documents(path)])


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


# -- the chart ------------------------------------------------------------------------------

CHART = DEPLOY / "helm" / "kvcore"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
LIKE_MANIFESTS = {"server": {"enabled": False}, "store": {"kind": "valkey"}}
OWN_REDIS = {"kind": "url", "url": "rediss://elsewhere:6379/0", "passwordKey": "redis"}
EXTRA = {
    "extraEnv": [{"name": "KVCORE__LOG__LEVEL", "value": "debug"}],
    "extraEnvFrom": [{"secretRef": {"name": "aws"}}],
    "extraVolumes": [{"name": "ca", "secret": {"secretName": "store-ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "manifests": LIKE_MANIFESTS,
    "lend": {"server": {"enabled": False}},
    "server-valkey": {"store": {"kind": "valkey"}},
    "no-store": {"store": {"kind": "none"}, "disk": {"capacity": ""}},
    "no-server-no-disk": {"server": {"enabled": False}, "disk": {"capacity": ""}},
    "own-store": {"store": {"kind": "url", "url": "redis://elsewhere:6379/0"}},
    "watched": {
        "monitoring": {
            "podMonitor": True, "alerts": True, "dashboard": True, "annotations": False,
            "labels": {"release": "prometheus"},
        }
    },
    "watched-alone": {"server": {"enabled": False}, "monitoring": {"podMonitor": True}},
    "placed": {
        "engine": {
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "args": ["--max-model-len", "32768"],
        },
        "settings": "[block]\ntokens = 32\n",
        "disk": {"storageClass": "local"},
    },
    "password": {"store": OWN_REDIS},
    "password-alone": {"server": {"enabled": False}, "store": OWN_REDIS},
    "extended": {
        "imagePullSecrets": [{"name": "registry"}],
        "engine": {**EXTRA, "settings": "[block]\ntokens = 32\n[vllm]\nlayerwise = false\n"},
        "server": EXTRA,
    },
    "extended-alone": {
        "imagePullSecrets": [{"name": "registry"}],
        "server": {"enabled": False},
        "engine": {**EXTRA, "settings": "[block]\ntokens = 32\n"},
        "store": {"kind": "valkey"},
    },
}  # fmt: skip


@cache
def chart() -> Any:
    return tool("helm_python").Chart.load(CHART)


def text(values: Mapping[str, Any], name: str = "kvcore") -> dict[str, str]:
    """What Helm makes of the chart, by template."""
    chart().validate_schema(dict(values))
    made = chart().render(dict(values), name=name, namespace="models")
    return {Path(path).name: str(found) for path, found in made.items()}


def rendered(values: Mapping[str, Any], name: str = "kvcore") -> list[dict[str, Any]]:
    """The resources."""
    made = [found for path, found in text(values, name).items() if path != "NOTES.txt"]
    return [found for each in made for found in yaml.safe_load_all(each) if found]


variants = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())


@variants
def test_helm_finds_no_fault_with_the_chart(values: dict[str, Any]) -> None:
    report = tool("helm_python").lint(CHART, values, strict=True)
    told = [message["error"] for message in report["messages"]]
    assert (report["errors"], told) == ([], ["icon is recommended"])


@variants
def test_what_the_chart_makes_is_kubernetes(values: dict[str, Any]) -> None:
    found = rendered(values)
    for resource in found:
        if not resource["apiVersion"].startswith("monitoring.coreos.com/"):
            tool("kubernetes_validate").validate(resource, KUBERNETES, strict=True)
    names = [(resource["kind"], resource["metadata"]["name"]) for resource in found]
    assert len(set(names)) == len(names)
    check_parts(found)
    other = {(r["kind"], r["metadata"]["name"]) for r in rendered(values, "other")}
    assert not other & set(names), "two releases in a namespace"


def as_manifest(resource: dict[str, Any]) -> Any:
    """A resource of the release "kvcore" without what Helm adds."""
    added = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart",
             "checksum/settings")  # fmt: skip

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items() if key not in added}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return value.removeprefix("kvcore-") if re.match(KINDS, str(value)) else value

    return plain(resource)


KINDS = r"kvcore-(engine|valkey|mooncake-master)"


@pytest.mark.parametrize(
    ("values", "files"),
    [
        (LIKE_MANIFESTS, ["engine.yaml", "valkey.yaml"]),
        ({"store": {"kind": "mooncake"}}, ["mooncake.yaml"]),
    ],
)
def test_the_chart_makes_the_manifests(values: dict[str, Any], files: list[str]) -> None:
    made = {(r["kind"], r["metadata"]["name"]): r for r in map(as_manifest, rendered(values))}
    for file in files:
        for resource in documents(DEPLOY / "kubernetes" / file):
            known = made[resource["kind"], resource["metadata"]["name"]]
            assert known == as_manifest(resource)


@variants
def test_settings_that_the_chart_makes(values: dict[str, Any], tmp_path: Path) -> None:
    found = rendered(values)
    [told] = [r["data"] for r in found if r["kind"] == "ConfigMap" and "kvcore.toml" in r["data"]]
    configs = {}
    for name, lines in told.items():
        (tmp_path / name).write_text(lines)
        who = "engine" if name == "kvcore.toml" else "server"
        [container] = [
            container
            for resource in found
            if resource["kind"] in WITH_PODS and resource["metadata"]["name"] == f"kvcore-{who}"
            for container in resource["spec"]["template"]["spec"]["containers"]
        ]
        env = {v["name"]: v.get("value", "x") for v in container["env"]}
        configs[who] = load_config(tmp_path / name, env=env)
        assert f"/etc/kvcore/{name}" in [*container.get("command", []), *container.get("args", [])]
        PluginManager().check(configs[who])
    served = values.get("server", {}).get("enabled", True)
    assert configs.keys() == ({"engine", "server"} if served else {"engine"})
    owner = configs["server" if served else "engine"]
    assert owner.events.endpoint == "tcp://*:5657"
    assert (owner.disk.path is None) == (values.get("disk", {}).get("capacity") == "")
    services = {r["metadata"]["name"] for r in found if r["kind"] == "Service"}
    for tier in owner.tiers.values():
        at = tier.options.get("master") or re.sub("^rediss?://", "", tier.options["url"])
        host = at.partition(":")[0]
        assert host in services | {"elsewhere"}
        assert (tier.options.get("host") == "x") == (tier.plugin == "mooncake"), "the pod's address"
    if served:
        assert configs["engine"].server.folder == configs["server"].server.folder
        assert configs["engine"].server.address == configs["server"].server.address == "local"
        assert not configs["engine"].tiers
    if values is LIKE_MANIFESTS:
        lines = told["kvcore.toml"].replace("kvcore-valkey", "valkey")
        told_once = [line for line in SETTINGS[0].read_text().splitlines() if line[:1] != "#"]
        assert lines.split() == "\n".join(told_once).split()


def part(found: Sequence[dict[str, Any]], who: str) -> Any:
    [pod] = [
        resource["spec"]["template"]["spec"]
        for resource in found
        if resource["kind"] in WITH_PODS and resource["metadata"]["name"] == f"kvcore-{who}"
    ]
    return pod


@pytest.mark.parametrize(
    ("values", "owner"), [("password", "server"), ("password-alone", "engine")]
)
def test_a_stores_password_lies_where_its_reader_looks(values: str, owner: str) -> None:
    found = rendered(VARIANTS[values])
    [told] = [r["data"] for r in found if r["kind"] == "ConfigMap" and "kvcore.toml" in r["data"]]
    lines = tomllib.loads(told["kvcore.toml" if owner == "engine" else "server.toml"])
    file = Path(lines["tiers"]["shared"]["options"]["password_file"])
    pod = part(found, owner)
    [container] = pod["containers"]
    [mount] = [m for m in container["volumeMounts"] if m["mountPath"] == str(file.parent)]
    [volume] = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert mount["readOnly"] is True
    assert volume["secret"] == {
        "secretName": "kvcore", "items": [{"key": "redis", "path": file.name}]
    }  # fmt: skip
    if owner == "server":
        assert "store-password" not in json.dumps(part(found, "engine")), "none of its affair"


@pytest.mark.parametrize("values", ["extended", "extended-alone"])
def test_what_a_pod_is_given_beside(values: str) -> None:
    found = rendered(VARIANTS[values])
    for resource in found:
        if resource["kind"] in WITH_PODS:
            spec = resource["spec"]["template"]["spec"]
            assert spec["imagePullSecrets"] == [{"name": "registry"}], resource["metadata"]["name"]
    for who in ("engine", "server") if values == "extended" else ("engine",):
        pod = part(found, who)
        [container] = pod["containers"]
        assert EXTRA["extraEnv"][0] in container["env"]
        assert container["envFrom"] == EXTRA["extraEnvFrom"]
        assert EXTRA["extraVolumes"][0] in pod["volumes"]
        assert EXTRA["extraVolumeMounts"][0] in container["volumeMounts"]
    [told] = [r["data"] for r in found if r["kind"] == "ConfigMap" and "kvcore.toml" in r["data"]]
    assert tomllib.loads(told["kvcore.toml"])["block"]["tokens"] == 32
    assert "block" not in tomllib.loads(told.get("server.toml", ""))


@variants
def test_engines_of_the_chart_start_with_their_arguments(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    [entry] = [line for line in DOCKERFILE.splitlines() if line.startswith("ENTRYPOINT")]
    [container] = [
        container
        for resource in rendered(values)
        if resource["kind"] == "StatefulSet" and resource["metadata"]["name"] == "kvcore-engine"
        for container in resource["spec"]["template"]["spec"]["containers"]
    ]
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(serve, "load", lambda file, assignments: None)
    monkeypatch.setattr(serve, "run", lambda command: None)
    monkeypatch.setattr(
        serve, "command", lambda model, config, engine, args: asked.append((model, args))
    )
    program, *line = [*json.loads(entry.removeprefix("ENTRYPOINT")), *container["args"]]
    told = CliRunner().invoke(app, line)
    assert (program, told.exit_code, told.output) == ("kvcore", 0, "")
    assert asked == [("$(MODEL)", values.get("engine", {}).get("args", []))]


def leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict) and value and "limits" not in value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def changed(value: Any) -> Any:
    """Another value of the kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, dict):
        return {"limits": {"memory": "1Gi"}} if "limits" in value else {"a": "b"}
    if isinstance(value, list):
        return ["x"]
    number = re.match(r"[0-9]+(?=[GK]i)", value)
    return f"1{value}" if number else f"{value}x"


SPECIAL: dict[tuple[str, ...], Any] = {
    ("image", "pullPolicy"): "Always",
    ("store", "kind"): "none",
    ("store", "url"): "redis://third:6379/0",
    ("disk", "hostPath"): "/data",
    ("engine", "tolerations"): [{"operator": "Exists"}],
    ("imagePullSecrets",): [{"name": "x"}],
    ("store", "passwordKey"): "x",
    ("engine", "settings"): "[block]\ntokens = 32",
    **{(who, name): [{"name": "x"}] for who in ("engine", "server") for name in EXTRA},
    ("settings",): "[block]\ntokens = 32",
}


@pytest.mark.parametrize("path", list(leaves(VALUES)), ids=".".join)
def test_every_value_changes_something(path: tuple[str, ...]) -> None:
    value: Any = VALUES
    for name in path:
        value = value[name]
    told: Any = SPECIAL[path] if path in SPECIAL else changed(value)
    for name in reversed(path):
        told = {name: told}
    assert any(text(merged(v, told)) != text(v) for v in VARIANTS.values())


def merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(values)
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = merged(made[name], value) if both else value
    return made


@pytest.mark.parametrize(
    "values",
    [{"modle": "x"}, {"store": {"kind": "etcd"}}, {"store": {"kind": "url"}},
     {"host": {"capacity": 16}}, {"engine": {"replicas": 0}}],
)  # fmt: skip
def test_values_that_are_none_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(tool("helm_python").HelmError):
        text(merged(VALUES, values))


def test_the_chart_carries_what_is_watched() -> None:
    found = {r["kind"]: r for r in rendered(VARIANTS["watched"]) if r["kind"] != "ConfigMap"}
    [rules] = documents(DEPLOY / "monitoring" / "alerts.yaml")
    assert found["PrometheusRule"]["spec"] == rules
    [dashboard] = [
        r["data"] for r in rendered(VARIANTS["watched"])
        if r["kind"] == "ConfigMap" and "kvcore.json" in r["data"]
    ]  # fmt: skip
    assert json.loads(dashboard["kvcore.json"])["panels"]
    scraped = {end["port"] for end in found["PodMonitor"]["spec"]["podMetricsEndpoints"]}
    ports = {
        port["name"]
        for kind in ("StatefulSet", "DaemonSet")
        for port in found[kind]["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    assert scraped <= ports


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
