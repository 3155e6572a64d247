"""What the pods of `deploy/` may do, who reaches them, and what they know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.model.identity import Namespaces
from support.chart import DIGEST, PINNED, VALUES, VARIANTS, as_given, merged, rendered
from support.deployment import DEPLOY, MANIFESTS, WITH_PODS, documents, tool
from support.network_policy import End, ends, reaches
from support.together import for_every


def manifests(store: str) -> list[dict[str, Any]]:
    other = {"valkey": "mooncake.yaml", "mooncake": "valkey.yaml"}[store]
    return [
        found
        for path in MANIFESTS
        if path.name not in ("kustomization.yaml", other)
        for found in documents(path)
    ]


@cache
def deployment(name: str) -> list[dict[str, Any]]:
    if name.startswith("manifests with "):
        return manifests(name.removeprefix("manifests with "))
    return rendered(VARIANTS[name])


DEPLOYMENTS = [*VARIANTS, "manifests with valkey", "manifests with mooncake"]
deployments = for_every(DEPLOYMENTS)


def pods(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for resource in found:
        if resource["kind"] in WITH_PODS:
            yield resource["metadata"]["name"], resource["spec"]["template"]["spec"]


# -- pods -----------------------------------------------------------------------------------


@deployments
def test_pods_have_no_rights_that_they_do_not_need(name: str) -> None:
    for who, pod in pods(deployment(name)):
        assert pod["automountServiceAccountToken"] is False, who
        assert pod["enableServiceLinks"] is False, who
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"}, who
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }, who
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, who
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}, who
            assert container["resources"]["limits"]["memory"], who
            assert not any("hostPort" in port for port in container["ports"]), who
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]], who


@deployments
def test_services_are_inside_the_cluster(name: str) -> None:
    for resource in deployment(name):
        assert resource["kind"] != "Ingress"
        if resource["kind"] == "Service":
            assert not resource["spec"].keys() & {"type", "externalIPs", "loadBalancerIP"}


PLACEHOLDER = "@sha256:DIGEST"


@deployments
def test_images_are_named_by_digest(name: str) -> None:
    digest = PLACEHOLDER if "manifests with" in name else f"@{DIGEST}"
    for who, pod in pods(deployment(name)):
        for container in pod["containers"]:
            assert container["image"].endswith(digest), who


def test_the_manifests_leave_no_image_to_chance() -> None:
    """The placeholder is no image's name, so a pod whose digest was not set does not start."""
    assert not re.fullmatch(r"@sha256:[0-9a-f]{64}", PLACEHOLDER)
    [listed] = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    replaced = {image["name"] for image in listed["images"]}
    used = {
        re.split("[:@]", container["image"])[0]
        for _, pod in pods(manifests("valkey") + manifests("mooncake"))
        for container in pod["containers"]
    }
    assert used == replaced
    assert all(f"@{image['digest']}" == PLACEHOLDER for image in listed["images"])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "image.digest"),
        ({"image": {"tag": "1.0"}}, "image.digest"),
        ({"image": {"digest": DIGEST}, "store": {"kind": "valkey"}}, "store.valkey.image.digest"),
        ({"image": {"tag": "latest"}, "allowTags": True}, "image"),
        ({"image": {"digest": "sha256:0123"}}, "digest"),
        ({"image": {"repository": "kvcore-vllm:1.0", "digest": DIGEST}}, "repository"),
        (merged(PINNED, {"disk": {"hostPath": "/dev/shm/kv"}}), "hostPath"),
        (merged(PINNED, {"user": 0}), "user"),
    ],
)
def test_values_that_open_a_door_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(tool("helm_python").HelmError, match=told):
        as_given(merged(VALUES, values))


def test_a_tag_will_do_where_the_installer_says_so() -> None:
    values = {"image": {"tag": "0.1.0"}, "allowTags": True}
    assert "image: kvcore-vllm:0.1.0" in as_given(values)["engine.yaml"]


@deployments
def test_folders_of_the_node_are_those_that_only_root_can_make(name: str) -> None:
    owners: dict[str, set[int]] = {}
    for who, pod in pods(deployment(name)):
        for volume in pod.get("volumes", []):
            if "hostPath" not in volume:
                continue
            path = volume["hostPath"]["path"]
            assert re.fullmatch(r"/(run|var/cache)/kvcore/models-kvcore", path), who
            assert volume["hostPath"]["type"] == "Directory", "whoever makes it owns it"
            owners.setdefault(path, set()).add(pod["securityContext"]["runAsUser"])
    assert all(len(users) == 1 for users in owners.values())
    assert bool(owners) == (name not in ALONE)


ALONE = {
    *(n for n, values in VARIANTS.items() if not values.get("server", {}).get("enabled", True)),
    "manifests with valkey",
    "manifests with mooncake",
}


# -- the network ----------------------------------------------------------------------------


def policies(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [resource for resource in found if resource["kind"] == "NetworkPolicy"]


STRANGERS = {
    "a pod beside it": End({"app": "web"}),
    "a pod of another namespace": End({"app": "web"}, "other"),
    "one that says it is a client": End({"kvcore-client": "true"}, "other"),
    "one that says it is a router": End({"kvcore-router": "true"}, "other"),
    "one that says it is Prometheus": End({"app.kubernetes.io/name": "prometheus"}),
    "one that says it is an engine": End({"app.kubernetes.io/name": "engine"}, "other"),
    "a host": End(address="203.0.113.99"),
}
PORTS = (22, 80, 443, 5657, 5658, 6379, 8000, 9003, 9464, 15000, 17000, 50051)


@deployments
def test_a_stranger_reaches_nothing(name: str) -> None:
    found = deployment(name)
    reached = [
        f"{stranger} reaches {who} at {port}"
        for stranger, end in STRANGERS.items()
        for who, pod in ends(found).items()
        for port in PORTS
        if reaches(policies(found), end, pod, port)
    ]
    assert not reached


@deployments
def test_a_part_for_which_nobody_wrote_a_policy_is_closed(name: str) -> None:
    found = deployment(name)
    labels = {label: "new" for pod in ends(found).values() for label in pod.labels}
    common = {"app.kubernetes.io/instance": "kvcore", "app.kubernetes.io/part-of": "kvcore"}
    part = End({label: common.get(label, value) for label, value in labels.items()})
    for other in (*STRANGERS.values(), *ends(found).values()):
        assert not any(reaches(policies(found), other, part, port) for port in PORTS)
        assert not any(reaches(policies(found), part, other, port) for port in PORTS)


@deployments
def test_a_pod_of_ours_reaches_nothing_beside_its_own(name: str) -> None:
    found = deployment(name)
    inside = End({"app": "web"}), End({"app": "web"}, "other"), End({}, "kube-system")
    outside = End(address="10.0.0.1"), End(address="169.254.169.254")
    for who, pod in ends(found).items():
        for target in (*inside, *outside):
            assert not any(reaches(policies(found), pod, target, port) for port in PORTS), who


def open_ports(name: str, sender: End) -> dict[str, set[int]]:
    found = deployment(name)
    opened = {
        who: {port for port in PORTS if reaches(policies(found), sender, pod, port)}
        for who, pod in ends(found).items()
    }
    return {who: ports for who, ports in opened.items() if ports}


EVENTS = {5657, 5658}


@deployments
def test_those_who_are_named_reach_what_they_need(name: str) -> None:
    owner = "engine" if name in ALONE else "server"
    client = End({"kvcore-client": "true"})
    assert open_ports(name, client) == {"engine": {8000}}
    assert open_ports(name, End({"kvcore-router": "true"})) == {owner: EVENTS}
    scraper = End({"app.kubernetes.io/name": "prometheus"}, "monitoring")
    parts = ends(deployment(name))
    metrics = {"engine": {8000}, "server": {9464}, "mooncake-master": {9003}}
    assert open_ports(name, scraper) == {who: metrics[who] for who in parts if who in metrics}
    store = {"mooncake-master": {50051}} if "mooncake-master" in parts else {}
    store |= {"valkey": {6379}} if "valkey" in parts else {}
    lent = {owner: {15000, 17000}} if "mooncake-master" in parts else {}
    assert open_ports(name, parts[owner]) == {**store, **lent}
    for who in parts.keys() - {owner}:
        assert open_ports(name, parts[who]) == {}, who
    hub, dns = End(address="203.0.113.80"), End({"k8s-app": "kube-dns"}, "kube-system")
    for who, pod in parts.items():
        assert reaches(policies(deployment(name)), pod, hub, 443) == (who == "engine")
        assert reaches(policies(deployment(name)), pod, dns, 53) == (who in ("engine", "server"))


def test_nobody_is_let_in_where_nobody_is_listed() -> None:
    """An empty list of peers in a policy would name everybody."""
    none = {"access": {name: [] for name in ("clients", "routers", "scrapers", "dns", "models")}}
    found = rendered(none)
    for sender in (*STRANGERS.values(), End({"kvcore-client": "true"}), ends(found)["engine"]):
        for who, pod in ends(found).items():
            assert not any(reaches(policies(found), sender, pod, port) for port in PORTS), who


# -- secrets --------------------------------------------------------------------------------

SECRETS = {"namespace-secret": "s" * 32, "tenants": json.dumps({"Acme-1": {"salt": "pepper"}})}


def secrets_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a container that come from the secret, which is SECRETS."""
    sources = {v["name"]: v.get("valueFrom", {}).get("secretKeyRef") for v in container["env"]}
    return {name: SECRETS.get(at["key"], "") for name, at in sources.items() if at}


@deployments
def test_server_and_engines_mean_the_same_tenants(name: str) -> None:
    """A server without the secret would count and clear other namespaces than those in use."""
    spaces = {}
    for who, pod in pods(deployment(name)):
        [container] = pod["containers"]
        if who.endswith(("engine", "server")):
            config = load_config(env=secrets_of(container))
            salt = config.tenants["Acme-1"].salt
            spaces[who] = Namespaces(config.namespace, b"model").of("", salt).digest
    assert len(spaces) == (1 if name in ALONE else 2)
    own = load_config(env={"KVCORE__NAMESPACE__SECRET": SECRETS["namespace-secret"]})
    assert set(spaces.values()) == {Namespaces(own.namespace, b"model").of("", "pepper").digest}


@deployments
def test_engines_do_not_start_without_a_key_for_their_clients(name: str) -> None:
    for who, pod in pods(deployment(name)):
        if who.endswith("engine"):
            [key] = [v for v in pod["containers"][0]["env"] if v["name"] == "VLLM_API_KEY"]
            assert key["valueFrom"] == {"secretKeyRef": {"name": "kvcore", "key": "api-key"}}


@deployments
def test_only_who_has_the_tiers_and_the_store_know_the_stores_password(name: str) -> None:
    owner = "engine" if name in ALONE else "server"
    for who, pod in pods(deployment(name)):
        known = [v["secret"]["items"] for v in pod.get("volumes", []) if "secret" in v
                 and v["name"] == "store-password"]  # fmt: skip
        assert not known or who.endswith((owner, "valkey")), who
        if who.endswith("valkey"):
            assert known == [[{"key": "valkey-password", "path": "password"}]]
            [script] = pod["containers"][0]["args"]
            assert "/etc/kvcore-store/password" in script
