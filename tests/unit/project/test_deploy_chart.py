"""The Helm chart in `deploy/helm`: what it makes of its values, against the manifests."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore.cli import serve
from kvcore.cli.app import app
from kvcore.config import load_config
from kvcore.plugins import PluginManager

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from support.chart import (
    CHART,
    DIGEST,
    EXTRA,
    LIKE_MANIFESTS,
    PINNED,
    VALUES,
    VARIANTS,
    merged,
    rendered,
    text,
)
from support.deployment import (
    DEPLOY,
    SETTINGS,
    WITH_PODS,
    check_parts,
    check_schema,
    documents,
    tool,
)
from support.together import for_every

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()

variants = for_every(VARIANTS)


@pytest.mark.slow
@variants
def test_helm_finds_no_fault_with_the_chart(values: dict[str, Any]) -> None:
    report = tool("helm_python").lint(CHART, merged(PINNED, values), strict=True)
    told = [message["error"] for message in report["messages"]]
    assert (report["errors"], told) == ([], ["icon is recommended"])


@pytest.mark.slow
@variants
def test_what_the_chart_makes_is_kubernetes(values: dict[str, Any]) -> None:
    found = rendered(values)
    for resource in found:
        if not resource["apiVersion"].startswith("monitoring.coreos.com/"):
            check_schema(resource)
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
        if str(value).endswith((DIGEST, "@sha256:DIGEST")):
            return value.partition("@")[0]
        return value.removeprefix("kvcore-") if re.match(KINDS, str(value)) else value

    return plain(resource)


KINDS = r"kvcore-(engine|valkey|mooncake-master|closed|store-access)"


@pytest.mark.parametrize(
    ("values", "files"),
    [
        (LIKE_MANIFESTS, ["network.yaml", "engine.yaml", "valkey.yaml"]),
        ({"server": {"enabled": False}}, ["mooncake.yaml"]),
    ],
)
def test_the_chart_makes_the_manifests(values: dict[str, Any], files: list[str]) -> None:
    made = {(r["kind"], r["metadata"]["name"]): r for r in map(as_manifest, rendered(values))}
    for file in files:
        for resource in documents(DEPLOY / "kubernetes" / file):
            known = made[resource["kind"], resource["metadata"]["name"]]
            assert known == as_manifest(resource)


def without_optional_secrets(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the resources with the variables that a smallest secret leads to."""
    found = deepcopy(found)
    for resource in found:
        if resource["kind"] in WITH_PODS:
            for container in resource["spec"]["template"]["spec"]["containers"]:
                container["env"] = [
                    variable
                    for variable in container.get("env", [])
                    if not variable.get("valueFrom", {}).get("secretKeyRef", {}).get("optional")
                ]
    return found


plugins = cache(PluginManager)


@variants
def test_settings_that_the_chart_makes(values: dict[str, Any], tmp_path: Path) -> None:
    found = without_optional_secrets(rendered(values))
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
        env = {v["name"]: v.get("value", "x" * 32) for v in container["env"]}
        configs[who] = load_config(tmp_path / name, env=env)
        assert f"/etc/kvcore/{name}" in [*container.get("command", []), *container.get("args", [])]
        plugins().check(configs[who])
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
        assert (tier.options.get("host") == "x" * 32) == (tier.plugin == "mooncake"), (
            "the pod's address"
        )
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
    pod = part(found, owner)
    [container] = pod["containers"]
    variables = {v["name"]: v.get("value") for v in container["env"]}
    file = Path(variables["KVCORE__TIERS__SHARED__OPTIONS__PASSWORD_FILE"])
    [mount] = [m for m in container["volumeMounts"] if m["mountPath"] == str(file.parent)]
    [volume] = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert mount["readOnly"] is True
    assert volume["secret"] == {
        "secretName": "kvcore", "defaultMode": 0o440,
        "items": [{"key": "redis", "path": file.name}],
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


def test_engines_of_the_chart_start_with_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some values lead to the same command. It is run once."""
    [entry] = [line for line in DOCKERFILE.splitlines() if line.startswith("ENTRYPOINT")]
    wanted: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for values in VARIANTS.values():
        [container] = part(rendered(values), "engine")["containers"]
        line = (*json.loads(entry.removeprefix("ENTRYPOINT")), *container["args"])
        wanted.setdefault(line, set()).add(tuple(values.get("engine", {}).get("args", ())))
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(serve, "load", lambda file, assignments: None)
    monkeypatch.setattr(serve, "run", lambda command: None)
    monkeypatch.setattr(
        serve, "command", lambda model, config, engine, args: asked.append((model, args))
    )
    for (program, *line), [args] in wanted.items():
        told = CliRunner().invoke(app, line)
        assert (program, told.exit_code, told.output) == ("kvcore", 0, "")
        assert asked.pop() == ("$(MODEL)", list(args))
        assert not asked


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
    ("image", "digest"): "sha256:" + "f" * 64,
    ("store", "valkey", "image", "digest"): "sha256:" + "f" * 64,
    **{("access", name): [{"podSelector": {}}] for name in VALUES["access"]},
    ("engine", "tolerations"): [{"operator": "Exists"}],
    ("imagePullSecrets",): [{"name": "x"}],
    ("store", "passwordKey"): "x",
    ("engine", "settings"): "[block]\ntokens = 32",
    **{(who, name): [{"name": "x"}] for who in ("engine", "server") for name in EXTRA},
    ("settings",): "[block]\ntokens = 32",
}


ALL = [path for path in leaves(VALUES) if path != ("allowTags",)]  # it matters without a digest


@pytest.mark.slow
@for_every({".".join(path): path for path in ALL})
def test_every_value_changes_something(path: tuple[str, ...]) -> None:
    value: Any = VALUES
    for name in path:
        value = value[name]
    told: Any = SPECIAL[path] if path in SPECIAL else changed(value)
    for name in reversed(path):
        told = {name: told}
    assert any(text(merged(v, told)) != text(v) for v in VARIANTS.values())


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
