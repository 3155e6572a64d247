"""Files of `deploy/`, the packages that know their formats, and how parts of a cluster fit."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SETTINGS = sorted(DEPLOY.rglob("kvcore.toml"))
KUBERNETES = "1.34"

WITH_PODS = ("DaemonSet", "Deployment", "StatefulSet")
NAME = "app.kubernetes.io/name"


def tool(name: str) -> Any:
    """Return a package that knows a format. CI has it; without it elsewhere the test is skipped."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("REQUIRE_REMOTE_STORES"):
            raise
        return pytest.skip(f"{name} is not installed")


def check_schema(resource: dict[str, Any]) -> None:
    """Assert that a resource is one of Kubernetes, without fields that it does not know."""
    _kubernetes().validate(resource, KUBERNETES, strict=True)


@cache
def _kubernetes() -> Any:
    """Return the validator, made to read each schema once. It reads megabytes for each resource."""
    package = tool("kubernetes_validate")
    package.utils.schema_contents = cache(package.utils.schema_contents)
    return package


def release_tool(name: str) -> str:
    """Return the path of a program of the environment `release`, as `tool` returns a package."""
    path = ROOT / ".venvs" / "release" / "bin" / name
    if not path.exists():
        told = f"{name} is not installed: run python3 tools/env.py release"
        if os.environ.get("REQUIRE_REMOTE_STORES"):
            pytest.fail(told)
        pytest.skip(told)
    return str(path)


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


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
            name = resource["spec"]["podSelector"]["matchLabels"].get(NAME)
            rules = resource["spec"].get("ingress", [])
            named = {port["port"] for rule in rules for port in rule.get("ports", [])}
            assert {port for port in named if isinstance(port, str)} <= ports.get(name, set())
