"""The Helm chart in `deploy/helm`: values to try it with, and what Helm makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.deployment import DEPLOY, tool

CHART = DEPLOY / "helm" / "kvcore"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
DIGEST = "sha256:" + "0123456789abcdef" * 4
PINNED = {"image": {"digest": DIGEST}, "store": {"valkey": {"image": {"digest": DIGEST}}}}
"""What every installation has to give. Names no image that exists."""

LIKE_MANIFESTS = {"server": {"enabled": False}, "store": {"kind": "valkey"}}
OWN_REDIS = {"kind": "url", "url": "rediss://elsewhere:6379/0", "passwordKey": "redis"}
TO_REDIS = {
    "egress": [{"to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}], "ports": [{"port": 6379}]}]
}
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
    "own-store": {"store": {"kind": "url", "url": "redis://elsewhere:6379/0"}, "access": TO_REDIS},
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
    "password": {"store": OWN_REDIS, "access": TO_REDIS},
    "password-alone": {"server": {"enabled": False}, "store": OWN_REDIS, "access": TO_REDIS},
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


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is built


@cache
def chart() -> Any:
    return tool("helm_python").Chart.load(CHART)


def text(values: Mapping[str, Any], name: str = "kvcore") -> dict[str, str]:
    """Return what Helm makes of the chart with pinned images, by template."""
    return as_given(merged(PINNED, values), name)


def as_given(values: Mapping[str, Any], name: str = "kvcore") -> dict[str, str]:
    return _made(json.dumps(values), name)


@cache
def _made(values: str, name: str) -> dict[str, str]:
    given = json.loads(values)
    chart().validate_schema(given)
    made = chart().render(given, name=name, namespace="models")
    return {Path(path).name: str(found) for path, found in made.items()}


def rendered(values: Mapping[str, Any], name: str = "kvcore") -> list[dict[str, Any]]:
    """Return the resources that Helm makes of the chart with pinned images.

    They are read once: copy one before you change it.
    """
    return _read(json.dumps(merged(PINNED, values)), name)


@cache
def _read(values: str, name: str) -> list[dict[str, Any]]:
    made = [found for path, found in _made(values, name).items() if path != "NOTES.txt"]
    return [found for each in made for found in yaml.load_all(each, LOADER) if found]


def merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(values)
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = merged(made[name], value) if both else value
    return made
