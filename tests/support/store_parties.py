"""Real stores with several parties: each opens a client, or a node, of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvcore.tiers.remote import BlockStore
from kvcore_devtools.servers import Start, mooncake_master, need_client, redis_like

MIB = 1 << 20
Opener = Callable[[], BlockStore]
"""Opens one party's client of a store."""


def files(start: Start, folder: Path, stack: ExitStack) -> Opener:
    need_client("nixl_cu13")
    from kvcore.tiers.remote.files.store import FileOptions, open_store

    return lambda: open_store(FileOptions(path=folder / "files", timeout_s=60.0))


def objects(start: Start, folder: Path, stack: ExitStack) -> Opener:
    need_client("obstore")
    from kvcore.tiers.remote.objects import ObjectOptions, open_store

    return lambda: open_store(ObjectOptions(url=(folder / "objects").as_uri(), timeout_s=60.0))


def redis(start: Start, folder: Path, stack: ExitStack) -> Opener:
    need_client("redis")
    from kvcore.tiers.remote.redis import RedisOptions, open_store

    url = f"redis://127.0.0.1:{start(redis_like('redis-server')).port}/0"
    return lambda: open_store(RedisOptions(url=url, timeout_s=60.0))


def mooncake(start: Start, folder: Path, stack: ExitStack) -> Opener:
    need_client("mooncake.store")
    from kvcore.tiers.remote.mooncake import MooncakeOptions, MooncakeStore

    master = f"127.0.0.1:{start(mooncake_master()).port}"

    def connect(lend: int = 0) -> BlockStore:
        return MooncakeStore(MooncakeOptions(master=master, host="127.0.0.1", lend=lend), rank=0)

    lender = connect(64 * MIB)
    stack.callback(lender.close)
    lender.exists(["join"])
    return connect


def peer(start: Start, folder: Path, stack: ExitStack) -> Opener:
    """Each party is a node. The attacker takes values away and has its own under their names."""
    need_client("nixl_cu13")
    os.environ.setdefault("UCX_TLS", "tcp")
    from kvcore.tiers.remote.peer.options import PeerOptions
    from kvcore.tiers.remote.peer.store import PeerStore
    from kvcore_devtools.peer_node import PATIENCE_S, address

    nodes: list[str] = []

    def connect() -> BlockStore:
        listen = address()
        options = PeerOptions(listen=listen, peers=list(nodes), lend=MIB, timeout_s=PATIENCE_S)
        nodes.append(listen)
        return PeerStore(options, rank=0)

    return connect


STORES = [files, objects, redis, mooncake, peer]
