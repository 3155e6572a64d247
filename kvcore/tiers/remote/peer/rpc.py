"""The messages between nodes: a thread that answers, and a way to ask several at once.

Each question has a socket to itself until its answer is there. A socket whose answer did not come
in time is thrown away, and a late answer with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore._util.circuit_breaker import Breaker
from kvcore._util.log_limit import LogLimit
from kvcore._util.zmq_socket import Context, make_socket, zmq
from kvcore.errors import CapacityError, FormatError, KVCoreError, TierUnavailable
from kvcore.tiers.remote.peer.leases import Lending
from kvcore.tiers.remote.peer.messages import (
    MAX_FOLDERS,
    MAX_MESSAGE,
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
"""How long reads go on whose lease is over: their readers learn then that they were in vain, and do
not wait for bytes until they give this node up."""
_IDLE_SOCKETS = 16
MAX_GUESTS = 64
"""Nodes of no list that are remembered, with their connections."""
_MAX_PAUSE_S = 30.0


class Answerer:
    """Answers other nodes about ``lending``, whose first byte is at ``base``, in its own thread.

    ``meet`` gives the node's name and metadata in NIXL. ``progress`` is called again and again as
    long as something is leased to another node, and a little longer. It has a second thread, so
    that a read which holds it up does not make this node look gone: messages are answered.
    """

    def __init__(
        self,
        address: str,
        lending: Lending,
        base: int,
        meet: Callable[[], tuple[str, bytes]],
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``address`` is tcp://HOST:PORT. Raises TierUnavailable where it cannot be listened on."""
        self._lending = lending
        self._base = base
        self._meet = meet
        self._progress = progress
        self._limit = LogLimit()
        self._context = Context()
        self._socket = _bounded(self._context, zmq.ROUTER)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise TierUnavailable(
                f"other nodes cannot ask at {address} ({error}): set `listen` to a free port"
            ) from error
        self._closed = threading.Event()
        self._leased = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, name="kvcore-peer", daemon=True),
            threading.Thread(target=self._serve_reads, name="kvcore-peer-reads", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Answer no more. Blocks until ``progress`` has returned. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._leased.set()
            for thread in self._threads:
                thread.join()

    def _serve(self) -> None:
        while not self._closed.is_set():
            if self._socket.poll(_TICK_MS):
                sender, *parts = self._socket.recv_multipart()
                try:
                    self._socket.send_multipart([sender, *frames(self._reply(parts))], zmq.NOBLOCK)
                except zmq.ZMQError as error:
                    _log.debug("a node does not take its answer: %s", error)
        self._socket.close()
        self._context.term()

    def _serve_reads(self) -> None:
        read_until = 0.0
        while not self._closed.is_set():
            now = time.monotonic()
            if self._lending.leased:
                read_until = now + _LINGER_S
            if now >= read_until:
                self._leased.wait()
                self._leased.clear()
                continue
            try:
                self._progress()
            except Exception:  # noqa: BLE001 - thread boundary: the next call may work
                if self._limit.admit("progress") is not None:
                    _log.exception("other nodes' reads of this node's memory make no progress")
            time.sleep(_PAUSE_S)

    def _reply(self, parts: list[bytes]) -> Reply:
        try:
            return self._answer(decode_request(parts))
        except (FormatError, CapacityError) as error:
            _log.warning("another node's message is refused: %s", error)
            return Refused(str(error)[:1000])
        except KVCoreError as error:
            return Refused(str(error)[:1000])
        except Exception:  # noqa: BLE001 - thread boundary: this node goes on answering
            _log.exception("a message of another node could not be answered")
            return Refused("a fault of the node that was asked: see its log")

    def _answer(self, request: Request) -> Reply:
        lending = self._lending
        if isinstance(request, Find):
            return Found(bytes(lending.exists(request.names)), self._folders)
        if isinstance(request, Lease):
            return self._lease(request)
        if isinstance(request, Done):
            return Ended(lending.end(request.lease))
        if isinstance(request, Remove):
            lending.remove(request.names)
            return Removed(self._folders)
        assert isinstance(request, Meet)
        return Met(*self._meet())

    def _lease(self, request: Lease) -> Leased:
        agent, _ = self._meet()
        number, spans = self._lending.lease(request.names)
        self._leased.set()
        places = [span and (self._base + span.start, span.nbytes) for span in spans]
        return Leased(number, self._lending.lease_s, agent, places, self._folders)

    @property
    def _folders(self) -> list[str]:
        return self._lending.folders[:MAX_FOLDERS]


@dataclass(eq=False)
class _Node:
    """``gone``: its connections are closed as soon as they are idle. ``folders``: what it holds
    lies in these, it said last."""

    breaker: Breaker
    folders: Collection[str] = ()
    idle: list[Any] = field(default_factory=list)
    gone: bool = False


class Peers:
    """The nodes at ``addresses`` (tcp://HOST:PORT) but those in ``own``, each with a breaker; and
    guests: others that are asked by name alone, as many as were asked last. Thread-safe.

    A node that has not answered three times is left alone for a while, and then asked again.
    """

    def __init__(
        self, addresses: Iterable[str], timeout_s: float, own: Collection[str] = ()
    ) -> None:
        self._timeout_s = timeout_s
        self.own = frozenset(own)
        self._context = Context()
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._guests: dict[str, _Node] = {}  # the one asked last is the last
        self.update(addresses)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, address: str) -> bool:
        return address in self._nodes

    def update(self, addresses: Iterable[str]) -> None:
        """These are the nodes from now on. What others were asked is still waited for."""
        wanted = dict.fromkeys(address for address in addresses if address not in self.own)
        with self._lock:
            for address in [address for address in self._nodes if address not in wanted]:
                _let_go(self._nodes.pop(address))
            for address in wanted:
                if address not in self._nodes:
                    guest = self._guests.pop(address, None)
                    self._nodes[address] = guest or _node(address)

    def available(self, addresses: Iterable[str] | None = None) -> list[str]:
        """Nodes that may be asked now: all of them, or of these, which may be guests."""
        with self._lock:
            if addresses is None:
                return [a for a, node in self._nodes.items() if node.breaker.allows()]
            chosen = [address for address in addresses if address not in self.own]
            return [address for address in chosen if self._at(address).breaker.allows()]

    @property
    def folders(self) -> set[str]:
        """What nodes and guests hold lies in these, as each has said last."""
        with self._lock:
            nodes = [*self._nodes.values(), *self._guests.values()]
        return {folder for node in nodes for folder in node.folders}

    def ask(self, requests: Mapping[str, Request]) -> dict[str, Reply | TierUnavailable]:
        """Ask nodes, one question each, all at once. Blocks until every one has answered, for the
        timeout at most; TierUnavailable stands for those that did not, or not in this protocol."""
        answers: dict[str, Reply | TierUnavailable] = {}
        poller, owners, nodes = zmq.Poller(), {}, {}
        for address, request in requests.items():
            nodes[address], socket = self._send(address, request)
            if socket is None:
                answers[address] = TierUnavailable(f"nothing can be sent to {address!r}")
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
                f"the node at {address} does not answer in {self._timeout_s:g} s"
            )
        self._judge(nodes, answers)
        return answers

    def close(self) -> None:
        """Close all connections. Nothing may be in flight. Idempotent."""
        with self._lock:
            for node in [*self._nodes.values(), *self._guests.values()]:
                _let_go(node)
        self._context.term()

    def _at(self, address: str) -> _Node:
        """The node at an address, a guest where it is none of the list. With the lock."""
        if address in self._nodes:
            return self._nodes[address]
        node = self._guests.pop(address, None) or _node(address)
        self._guests[address] = node
        while len(self._guests) > MAX_GUESTS:
            _let_go(self._guests.pop(next(iter(self._guests))))
        return node

    def _send(self, address: str, request: Request) -> tuple[_Node, Any]:
        """The node, and the socket on which it answers: None for an address of no host. Those come
        from other processes, and one must not spoil what is asked of the rest."""
        with self._lock:
            node = self._at(address)
            node.breaker.started()
            socket = node.idle.pop() if node.idle else None
        if socket is None:
            socket = _bounded(self._context, zmq.DEALER)
            try:
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
            return TierUnavailable(f"the node at {address} is not understood: {error}")
        with self._lock:
            if isinstance(reply, Found | Leased | Removed):
                node.folders = reply.folders
            if not node.gone and len(node.idle) < _IDLE_SOCKETS:
                node.idle.append(socket)
                return reply
        socket.close()
        return reply

    def _judge(
        self, nodes: Mapping[str, _Node], answers: Mapping[str, Reply | TierUnavailable]
    ) -> None:
        with self._lock:
            for address, answer in answers.items():
                breaker = nodes[address].breaker
                if isinstance(answer, TierUnavailable):
                    breaker.failed()
                else:
                    breaker.succeeded()


def _node(address: str) -> _Node:
    return _Node(Breaker(f"peer {address}", max_pause=_MAX_PAUSE_S))


def _let_go(node: _Node) -> None:
    node.gone = True
    for socket in node.idle:
        socket.close()
    node.idle.clear()


def _bounded(context: Any, kind: int) -> Any:
    socket = make_socket(context, kind)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    return socket
