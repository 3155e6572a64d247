"""Nodes of the `peer` store that find each other in a real etcd: as they come, and as they die."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.config.schema_cluster import ClusterConfig
from kvcore.errors import ConfigError
from kvcore.plugins import TierContext
from kvcore.testing.store_contract import fetch, value
from kvcore.testing.waiting import until
from kvcore_devtools.peer_node import PATIENCE_S, PeerNode, address
from kvcore_devtools.servers import Server, Start, etcd, need_client

for client in ("nixl_cu13", "etcd3gw"):
    need_client(client)

from kvcore.cluster import Member, open_directory  # noqa: E402
from kvcore.cluster.etcd import EtcdDirectory  # noqa: E402
from kvcore.tiers.remote.peer.options import PeerOptions  # noqa: E402
from kvcore.tiers.remote.peer.store import KIND, PeerStore  # noqa: E402
from kvcore.tiers.remote.tier import prepare  # noqa: E402

os.environ.setdefault("UCX_TLS", "tcp")

NBYTES = 100_000
FAULT = "looking up peer nodes failed"
FOLDER = "kvcore/model/h0-2.l0-4"
A, B, C = (f"{FOLDER}/{letter * 32}" for letter in "abc")


@pytest.fixture(scope="module")
def server(start_server: Start) -> Server:
    return start_server(etcd())


@pytest.fixture
def cluster(server: Server, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The test's own part of etcd."""
    where = [f"http://127.0.0.1:{server.port}"]
    return {"etcd": where, "ttl_s": 2, "prefix": f"/{request.node.name}"}


@pytest.fixture
def reader(cluster: dict[str, Any]) -> Iterator[PeerStore]:
    options = PeerOptions(listen=address(), peers="etcd", timeout_s=PATIENCE_S, lend=NBYTES)
    store = PeerStore(options, rank=0)
    store.join(ClusterConfig(**cluster))
    yield store
    store.close()


def patient(cluster: dict[str, Any]) -> EtcdDirectory:
    """The test's own view of it, whose calls have time on a busy machine: they get a part of
    ``ttl_s``."""
    directory = open_directory(load_config(None, {"cluster": {**cluster, "ttl_s": 60}}))
    assert isinstance(directory, EtcdDirectory)
    return directory


def node(cluster: dict[str, Any]) -> PeerNode:
    return PeerNode(peers="etcd", cluster=cluster, lend="8MiB")


def knows(store: PeerStore, other: PeerNode) -> bool:
    return f"tcp://{other.listen}" in store.peers


def test_nodes_come_and_die_and_the_last_list_outlives_etcd(
    server: Server, cluster: dict[str, Any], reader: PeerStore
) -> None:
    assert reader.exists([A]) == [False], "nobody is there yet"
    with node(cluster) as first, node(cluster) as second:
        until(lambda: knows(reader, first) and knows(reader, second), "nobody was found")
        first.call("put", seeds={A: 1}, nbytes=NBYTES)
        second.call("put", seeds={B: 2}, nbytes=NBYTES)
        assert reader.exists([A, B, C]) == [True, True, False]
        assert fetch(reader, A, NBYTES) == value(1, NBYTES)
        assert len(reader.peers) == 2, "it is not among its own peers"

        first.kill()
        until(lambda: not knows(reader, first), "a lost lease is still asked")
        assert reader.exists([A, B]) == [False, True]

        server.kill()
        until(lambda: reader._discovery is not None and reader._discovery._fails, "etcd is gone")
        assert fetch(reader, B, NBYTES) == value(2, NBYTES), "who was known stays"
        server.start()
        with node(cluster) as third:
            third.call("put", seeds={C: 3}, nbytes=NBYTES)
            until(lambda: knows(reader, third) and knows(reader, second), "not found anew")
            assert fetch(reader, C, NBYTES) == value(3, NBYTES)
            assert fetch(reader, B, NBYTES) == value(2, NBYTES)


def test_a_node_leaves_when_it_closes_and_strangers_are_passed_over(
    cluster: dict[str, Any], reader: PeerStore, caplog: pytest.LogCaptureFixture
) -> None:
    directory = patient(cluster)
    until(lambda: len(directory.members("worker")) == 1, "the reader is not entered")
    for number, details in enumerate(
        ({}, {"peer": "ipc:///tmp/x"}, {"peer": "tcp://h:1-9"}, {"peer": "tcp://gone:7"})
    ):
        directory.join(Member("worker", f"other-{number}", details=details))
    directory.join(Member("worker", "apart", group="another", details={"peer": "tcp://apart:7"}))
    until(lambda: "tcp://gone:7" in reader.peers, "not found")
    assert len(reader.peers) == 1
    assert "is ignored" in caplog.text
    reader._discovery.close()  # type: ignore[union-attr]
    names = {member.name for member in directory.members("worker")}
    assert names == {"other-0", "other-1", "other-2", "other-3", "apart"}
    directory.close()


def test_what_others_write_in_etcd_stops_nobody(
    cluster: dict[str, Any],
    reader: PeerStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Values that are no members, addresses of no host, and a fault of ours."""
    discovery = reader._discovery
    assert discovery is not None

    def ended() -> bool:
        return not discovery._thread.is_alive()

    def fails() -> bool:
        """Every look finds what the last one found."""
        return ended() or FAULT in caplog.text

    directory = patient(cluster)
    until(lambda: len(directory.members("worker")) == 1, "the reader is not entered")
    client, folder = directory._clients[0], f"{cluster['prefix']}/members/worker"
    member = '{"kind": "worker", "name": "x", "details": %s}'
    values = ["", "[]", member % "null", member % '{"peer": 7}', member % '["peer"]']
    for number, said in enumerate(values):
        client.put(f"{folder}/bad-{number}", said)
    directory.join(Member("worker", "nowhere", details={"peer": "tcp://-:7"}))
    with node(cluster) as other:
        other.call("put", seeds={A: 1}, nbytes=NBYTES)
        until(lambda: knows(reader, other), "not found among them", hopeless=fails)
        until(
            lambda: "tcp://-:7" in reader.peers, "its address is not taken as it is", hopeless=fails
        )
        assert reader.exists([A, B]) == [True, False], "one that is nowhere fails no others"
        assert fetch(reader, A, NBYTES) == value(1, NBYTES)
    with monkeypatch.context() as patch:
        looked = threading.Event()

        def fault(*_: Any, **__: Any) -> Any:
            looked.set()
            raise RuntimeError("a fault")

        patch.setattr(discovery._directory, "members", fault)
        until(looked.is_set, "nobody looked", hopeless=ended)
        until(lambda: FAULT in caplog.text, "nobody is told", hopeless=ended)
    with node(cluster) as other:
        until(lambda: knows(reader, other), "nobody looks any more", hopeless=ended)
    directory.close()


def test_without_etcd_it_is_refused_by_name() -> None:
    from kvcore.model.shape import BlockShape
    from kvcore.tiers.disk import Geometry

    geometry = Geometry(BlockShape(4, 2, 64, 16, "float32"), b"model", ((0, 2),))
    context = TierContext("far", geometry, 1 << 20, {"peers": "etcd"}, cluster=ClusterConfig())
    with pytest.raises(ConfigError, match=r"tiers\.far\.options.*needs cluster\.etcd"):
        prepare(context, KIND)
    with pytest.raises(ConfigError, match=r"tiers\.far\.options.*peers"):
        prepare(TierContext("far", geometry, 1 << 20, {"peers": "nats"}), KIND)
