"""Block events over ZMQ, as vLLM publishes its own: a PUB socket, and a ROUTER for replays."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from kvcore._util.zmq_socket import Context, zmq
from kvcore.errors import ConfigError, FormatError
from kvcore.events.wire import END, Message, number, number_bytes

__all__ = ["ZmqOutlet", "ZmqSource"]

_log = logging.getLogger("kvcore.events")

_REQUESTS_AT_ONCE = 16


class ZmqOutlet:
    """Publishes under ``topic``.

    Binds endpoints with ``*`` (all addresses) and ``ipc://`` endpoints, and connects to others, as
    vLLM does. The replay endpoint is always bound. A consumer that falls behind by more than
    ``queue_batches`` loses the newest batches and sees the gap.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, *, queue_batches: int = 1000
    ) -> None:
        """Open the sockets. Raises ConfigError if an endpoint cannot be used."""
        self._context = Context()
        self._topic = topic.encode()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.sndhwm = queue_batches
            self.endpoint = _open(self._pub, endpoint)
            self._router = self._context.socket(zmq.ROUTER)
            self._router.sndhwm = 0  # an answer goes out whole; the history bounds it
            self.replay_endpoint = _bind(self._router, replay_endpoint) if replay_endpoint else None
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"block events cannot be published at {endpoint!r} and {replay_endpoint!r}: "
                f'{error}; supported are endpoints as "tcp://*:5557" or "ipc:///path"'
            ) from error

    def send(self, message: Message) -> bool:
        """Publish a message. PUB never waits: a consumer loses what it cannot take."""
        self._pub.send_multipart([self._topic, number_bytes(message.number), message.payload])
        return True

    def requests(self) -> Sequence[ZmqRequest]:
        """Return some of the waiting replay requests; the rest follows with the next call."""
        found: list[ZmqRequest] = []
        while len(found) < _REQUESTS_AT_ONCE and self._router.poll(0):
            frames = self._router.recv_multipart()
            if len(frames) == 3:
                found.append(ZmqRequest(self._router, frames[0], self._topic, frames[2]))
            else:
                _log.warning("a request of %d frames is left alone", len(frames))
        return found

    def close(self) -> None:
        """Close the sockets; gives what was sent one second to go out."""
        self._context.destroy(linger=1000)


class ZmqRequest:
    """A replay request: the client's frame, an empty frame, and ``body``."""

    def __init__(self, router: zmq.Socket[bytes], client: bytes, topic: bytes, body: bytes) -> None:
        self.body = body
        self._router = router
        self._client = client
        self._topic = topic

    def answer(self, messages: Iterator[Message]) -> None:
        count = 0
        for count, message in enumerate(messages, 1):  # noqa: B007  counted for the end
            self._send(self._topic, number_bytes(message.number), message.payload)
        # vLLM's consumers stop at the number; how many there were is for kvcore's.
        self._send(b"", END, number_bytes(count))

    def _send(self, *frames: bytes) -> None:
        self._router.send_multipart([self._client, b"", *frames])


class ZmqSource:
    """One publisher's messages. Not thread-safe."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self._context = Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.rcvhwm = 100_000  # batches
        self._sub.subscribe(topic.encode())
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint

    def receive(self, timeout: float) -> Message | None:
        """Return the next message; malformed ones are skipped."""
        if not self._sub.poll(round(timeout * 1000)):
            return None
        return _message(self._sub.recv_multipart()[1:])

    def ask(self, body: bytes, timeout: float) -> Sequence[Message] | None:
        """Ask on a new socket, so that no late answer is taken for that of another request."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.rcvhwm = 0
        try:
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart([b"", body])
            return _answer(dealer, time.monotonic() + timeout)
        finally:
            dealer.close()

    def close(self) -> None:
        self._context.destroy(linger=0)


def _answer(dealer: zmq.Socket[bytes], limit: float) -> Sequence[Message] | None:
    messages: list[Message] = []
    while dealer.poll(max(0, round((limit - time.monotonic()) * 1000))):
        frames = dealer.recv_multipart()
        if len(frames) != 4:
            return None
        if frames[2] == END:
            whole = frames[3] in (b"", number_bytes(len(messages)))  # vLLM does not count
            return messages if whole else None
        message = _message(frames[2:])
        if message is None:
            return None
        messages.append(message)
    return None


def _message(frames: Sequence[bytes]) -> Message | None:
    try:
        if len(frames) == 2:
            return Message(number(frames[0]), frames[1])
    except FormatError as error:
        _log.warning("a message is passed over: %s", error)
    return None


def _open(socket: zmq.Socket[bytes], endpoint: str) -> str:
    if "*" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        return _bind(socket, endpoint)
    socket.connect(endpoint)
    return endpoint


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    socket.bind(endpoint)
    bound = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode()
