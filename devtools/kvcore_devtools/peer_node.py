"""A node of the `peer` store in a child process, for tests that kill, stop and disconnect it.

    with PeerNode(options) as node:
        node.call("put", seeds={"kvcore/m/h0-1/a": 1}, nbytes=1000)

It executes one call at a time. Calls are JSON, one per line. Values are made from seeds, so that
they need not be sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvcore.config.schema_cluster import ClusterConfig
from kvcore.testing.store_contract import fetch, put, value
from kvcore.tiers.remote.peer.messages import Lease, Leased
from kvcore.tiers.remote.peer.options import PeerOptions
from kvcore.tiers.remote.peer.store import PeerStore
from kvcore_devtools.servers import free_port, stand_still

__all__ = ["PATIENCE_S", "PeerNode", "address"]

PATIENCE_S = 300.0
"""Seconds to wait for something that takes one second on an idle machine."""


def address() -> str:
    """Return a free address to listen on."""
    return f"127.0.0.1:{free_port()}"


class PeerNode:
    """The parent's side of a node.

    ``options`` are those of `PeerOptions`; ``listen`` is a free port. ``cluster`` is the settings
    table ``[cluster]``.
    """

    def __init__(self, *, cluster: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.options = {"listen": address(), "timeout_s": PATIENCE_S, **options}
        devtools = Path(__file__).resolve().parents[1]
        paths = os.pathsep.join(
            filter(None, [str(devtools), str(devtools.parent), os.environ.get("PYTHONPATH")])
        )
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvcore_devtools.peer_node",
                json.dumps([self.options, cluster or {}]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._answer()

    @property
    def listen(self) -> str:
        return str(self.options["listen"])

    def call(self, what: str, **arguments: Any) -> Any:
        """Execute a call of `_Child` in the node, and return its result. Blocks."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """Stop the node, so that it hangs from now on."""
        stand_still(self._process.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the node, as in a power failure. Idempotent."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> PeerNode:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> Any:
        answer = self._answers.get(timeout=PATIENCE_S)
        assert answer is not None, f"the node ended with code {self._process.wait()}"
        return answer["answer"]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):  # NIXL also prints
                self._answers.put(json.loads(line))
        self._answers.put(None)


class _Child:
    """The child's side: its methods are the calls."""

    def __init__(self, store: PeerStore) -> None:
        self._store = store

    def put(self, seeds: Mapping[str, int], nbytes: int) -> None:
        put(self._store, {name: value(seed, nbytes) for name, seed in seeds.items()})

    def digest(self, name: str, nbytes: int) -> str:
        return hashlib.sha256(fetch(self._store, name, nbytes)).hexdigest()

    def leased(self) -> int:
        assert self._store.lent is not None
        return self._store.lent.leased

    def lease(self, name: str, of: str) -> list[Any]:
        """Take a lease of another node's value, and never use it."""
        [answer] = self._store.peers.ask({f"tcp://{of}": Lease([name])}).values()
        assert isinstance(answer, Leased), answer
        return [answer.lease, answer.places]

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _main() -> None:
    options, cluster = json.loads(sys.argv[1])
    store = PeerStore(PeerOptions.model_validate(options), rank=0)
    store.join(ClusterConfig.model_validate(cluster))
    child = _Child(store)
    print(json.dumps({"answer": None}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps({"answer": getattr(child, name)(**arguments)}), flush=True)


if __name__ == "__main__":
    _main()
