"""A host on the network speaks to the nodes of a `peer` tier, or answers in the place of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from kvcore._util.curve import make_keys
from kvcore.config import load_config
from kvcore.errors import ConfigError, TierUnavailable
from kvcore.testing.store_contract import fetch, put, value
from kvcore.tiers.remote.peer import rpc
from kvcore.tiers.remote.peer.leases import LentMemory
from kvcore.tiers.remote.peer.messages import Find, Found, Lease, Leased, Meet, Remove, Request
from kvcore.tiers.remote.peer.rpc import Peers, PeerServer
from kvcore_devtools.servers import free_port, need_client

NAMES = [f"kvcore/m/h0-1/{n:032x}" for n in range(64)]
PATIENCE_S = 60.0
SHORT_S = 0.5


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", "node-a")
    return tmp_path / "keys"


class Node:
    """What answers, without NIXL, with 64 values of 1 KiB that fill its memory."""

    def __init__(self, keys: Path | None) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.lent = LentMemory(memoryview(bytearray(64 << 10)), lease_s=600.0)
        self.server = PeerServer(
            self.address, self.lent, 1 << 40, lambda: ("me", b"metadata"), keys=keys
        )
        for name in NAMES:
            assert self.lent.put(name, [memoryview(bytes(1024))])


@pytest.fixture
def node(keys: Path) -> Iterator[Node]:
    made = Node(keys)
    yield made
    made.server.close()


def ask(node: Node, request: Request, timeout_s: float, keys: Path | None = None) -> Any:
    peers = Peers([node.address], timeout_s, keys=keys)
    reply = peers.ask({node.address: request})[node.address]
    peers.close()
    return reply


def strangers(tmp_path: Path) -> list[Path | None]:
    """No keys, and keys that the node does not list."""
    make_keys(tmp_path / "others", "node-a")
    return [None, tmp_path / "others"]


@pytest.mark.parametrize("request_", [Find(NAMES), Lease(NAMES), Remove(NAMES), Meet()])
def test_a_stranger_is_told_nothing_and_moves_nothing(
    node: Node, keys: Path, tmp_path: Path, request_: Request
) -> None:
    for theirs in strangers(tmp_path):
        assert isinstance(ask(node, request_, SHORT_S, theirs), TierUnavailable)
    assert all(node.lent.exists(NAMES))
    assert node.lent.leased == 0
    assert ask(node, Find(NAMES[:1]), PATIENCE_S, keys) == Found(b"\1", ["kvcore/m/h0-1"])


def test_once_a_nodes_guard_has_ended_nobody_new_is_heard(node: Node, keys: Path) -> None:
    guard = node.server._entrance._authenticator
    assert guard is not None
    guard.stop()
    for theirs in (keys, None):
        assert isinstance(ask(node, Remove(NAMES), SHORT_S, theirs), TierUnavailable)
    assert all(node.lent.exists(NAMES))


def test_who_answers_in_a_nodes_place_is_not_believed(keys: Path, tmp_path: Path) -> None:
    """Its NIXL metadata, which C++ parses, does not even arrive."""
    for theirs in strangers(tmp_path):
        impostor = Node(theirs)
        assert isinstance(ask(impostor, Meet(), SHORT_S, keys), TierUnavailable)
        impostor.server.close()


def test_one_node_cannot_pin_all_memory_or_take_all_leases(node: Node, keys: Path) -> None:
    make_keys(keys, "node-b")  # known from now on
    greedy = Peers([node.address], PATIENCE_S, keys=keys)
    for name in NAMES * 20:
        greedy.ask({node.address: Lease([name])})
    assert node.lent.leased <= 512
    (keys / "clients" / "node-a.key_secret").unlink()  # the pair of node-b is left
    other = ask(node, Lease(NAMES[:4]), PATIENCE_S, keys)
    assert isinstance(other, Leased)
    assert None not in other.places
    assert node.lent.put("kvcore/m/h0-1/new", [memoryview(bytes(1024))])
    greedy.close()


def test_a_node_listens_to_its_own_machine_unless_it_is_told_otherwise() -> None:
    need_client("nixl_cu13")
    from kvcore.tiers.remote.options import read_options
    from kvcore.tiers.remote.peer.options import PeerOptions
    from kvcore.tiers.spec import TierContext

    def options(**given: Any) -> PeerOptions:
        context = TierContext.__new__(TierContext)
        object.__setattr__(context, "name", "far")
        object.__setattr__(context, "options", given)
        return read_options(PeerOptions, context)

    assert options().address(0) == "tcp://127.0.0.1:7801"
    for listen in ("0.0.0.0:7801", "[::]:7801", "10.0.0.5:7801", "node-a:7801", "*:7801"):
        with pytest.raises(ConfigError, match=r"\[tiers\.far\.options\]: listen = .* set `keys`"):
            options(listen=listen)
        options(listen=listen, keys="/etc/kvcore/keys")
        options(listen=listen, trusted_network=True)


@pytest.mark.parametrize(
    "events",
    [
        {"endpoint": "tcp://*:5657"},
        {"endpoint": "@tcp://10.0.0.5:5657"},
        {"replay_endpoint": "tcp://0.0.0.0:5658"},
        {"replay_endpoint": "tcp://node-a:5658"},
    ],
)
def test_events_are_not_told_to_every_address_by_mistake(events: dict[str, Any]) -> None:
    def load(**more: Any) -> None:
        load_config(overrides={"events": {**events, **more}}, env={})

    with pytest.raises(ConfigError, match="trusted_network = true"):
        load()
    load(trusted_network=True)
    load(keys="/etc/kvcore/keys")


@pytest.mark.slow
def test_nodes_with_keys_read_each_other_and_nobody_else_does(keys: Path, tmp_path: Path) -> None:
    need_client("nixl_cu13")
    from kvcore.tiers.remote.peer.options import PeerOptions
    from kvcore.tiers.remote.peer.store import PeerStore

    def open_store(folder: Path | None, *peers: str) -> tuple[PeerStore, str]:
        listen = f"127.0.0.1:{free_port()}"
        told = {"lend": 1 << 20, "timeout_s": PATIENCE_S if folder == keys else SHORT_S}
        options = PeerOptions(listen=listen, peers=list(peers), keys=folder, **told)
        return PeerStore(options, 0), listen

    owner, at = open_store(keys)
    put(owner, {NAMES[0]: value(1, 5000)})
    reader, _ = open_store(keys, at)
    assert fetch(reader, NAMES[0], 5000) == value(1, 5000)
    for folder in strangers(tmp_path):
        stranger, _ = open_store(folder, at)
        with pytest.raises(TierUnavailable):
            stranger.exists([NAMES[0]])
        with pytest.raises(TierUnavailable):
            stranger.delete([NAMES[0]])
        stranger.close()
    assert owner.exists([NAMES[0]]) == [True]
    reader.close()
    owner.close()


def test_a_node_without_keys_takes_a_bounded_number_of_connections() -> None:
    assert rpc.UNKNOWN.connections * rpc._QUEUED * rpc.MAX_REQUEST <= 512 << 20
