"""Tells which pods a set of Kubernetes network policies lets connect, by their specification.

Both ends must allow a connection: a policy that selects the sender must allow it under
`egress`, and one that selects the receiver under `ingress`. An end that no policy selects is open.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.deployment import WITH_PODS

HOME = "models"
NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class End:
    """A pod, or an address outside the cluster."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = HOME
    address: str = ""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Names of the pod's ports, which policies may use."""


def ends(resources: Iterable[dict[str, Any]]) -> dict[str, End]:
    """Return the pods of a deployment, by the name of their component."""
    found = {}
    for resource in resources:
        if resource["kind"] in WITH_PODS:
            pod = resource["spec"]["template"]
            labels = pod["metadata"]["labels"]
            ports = {
                port["name"]: port["containerPort"]
                for container in pod["spec"]["containers"]
                for port in container["ports"]
            }
            found[labels["app.kubernetes.io/name"]] = End(labels, ports=ports)
    return found


def reaches(policies: Sequence[Mapping[str, Any]], sender: End, receiver: End, port: int) -> bool:
    """Return True if the policies, all of the namespace HOME, let a TCP connection through."""
    return _lets(policies, "Egress", sender, receiver, receiver, port) and _lets(
        policies, "Ingress", receiver, sender, receiver, port
    )


def _lets(
    policies: Sequence[Mapping[str, Any]],
    way: str,
    subject: End,
    other: End,
    receiver: End,
    port: int,
) -> bool:
    if subject.namespace != HOME or subject.address:
        return True
    peers = {"Egress": "to", "Ingress": "from"}[way]
    specs = [
        policy["spec"]
        for policy in policies
        if way in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], subject.labels)
    ]
    return not specs or any(
        _is_listed(rule.get(peers), other) and _is_open(rule.get("ports"), receiver, port)
        for spec in specs
        for rule in spec.get(way.lower()) or []
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, "the others are not modelled"
    return selector.get("matchLabels", {}).items() <= labels.items()


def _is_listed(peers: Sequence[Mapping[str, Any]] | None, end: End) -> bool:
    return not peers or any(_is(peer, end) for peer in peers)  # an empty list names everybody


def _is(peer: Mapping[str, Any], end: End) -> bool:
    if "ipBlock" in peer:
        if not end.address:
            return False
        at = ipaddress.ip_address(end.address)
        inside = at in ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return inside and not any(
            at in ipaddress.ip_network(out) for out in peer["ipBlock"].get("except", [])
        )
    if end.address:
        return False
    spaces = peer.get("namespaceSelector")
    near = end.namespace == HOME if spaces is None else _selects(spaces, {NAMESPACE: end.namespace})
    return near and _selects(peer.get("podSelector", {}), end.labels)


def _is_open(ports: Sequence[Mapping[str, Any]] | None, receiver: End, port: int) -> bool:
    if not ports:
        return True
    for one in ports:
        first = one["port"] if isinstance(one["port"], int) else receiver.ports.get(one["port"], -1)
        if one.get("protocol", "TCP") == "TCP" and first <= port <= one.get("endPort", first):
            return True
    return False
