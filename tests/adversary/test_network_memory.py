"""A host on the network, or a writer of the store, sends more than memory should hold.

The parts are the real ones and run in this process, so its resident memory is what they hold. What
a stranger sends beyond the limits stays in the sockets of the kernel, or ends its connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("zmq")

from kvcore._util.curve import make_keys
from kvcore.errors import ClusterError, CorruptBlock
from kvcore.events.publisher import Publisher
from kvcore.events.zmq_bus import ZmqOutlet
from kvcore.testing.store_contract import fetch, put
from kvcore.tiers.remote.base import BlockStore
from kvcore.tiers.remote.peer.leases import LentMemory
from kvcore.tiers.remote.peer.messages import HEADER
from kvcore.tiers.remote.peer.rpc import PeerServer
from kvcore_devtools.server_fixture import RunningServer, settings
from kvcore_devtools.servers import free_port, need_client, redis_like, servers
from support.zmtp import COMMAND, MIB, MORE, Stranger, frame, grown

SENT = 128 * MIB
BOUND = 40 * MIB


@contextmanager
def events(tmp_path: Path) -> Iterator[tuple[str, str]]:
    outlet = ZmqOutlet("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kvcore")
    publisher = Publisher({"host": (b"", b"")}, list, [outlet], 16)
    publisher.start()
    assert outlet.replay_endpoint is not None
    yield outlet.endpoint, outlet.replay_endpoint
    publisher.close()


@contextmanager
def replays(tmp_path: Path) -> Iterator[str]:
    with events(tmp_path) as (_, replay):
        yield replay


@contextmanager
def subscribers(tmp_path: Path) -> Iterator[str]:
    with events(tmp_path) as (endpoint, _):
        yield endpoint


@contextmanager
def peers(tmp_path: Path) -> Iterator[str]:
    address = f"tcp://127.0.0.1:{free_port()}"
    lent = LentMemory(memoryview(bytearray(4096)), lease_s=60.0)
    server = PeerServer(address, lent, 1 << 40, lambda: ("me", b"metadata"))
    yield address
    server.close()


@contextmanager
def server(tmp_path: Path) -> Iterator[str]:
    make_keys(tmp_path / "keys")
    address = f"tcp://127.0.0.1:{free_port()}"
    tcp = {"address": address, "keys": str(tmp_path / "keys")}
    running = RunningServer(settings(tmp_path / "kv", server=tcp))
    yield address
    running.close()


Door = Callable[[Path], AbstractContextManager[str]]
DOORS = [(replays, b"DEALER"), (subscribers, b"SUB"), (peers, b"DEALER")]
at_every_door = pytest.mark.parametrize(
    ("door", "kind"), DOORS, ids=["replays", "subscribers", "peers"]
)


@at_every_door
@pytest.mark.parametrize("size", [0, 100, 1000, 100_000])
def test_a_message_of_many_frames_is_cut_off(
    door: Door, kind: bytes, size: int, tmp_path: Path
) -> None:
    """ZeroMQ keeps the frames of a message until its last, and its limit is for each of them."""
    with door(tmp_path) as address:
        stranger = Stranger(address).ready(kind)
        piece = frame(bytes(size), MORE)
        assert grown(lambda: stranger.flood(piece, SENT if size else SENT // 16)) < BOUND
        assert stranger.closed()


@at_every_door
def test_connections_that_each_hold_a_part_of_a_message(
    door: Door, kind: bytes, tmp_path: Path
) -> None:
    with door(tmp_path) as address:
        held = []

        def attack() -> None:
            for _ in range(300):
                try:
                    held.append(Stranger(address).ready(kind))
                except (OSError, ValueError):  # no more are taken
                    continue
                held[-1].socket.sendall(frame(bytes(500), MORE))

        assert grown(attack) < 2 * BOUND
        assert len(held) <= 256
        for one in held:
            one.socket.close()


@pytest.mark.slow
def test_requests_that_nobody_waits_for(tmp_path: Path) -> None:
    with peers(tmp_path) as address:
        stranger = Stranger(address).ready()
        find = frame(HEADER, MORE) + frame(b"\x92\xa4find\x91" + b"\xd9\xc8" + b"a" * 200)
        assert grown(lambda: stranger.flood(find, SENT // 8)) < BOUND


def test_subscriptions_without_end(tmp_path: Path) -> None:
    """ZeroMQ keeps each in a tree of single bytes."""
    with subscribers(tmp_path) as address:
        stranger = Stranger(address).ready(b"SUB")

        def attack() -> None:
            with suppress(OSError):
                for n in range(20_000):
                    stranger.socket.sendall(frame(b"\x01" + n.to_bytes(4, "big") + bytes(500)))

        assert grown(attack) < BOUND
        assert stranger.closed()


@pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE", b"PLAIN"])
def test_a_handshake_without_end_at_the_server(mechanism: bytes, tmp_path: Path) -> None:
    with server(tmp_path) as address:
        strangers = [Stranger(address, mechanism) for _ in range(20)]

        def attack() -> None:
            for one in strangers:
                one.flood(frame(bytes(8 * MIB), COMMAND), 8 * MIB)

        assert grown(attack) < BOUND
        assert all(one.closed() for one in strangers)


# -- stores -----------------------------------------------------------------------------------


def huge(store: BlockStore, nbytes: int) -> None:
    """Read a value of 4 KiB under whose name somebody has put ``nbytes``."""

    def read() -> None:
        with pytest.raises(CorruptBlock, match=f"{nbytes} bytes"):
            fetch(store, "kvcore/forged", 4096)

    assert grown(read) < BOUND
    put(store, {"kvcore/good": b"x" * 4096})
    assert fetch(store, "kvcore/good", 4096) == b"x" * 4096
    store.close()


def sparse(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(nbytes)


def test_an_object_is_not_read_before_its_size(tmp_path: Path) -> None:
    need_client("obstore")
    from kvcore.tiers.remote.objects import ObjectOptions, open_store

    sparse(tmp_path / "kvcore" / "forged", 300 * MIB)
    huge(open_store(ObjectOptions(url=tmp_path.as_uri(), timeout_s=60.0)), 300 * MIB)


def test_a_file_is_not_read_before_its_size(tmp_path: Path) -> None:
    need_client("nixl_cu13")
    from kvcore.tiers.remote.files.store import FileOptions, open_store

    sparse(tmp_path / "kvcore" / "forged", 300 * MIB)
    huge(open_store(FileOptions(path=tmp_path, timeout_s=60.0)), 300 * MIB)


def test_a_pipe_in_a_folder_of_files_holds_nobody_up(tmp_path: Path) -> None:
    need_client("nixl_cu13")
    import os

    from kvcore.tiers.remote.files.store import FileOptions, open_store

    (tmp_path / "kvcore").mkdir()
    os.mkfifo(tmp_path / "kvcore" / "forged")
    huge(open_store(FileOptions(path=tmp_path, timeout_s=60.0)), 0)


def test_a_value_of_redis_passes_through_a_small_buffer(tmp_path: Path) -> None:
    need_client("redis")
    import redis as client

    from kvcore.tiers.remote.redis import RedisOptions, open_store

    with servers(tmp_path) as start:
        made = start(redis_like("redis-server"))
        where = client.Redis(port=made.port)
        where.setrange("kvcore/forged", 200 * MIB - 1, b"x")
        where.close()
        url = f"redis://127.0.0.1:{made.port}/0"
        huge(open_store(RedisOptions(url=url, timeout_s=60.0)), 200 * MIB)


class Endless(BaseHTTPRequestHandler):
    """An etcd whose answer does not end."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            self.wfile.write(b'{"kvs": [')
            for _ in range(SENT // MIB):
                self.wfile.write(b" " * MIB)
        except OSError:
            pass

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_an_answer_of_etcd_is_read_up_to_a_limit() -> None:
    need_client("etcd3gw")
    from kvcore.cluster.etcd import ANSWER_BYTES, EtcdDirectory

    liar = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=liar.serve_forever, daemon=True).start()
    with closing(EtcdDirectory([f"http://127.0.0.1:{liar.server_port}"], ttl_s=60)) as directory:

        def attack() -> None:
            with pytest.raises(ClusterError, match=f"more than {ANSWER_BYTES} bytes"):
                directory.members("worker")

        assert grown(attack) < 2 * BOUND
    liar.shutdown()
    liar.server_close()
