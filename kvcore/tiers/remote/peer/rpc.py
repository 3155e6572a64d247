"""Requests between nodes: a thread that answers them, and a client that asks several nodes at once.

Each request has a socket to itself until its answer arrives. A socket whose answer is late is
closed, so that the late answer is discarded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore._util.circuit_breaker import Breaker
from kvcore._util.curve import ClientKeys, curve_key
from kvcore._util.log_limit import LogLimit
from kvcore._util.threads import GuardedThread
from kvcore._util.zmq_socket import Context, Entrance, Limits, make_socket, zmq
from kvcore.errors import CapacityError, FormatError, KVCoreError, TierUnavailable
from kvcore.tiers.remote.peer.leases import LentMemory
from kvcore.tiers.remote.peer.messages import (
    MAX_FOLDERS,
    MAX_MESSAGE,
    MAX_REQUEST,
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
    Reply,
    Request,
    decode_reply,
    decode_request,
    frames,
)

_log = logging.getLogger("kvcore.tiers.peer")

_TICK_MS = 100
_PAUSE_S = 0.0001
_LINGER_S = 5.0
"""Seconds for which reads are still served after their lease is over.

Their readers then learn that the lease has expired, instead of waiting until they time out.
"""
_IDLE_SOCKETS = 16
_QUEUED = 8
"""Requests of one connection that wait. libzmq can stall with 2."""
KNOWN = Limits(connections=4096, message=MAX_REQUEST)
UNKNOWN = Limits(connections=256, message=MAX_REQUEST)
"""Without keys: 512 MiB of requests at most, if every connection is a stranger's."""
MAX_GUESTS = 64
"""Most nodes outside the list that are remembered, with their connections."""
_MAX_PAUSE_S = 30.0
END_S = 30.0
"""Seconds that `PeerServer.close` waits for each thread: a read may hold NIXL up."""


class PeerServer:
    """Answers the requests of other nodes about ``lent``, in its own thread.

    ``base`` is the address of the first lent byte. ``meet`` returns the name and metadata of the
    node's NIXL agent. ``progress`` is called continuously while anything is leased to another node,
    and for a short time afterwards. It runs on a second thread, so that requests are answered, and
    this node does not look dead, while a read holds ``progress`` up.
    """

    def __init__(
        self,
        address: str,
        lent: LentMemory,
        base: int,
        meet: Callable[[], tuple[str, bytes]],
        progress: Callable[[], None] = lambda: None,
        *,
        keys: Path | None = None,
    ) -> None:
        """Listen at ``address``, tcp://HOST:PORT.

        With ``keys``, a folder of CURVE keys, only their owners are heard, and each key is a node.
        Without them all who reach the address count as one node. Raises TierUnavailable if the
        address cannot be bound, ConfigError for keys that cannot be used.
        """
        self._lent = lent
        self._base = base
        self._meet = meet
        self._progress = progress
        self._limit = LogLimit()
        self._curve = keys is not None
        context = Context()
        self._entrance = Entrance(context, keys)
        self._socket = make_socket(context, zmq.ROUTER, message=MAX_REQUEST, queued=_QUEUED)
        try:
            self._entrance.listen(self._socket, address, KNOWN if self._curve else UNKNOWN)
        except OSError as error:
            self._socket.close()
            self._entrance.close()
            raise TierUnavailable(
                f"cannot listen at {address} for other nodes ({error}): set `listen` to a free port"
            ) from error
        self._closed = threading.Event()
        self._leased = threading.Event()
        self._threads = [
            GuardedThread("kvcore-peer", self._serve, self._stop),
            GuardedThread("kvcore-peer-reads", self._serve_reads, self._stop),
        ]
        if not self._threads[0].start():
            self._shut()
            raise TierUnavailable("no thread to answer other nodes can be started")
        if not self._threads[1].start():
            self.close()
            raise TierUnavailable("no thread to serve other nodes' reads can be started")

    def close(self) -> bool:
        """Stop answering; return whether ``progress`` has returned. Blocks up to `END_S` seconds.

        Idempotent.
        """
        self._stop()
        ended = [thread.join(END_S) for thread in self._threads]
        return all(ended)

    def _stop(self, error: BaseException | None = None) -> None:
        """Have both threads end. If one has died, this node answers nobody any more."""
        self._closed.set()
        self._leased.set()

    def _shut(self) -> None:
        self._socket.close()
        self._entrance.close()

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                if self._socket.poll(_TICK_MS):
                    self._answer_one(self._socket.recv_multipart(copy=False))
        finally:
            self._shut()

    def _answer_one(self, message: list[Any]) -> None:
        try:
            sender, *parts = message
            peer = curve_key(parts[-1]) if self._curve and parts else ""
            reply = frames(self._reply([part.bytes for part in parts], peer))
            self._socket.send_multipart([sender.bytes, *reply], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.debug("an answer to another node could not be sent: %s", error)
        except Exception:  # noqa: BLE001 - thread boundary: this node goes on answering
            if self._limit.admit("answer") is not None:
                _log.exception("a request of another node could not be answered")

    def _serve_reads(self) -> None:
        read_until = 0.0
        while not self._closed.is_set():
            now = time.monotonic()
            if self._lent.leased:
                read_until = now + _LINGER_S
            if now >= read_until:
                self._leased.wait()
                self._leased.clear()
                continue
            try:
                self._progress()
            except Exception:  # noqa: BLE001 - thread boundary: the next call may work
                if self._limit.admit("progress") is not None:
                    _log.exception("serving other nodes' reads of this node's memory failed")
            time.sleep(_PAUSE_S)

    def _reply(self, parts: list[bytes], peer: str) -> Reply:
        try:
            return self._answer(decode_request(parts), peer)
        except (FormatError, CapacityError) as error:
            if self._limit.admit("refused") is not None:
                _log.warning("a request of another node is refused: %s", error)
            return Refused(str(error)[:1000])
        except KVCoreError as error:
            return Refused(str(error)[:1000])
        except Exception:  # noqa: BLE001 - thread boundary: this node goes on answering
            _log.exception("a request of another node could not be answered")
            return Refused("internal error of the node that was asked: see its log")

    def _answer(self, request: Request, peer: str) -> Reply:
        lent = self._lent
        if isinstance(request, Find):
            return Found(bytes(lent.exists(request.names)), self._folders)
        if isinstance(request, Lease):
            return self._lease(request, peer)
        if isinstance(request, Done):
            return Ended(lent.end(request.lease, peer))
        if isinstance(request, Remove):
            lent.remove(request.names)
            return Removed(self._folders)
        assert isinstance(request, Meet)
        return Met(*self._meet())

    def _lease(self, request: Lease, peer: str) -> Leased:
        agent, _ = self._meet()
        number, spans = self._lent.lease(request.names, peer)
        self._leased.set()
        places = [span and (self._base + span.start, span.nbytes) for span in spans]
        return Leased(number, self._lent.lease_s, agent, places, self._folders)

    @property
    def _folders(self) -> list[str]:
        return self._lent.folders[:MAX_FOLDERS]


@dataclass(eq=False)
class _Node:
    """The state of one node: its breaker, reported ``folders`` and idle connections.

    If it is ``gone``, its connections are closed as soon as they are idle.
    """

    breaker: Breaker
    folders: Collection[str] = ()
    idle: list[Any] = field(default_factory=list)
    gone: bool = False


class Peers:
    """The nodes at ``addresses`` (tcp://HOST:PORT) except those in ``own``. Thread-safe.

    Guests are other nodes, which are asked only by explicit address; the most recent ones are
    remembered. Each node has a circuit breaker: after three failures in a row the node is not asked
    for a while, and then tried again.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        timeout_s: float,
        own: Collection[str] = (),
        *,
        keys: Path | None = None,
    ) -> None:
        """With ``keys``, a folder of CURVE keys, only nodes that hold its server keys are heard.

        Raises ConfigError for keys that cannot be used.
        """
        self._timeout_s = timeout_s
        self._keys = None if keys is None else ClientKeys.read(keys)
        self.own = frozenset(own)
        self._context = Context()
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._guests: dict[str, _Node] = {}  # least recently asked first
        self.update(addresses)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, address: str) -> bool:
        return address in self._nodes

    def update(self, addresses: Iterable[str]) -> None:
        """Replace the list of nodes. Requests in flight to removed nodes are still awaited."""
        wanted = dict.fromkeys(address for address in addresses if address not in self.own)
        with self._lock:
            for address in [address for address in self._nodes if address not in wanted]:
                _close_idle(self._nodes.pop(address))
            for address in wanted:
                if address not in self._nodes:
                    guest = self._guests.pop(address, None)
                    self._nodes[address] = guest or _new_node(address)

    def available(self, addresses: Iterable[str] | None = None) -> list[str]:
        """Return the nodes that may be asked now, of the list or of ``addresses``.

        ``addresses`` may include guests.
        """
        with self._lock:
            if addresses is None:
                return [a for a, node in self._nodes.items() if node.breaker.allows()]
            chosen = [address for address in addresses if address not in self.own]
            return [address for address in chosen if self._at(address).breaker.allows()]

    @property
    def folders(self) -> set[str]:
        """The folders that nodes and guests hold, as each reported last."""
        with self._lock:
            nodes = [*self._nodes.values(), *self._guests.values()]
        return {folder for node in nodes for folder in node.folders}

    def ask(self, requests: Mapping[str, Request]) -> dict[str, Reply | TierUnavailable]:
        """Send one request to each node concurrently, and return an answer per address.

        The answer is TierUnavailable for a node that did not answer, or not in this protocol.
        Blocks until all have answered, at most for the timeout.
        """
        answers: dict[str, Reply | TierUnavailable] = {}
        poller, owners, nodes = zmq.Poller(), {}, {}
        for address, request in requests.items():
            nodes[address], socket = self._send(address, request)
            if socket is None:
                answers[address] = TierUnavailable(f"cannot connect to {address!r}")
                continue
            poller.register(socket, zmq.POLLIN)
            owners[socket] = address
        until = time.monotonic() + self._timeout_s
        while owners and (left := until - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(left * 1000) + 1):
                poller.unregister(socket)
                address = owners.pop(socket)
                answers[address] = self._receive(address, nodes[address], socket)
        for socket, address in owners.items():
            socket.close()
            answers[address] = TierUnavailable(
                f"the node at {address} did not answer in {self._timeout_s:g} s"
            )
        self._record_outcomes(nodes, answers)
        return answers

    def close(self) -> None:
        """Close all connections. Nothing may be in flight. Idempotent."""
        with self._lock:
            for node in [*self._nodes.values(), *self._guests.values()]:
                _close_idle(node)
        self._context.term()

    def _at(self, address: str) -> _Node:
        """Return the node at an address; an unlisted one is a guest. The caller holds the lock."""
        if address in self._nodes:
            return self._nodes[address]
        node = self._guests.pop(address, None) or _new_node(address)
        self._guests[address] = node
        while len(self._guests) > MAX_GUESTS:
            _close_idle(self._guests.pop(next(iter(self._guests))))
        return node

    def _send(self, address: str, request: Request) -> tuple[_Node, Any]:
        """Send a request, and return the node and the socket of its answer.

        The socket is None for an invalid address. Addresses come from other processes, and an
        invalid one must not affect the requests to other nodes.
        """
        with self._lock:
            node = self._at(address)
            node.breaker.started()
            socket = node.idle.pop() if node.idle else None
        if socket is None:
            socket = make_socket(self._context, zmq.DEALER, message=MAX_MESSAGE)
            try:
                if self._keys is not None:
                    self._keys.lock(socket)
                socket.connect(address)
            except (zmq.ZMQError, ValueError) as error:
                socket.close()
                _log.debug("no connection to %r: %s", address, error)
                return node, None
        socket.send_multipart(frames(request))
        return node, socket

    def _receive(self, address: str, node: _Node, socket: Any) -> Reply | TierUnavailable:
        try:
            reply = decode_reply(socket.recv_multipart())
        except FormatError as error:
            socket.close()
            return TierUnavailable(f"the answer of {address} cannot be read: {error}")
        with self._lock:
            if isinstance(reply, Found | Leased | Removed):
                node.folders = reply.folders
            if not node.gone and len(node.idle) < _IDLE_SOCKETS:
                node.idle.append(socket)
                return reply
        socket.close()
        return reply

    def _record_outcomes(
        self, nodes: Mapping[str, _Node], answers: Mapping[str, Reply | TierUnavailable]
    ) -> None:
        with self._lock:
            for address, answer in answers.items():
                breaker = nodes[address].breaker
                if isinstance(answer, TierUnavailable):
                    breaker.failed()
                else:
                    breaker.succeeded()


def _new_node(address: str) -> _Node:
    return _Node(Breaker(f"peer {address}", max_pause=_MAX_PAUSE_S))


def _close_idle(node: _Node) -> None:
    node.gone = True
    for socket in node.idle:
        socket.close()
    node.idle.clear()
