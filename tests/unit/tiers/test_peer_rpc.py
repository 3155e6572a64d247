"""Messages between nodes: garbage is refused, whoever sends it, and a dead node costs its time."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError, FormatError, TierUnavailable

pytest.importorskip("zmq")

import zmq

from kvcore.tiers.remote.peer import rpc
from kvcore.tiers.remote.peer.leases import LentMemory
from kvcore.tiers.remote.peer.messages import (
    HEADER,
    MAX_MESSAGE,
    MAX_NAMES,
    Done,
    Ended,
    Find,
    Found,
    Lease,
    Leased,
    Meet,
    Met,
    Refused,
    Remove,
    Removed,
    decode_reply,
    decode_request,
    frames,
)
from kvcore.tiers.remote.peer.rpc import Peers, PeerServer
from kvcore_devtools.servers import free_port

BASE = 1 << 40


class Node:
    """What answers, without NIXL."""

    def __init__(self) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.lent = LentMemory(memoryview(bytearray(1 << 16)), lease_s=600.0)
        self.server = PeerServer(self.address, self.lent, BASE, lambda: ("me", b"metadata"))


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.server.close()
    made.server.close()


@pytest.fixture
def peers(node: Node) -> Iterator[Peers]:
    made = Peers([node.address], 60.0)
    yield made
    made.close()
    made.close()


def test_every_question_has_its_answer(node: Node, peers: Peers) -> None:
    def ask(request: object) -> object:
        return peers.ask({node.address: request})[node.address]  # type: ignore[dict-item]

    node.lent.put("kvcore/m/a", [memoryview(b"x" * 100)])
    node.lent.put("kvcore/m/b", [memoryview(b"y" * 100)])
    assert ask(Find(["kvcore/m/b", "kvcore/m/c"])) == Found(b"\1\0", ["kvcore/m"])
    assert ask(Meet()) == Met("me", b"metadata")
    leased = ask(Lease(["kvcore/m/c", "kvcore/m/b"]))
    assert isinstance(leased, Leased)
    assert (leased.agent, leased.places) == ("me", [None, (BASE + 128, 100)])
    assert node.lent.leased == 1
    assert (leased.folders, peers.folders) == (["kvcore/m"], {"kvcore/m"})
    assert ask(Remove(["kvcore/m/b"])) == Removed(["kvcore/m"])
    assert ask(Done(leased.lease)) == Ended(True)
    assert ask(Done(leased.lease)) == Ended(False)
    assert ask(Find(["kvcore/m/b"])) == Found(b"\0", ["kvcore/m"])
    assert ask(Remove(["kvcore/m/a"])) == Removed([])
    assert peers.folders == set(), "what it said last"
    assert node.lent.leased == 0


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_what_is_no_message_is_refused(parts: list[bytes]) -> None:
    for decode in (decode_request, decode_reply):
        for given_ in (parts, [HEADER, *parts]):
            try:
                decode(given_)
            except FormatError:
                continue
            assert given_[0] == HEADER


@pytest.mark.parametrize(
    "parts",
    [
        [b"garbage"],
        [HEADER],
        [b"kvpeer\x09\0\0\0", frames(Meet())[1]],
        [HEADER, b"\xc1"],
        [HEADER, b"\x91" * 5000],
        [HEADER, b"\x92\xa4find\x91\xa3a b"],
        frames(Find(["a"] * (MAX_NAMES + 1))),
        frames(Done(-1)),
        frames(Removed()),
    ],
)
def test_garbage_is_refused_by_name_and_the_others_are_served(
    node: Node, peers: Peers, parts: Sequence[bytes]
) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(node.address)
    stranger.send_multipart(parts)
    assert stranger.poll(60_000)
    assert isinstance(decode_reply(stranger.recv_multipart()), Refused)
    stranger.close()
    context.term()
    assert isinstance(peers.ask({node.address: Meet()})[node.address], Met)


def test_what_is_too_long_or_no_zeromq_at_all_harms_nobody(node: Node, peers: Peers) -> None:
    host, _, port = node.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(node.address)
    stranger.send_multipart([HEADER, b"x" * (MAX_MESSAGE + 1)])
    assert isinstance(peers.ask({node.address: Meet()})[node.address], Met)
    stranger.close()
    context.term()


def test_reads_that_hang_keep_no_message_waiting() -> None:
    """NIXL may not return for a while. The node is there all the same, and says so."""
    stuck, go_on, again = threading.Event(), threading.Event(), threading.Event()

    def progress() -> None:
        if go_on.is_set():
            again.set()
        stuck.set()
        go_on.wait()

    address = f"tcp://127.0.0.1:{free_port()}"
    lent = LentMemory(memoryview(bytearray(1 << 16)), lease_s=600.0)
    lent.put("kvcore/m/a", [memoryview(b"x" * 100)])
    server = PeerServer(address, lent, BASE, lambda: ("me", b"metadata"), progress)
    peers = Peers([address], 20.0)
    try:
        leased = peers.ask({address: Lease(["kvcore/m/a"])})[address]
        assert isinstance(leased, Leased)
        assert stuck.wait(60.0)
        assert isinstance(peers.ask({address: Meet()})[address], Met)
        assert peers.ask({address: Done(leased.lease)})[address] == Ended(True)
        go_on.set()
        assert again.wait(60.0), "a little longer than the lease"
    finally:
        go_on.set()
        peers.close()
        server.close()


def test_reads_are_served_from_a_lease_on_and_whatever_they_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc, "_LINGER_S", 0.01)
    calls = threading.Semaphore(0)

    def progress() -> None:
        calls.release()
        raise RuntimeError("NIXL")

    address = f"tcp://127.0.0.1:{free_port()}"
    lent = LentMemory(memoryview(bytearray(1 << 16)), lease_s=600.0)
    lent.put("kvcore/m/a", [memoryview(b"x" * 100)])
    server = PeerServer(address, lent, BASE, lambda: ("me", b"metadata"), progress)
    peers = Peers([address], 60.0)
    try:
        assert not calls.acquire(timeout=0.2), "nothing is leased"
        for _ in range(2):
            leased = peers.ask({address: Lease(["kvcore/m/a"])})[address]
            assert isinstance(leased, Leased)
            for _ in range(3):
                assert calls.acquire(timeout=60.0)
            assert peers.ask({address: Done(leased.lease)})[address] == Ended(True)
    finally:
        peers.close()
        server.close()
    [record] = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "serving other nodes' reads" in record.getMessage()


def test_a_dead_node_costs_its_time_thrice_and_then_nothing(node: Node) -> None:
    dead = f"tcp://127.0.0.1:{free_port()}"
    peers = Peers([dead, node.address], 0.3)
    for _ in range(3):
        assert set(peers.available()) == {dead, node.address}
        began = time.monotonic()
        answers = peers.ask(dict.fromkeys(peers.available(), Meet()))
        assert time.monotonic() - began >= 0.3
        assert isinstance(answers[dead], TierUnavailable)
    assert dead not in peers.available()
    peers.close()


def test_a_port_that_is_taken_is_named(node: Node) -> None:
    with pytest.raises(TierUnavailable, match="listen"):
        PeerServer(node.address, node.lent, BASE, lambda: ("me", b""))


def test_addresses_are_checked() -> None:
    from kvcore.tiers.remote.peer.options import PeerOptions, addresses

    assert addresses("node-1:7801-7803") == [f"tcp://node-1:{p}" for p in (7801, 7802, 7803)]
    assert addresses("[fe80::1]:5") == ["tcp://[fe80::1]:5"]
    for wrong in ("node", "node:0", "node:5-4", "tcp://node:1", "node:1-900", "a b:1", "n:99999"):
        with pytest.raises(ConfigError):
            addresses(wrong)
    assert (
        PeerOptions(listen="0.0.0.0:7801", trusted_network=True).address(2) == "tcp://0.0.0.0:7803"
    )
