"""What a client can learn of others, and make others wait for, by what it asks for itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.config import Config, load_config
from kvcore.connector.clients import Clients
from kvcore.explain.request_log import Cause, Miss, RequestRecord
from kvcore.model.identity import Namespaces
from kvcore.model.keys import KeyChain
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers.remote.peer.options import PeerOptions
from kvcore_vllm.handover import Handover

PROMPT = list(range(64))
TABLES = {
    "clients": {"report": "tokens"},
    "tenants": {
        "quiet": {"salt": "q-1", "report": "off", "promises": False},
        "trusted": {"salt": "t-1", "report": "explain"},
        "rest": {"salt": "", "promises": False},
    },
}


def _answer(config: Config, salt: str, *, lora: str = "", role: str = "kv_both") -> Any:
    """Return the keys that the client of a request gets back, if it asks for all there is."""
    chain = KeyChain(Namespaces(config.namespace, b"f" * 16).of(lora, salt), 16)
    chain.extend(PROMPT)
    manager: Any = SimpleNamespace(expected=len, points=None, node="10.1.2.3:7801")
    handover = Handover(role, 5.0, manager, Clients(config), Metrics())
    params = {"kvcore": {"report": True}, "do_remote_decode": True}
    request: Any = SimpleNamespace(
        kv_transfer_params=params, num_prompt_tokens=64, request_id="r", cache_salt=salt
    )
    told = handover.reply(request, chain, 4, {"host": 48}, {"ratio": 0.1}, {"misses": []})
    promise = {} if told is None else told["kvcore"].get("promise")
    asked: Any = SimpleNamespace(
        kv_transfer_params={"kvcore": {"promise": promise}}, request_id="r"
    )
    accepted = handover.accepted(asked, chain) if promise else None
    assert (accepted is not None) == bool(promise)
    return set() if told is None else set(told["kvcore"])


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize(
    ("salt", "keys"),
    [
        ("q-1", set()),
        ("t-1", {"reused_tokens", "tiers", "fusion", "explain", "promise"}),
        ("made up by a client", {"reused_tokens", "tiers", "fusion", "promise"}),
        ("", {"reused_tokens", "tiers", "fusion"}),
    ],
)
def test_a_client_gets_what_its_tenant_may_have(role: str, salt: str, keys: set[str]) -> None:
    config = load_config(overrides=TABLES, env={})
    assert _answer(config, salt, role=role) == keys
    assert _answer(config, salt, lora="a LoRA that no setting lists", role=role) == keys


@pytest.mark.parametrize("salt", ["", "usual"])
def test_by_default_nobody_learns_what_others_without_a_salt_have_sent(salt: str) -> None:
    """Any client may leave the salt out. Where one tenant has a name, there are others."""
    tables: dict[str, Any] = {"namespace": {"salt": "usual"}}
    alone = load_config(overrides=tables, env={})
    tables["tenants"] = {"ann": {"salt": "a-1"}, "rest": {"salt": ""}}
    named = load_config(overrides=tables, env={})
    everything = {"reused_tokens", "tiers", "fusion", "explain", "promise"}
    assert _answer(alone, salt) == everything
    assert _answer(named, salt) == {"promise"}
    for own in ("a-1", "made up by a client"):
        assert _answer(alone, own) == _answer(named, own) == everything
    tables["tenants"]["rest"]["report"] = "tokens"
    told = load_config(overrides=tables, env={})
    assert _answer(told, salt) == everything - {"explain"}
    tables["tenants"].pop("rest")
    tables["clients"] = {"report": "explain"}
    assert _answer(load_config(overrides=tables, env={}), salt) == everything


def test_promises_of_others_are_not_waited_for() -> None:
    """A promise makes an engine ask stores and nodes, again and again, for `vllm.promise_s`."""
    config = load_config(overrides=TABLES, env={})
    free = load_config(env={})
    chain = KeyChain(Namespaces(config.namespace, b"f" * 16).of("", "q-1"), 16)
    chain.extend(PROMPT)
    manager: Any = SimpleNamespace(expected=len, points=None, node="n:1")
    giver = Handover("kv_producer", 5.0, manager, Clients(free), Metrics())
    request: Any = SimpleNamespace(kv_transfer_params=None, num_prompt_tokens=64, request_id="r")
    request.kv_transfer_params = giver.reply(request, chain, 4, {}, {}, None)
    assert giver.accepted(request, chain) is not None
    assert (
        Handover("kv_consumer", 5.0, manager, Clients(config), Metrics()).accepted(request, chain)
        is None
    )


def test_requests_without_a_salt_are_those_of_the_default_tenant() -> None:
    config = load_config(overrides={**TABLES, "namespace": {"salt": "usual"}}, env={})
    assert _answer(config, "") == _answer(config, "usual") == {"reused_tokens", "tiers", "fusion"}


def test_a_clients_record_is_the_same_whatever_others_do() -> None:
    """Clients learn neither who sent the text before nor when it was evicted."""
    causes = (
        Miss(Cause.NEVER_SEEN),
        Miss(Cause.EVICTED, "host", 3.25),
        Miss(Cause.OTHER_NAMESPACE, differed=("cache_salt",)),
        Miss(Cause.NO_POINT, held=48),
    )
    told = []
    for busy in (False, True):
        for cause in causes:
            late = Miss(Cause.BUSY) if busy else Miss(Cause.LATE)
            record = RequestRecord("r", 64, misses=[cause, late])
            told.append(record.as_dict(for_client=True))
            assert record.as_dict()["misses"][0]["cause"] == cause.cause.value
    assert all(one == told[0] for one in told)
    misses = [{"cause": "not held"}, {"cause": "not in host memory in time"}]
    assert told[0]["misses"] == misses
    assert not {"plan", "otherwise"} & told[0].keys()


@pytest.mark.parametrize(
    ("options", "admitted"),
    [
        ({}, {7801, 7864}),
        ({"listen": "0.0.0.0:9000", "trusted_network": True}, {9000, 9063}),
        ({"guest_ports": "6379"}, {6379}),
        ({"guest_ports": "22-80"}, {22, 80}),
    ],
)
def test_a_promise_names_no_port_but_those_of_nodes(
    options: dict[str, Any], admitted: set[int]
) -> None:
    """A client would make this node knock at any port of every host in the network."""
    found = PeerOptions(guests=["10.0.0.0/8", "a"], **options)
    for port in (1, 22, 80, 6379, 7800, 7801, 7864, 7865, 9000, 9063, 65535):
        for host in ("10.1.2.3", "a"):
            low, high = min(admitted), max(admitted)
            assert found.admits(f"tcp://{host}:{port}") == (low <= port <= high)
    assert not found.admits(f"tcp://11.1.2.3:{min(admitted)}")
