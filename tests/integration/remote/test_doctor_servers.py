"""`kvcore doctor` asks real servers: up, hung and gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.cli.probe import Finding, Level, contacts
from kvcore.config import load_config
from kvcore.plugins import PluginManager
from kvcore_devtools.servers import Server, Start, etcd, nats, need_client, redis_like

for client in ("redis", "etcd3gw", "nats"):
    need_client(client)

LIMIT_S = 60.0
"""For what answers in milliseconds on a machine that is not held."""


def redis_settings(port: int) -> dict[str, Any]:
    options = {"url": f"redis://127.0.0.1:{port}/0", "timeout_s": 300}
    return {"tiers": {"r": {"plugin": "redis", "options": options}}}


SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "redis": redis_settings,
    "etcd": lambda port: {"cluster": {"etcd": [f"http://127.0.0.1:{port}"], "ttl_s": 600}},
    "nats": lambda port: {"events": {"nats": f"nats://127.0.0.1:{port}"}},
}


def ask(kind: str, server: Server, seconds: float) -> Finding:
    config = load_config(overrides=SETTINGS[kind](server.port), env={})
    [found] = contacts(config, PluginManager(), seconds)
    return found


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_server_that_is_up_then_hangs_then_is_gone(kind: str, start_server: Start) -> None:
    makers = {"redis": lambda: redis_like("redis-server"), "etcd": etcd, "nats": nats}
    server = start_server(makers[kind]())
    limit = time.monotonic() + LIMIT_S
    while (found := ask(kind, server, LIMIT_S)).level is not Level.GOOD:
        assert time.monotonic() < limit, found  # etcd elects itself first
    assert "answers" in found.found
    server.hang()
    began = time.monotonic()
    found = ask(kind, server, 1.0)
    assert time.monotonic() - began < LIMIT_S, "it waited for the client's own time"
    assert found.level is Level.PROBLEM
    assert found.change
    server.go_on()
    server.kill()
    assert ask(kind, server, LIMIT_S).level is Level.PROBLEM
