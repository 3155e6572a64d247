"""Block events over ZMQ, as vLLM publishes its own: a PUB socket, and a ROUTER for replays."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcore._util.addresses import is_bound
from kvcore._util.curve import ClientKeys
from kvcore._util.log_limit import LogLimit
from kvcore._util.zmq_socket import Context, Entrance, Limits, make_socket, zmq
from kvcore.errors import ConfigError, FormatError
from kvcore.events.publisher import LostHistory
from kvcore.events.wire import END, Message, number, number_bytes

__all__ = ["ZmqOutlet", "ZmqSource"]

_log = logging.getLogger("kvcore.events")

_REQUESTS_AT_ONCE = 16
REQUEST_BYTES = 1024
"""Largest request, all its frames together. A longer one ends its connection."""
ANSWERS = 64
"""Answers that are sent at a time, one for each client; further requests are left alone."""
ANSWER_S = 10.0
"""Seconds in which a client must have read an answer. It is given up then."""
_AHEAD = 32
"""Messages of an answer that wait for one client."""
_ANSWERING_S = 0.01
"""Seconds of a publisher's step that go to answers."""
_PAUSE_S = 0.001
_SUBSCRIPTIONS_BYTES = 4096
"""What a subscriber may send. libzmq keeps 50 bytes and more for each byte of a subscription."""
_REPLAYS = Limits(connections=128, message=REQUEST_BYTES)
_KNOWN = Limits(128, REQUEST_BYTES, _SUBSCRIPTIONS_BYTES)
_UNKNOWN = _KNOWN._replace(connections=32)  # ``queue_batches`` wait for each that does not read

_passed_over = LogLimit()


class ZmqOutlet:
    """Publishes under ``topic``.

    Binds endpoints that begin with ``@``, endpoints with ``*`` (all addresses) and ``ipc://``
    endpoints, and connects to others, as vLLM does. The replay endpoint is always bound. With
    ``keys``, a folder of CURVE keys, only their owners are heard over TCP. A consumer that falls
    behind by more than ``queue_batches`` loses the newest batches and sees the gap. The last frame
    of an answer says of how many messages it consists if ``counts``, and is empty as vLLM's if not.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        *,
        keys: Path | None = None,
        counts: bool = True,
        queue_batches: int = 1000,
    ) -> None:
        """Open the sockets. Raises ConfigError if an endpoint or a key cannot be used."""
        self._context = Context()
        self._topic = topic.encode()
        self._counts = counts
        self._answers: dict[bytes, _Answer] = {}
        self._sockets: list[zmq.Socket[bytes]] = []
        self._entrance = Entrance(self._context)
        try:
            self._entrance = Entrance(self._context, keys)
            self._pub = self._socket(zmq.PUB, queue_batches)
            self.endpoint = self._open(endpoint, keys)
            self._router = self._socket(zmq.ROUTER, _AHEAD)
            self._router.router_mandatory = True  # sending tells when a client reads too slowly
            self.replay_endpoint = (
                self._entrance.listen(self._router, replay_endpoint.removeprefix("@"), _REPLAYS)
                if replay_endpoint
                else None
            )
        except (zmq.ZMQError, OSError) as error:
            self._close(0)
            raise ConfigError(
                f"block events cannot be published at {endpoint!r} and {replay_endpoint!r}: "
                f'{error}; supported are endpoints as "tcp://*:5557" or "ipc:///path"'
            ) from error
        except ConfigError:
            self._close(0)
            raise

    def _socket(self, kind: int, queued: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = make_socket(
            self._context, kind, message=REQUEST_BYTES, queued=queued
        )
        self._sockets.append(made)
        return made

    def _open(self, endpoint: str, keys: Path | None) -> str:
        if is_bound(endpoint):
            limits = _UNKNOWN if keys is None else _KNOWN
            return self._entrance.listen(self._pub, endpoint.removeprefix("@"), limits)
        if keys is not None:
            ClientKeys.read(keys).lock(self._pub)
        self._pub.connect(endpoint)
        return endpoint

    def send(self, message: Message) -> bool:
        """Publish a message. PUB never waits: a consumer loses what it cannot take."""
        self._pub.send_multipart([self._topic, number_bytes(message.number), message.payload])
        return True

    def requests(self) -> Sequence[ZmqRequest]:
        """Go on with the answers, and return some of the waiting requests.

        The others follow with the next call. A client that asks again while it is answered, or when
        too many are, is left alone.
        """
        self._go_on()
        found: list[ZmqRequest] = []
        for _ in range(_REQUESTS_AT_ONCE):
            if not self._router.poll(0):
                break
            frames = self._router.recv_multipart()
            if len(frames) != 3:
                _log.debug("a request of %d frames is left alone", len(frames))
            elif frames[0] not in self._answers and len(self._answers) + len(found) < ANSWERS:
                found.append(ZmqRequest(self, frames[0], frames[2]))
        return found

    def answer(self, client: bytes, messages: Iterator[Message]) -> None:
        """Begin to send an answer. It goes on with each call of `requests`."""
        self._answers[client] = _Answer(self._packed(messages), time.monotonic() + ANSWER_S)
        self._go_on_with(client)

    def close(self) -> None:
        """Close the sockets; gives what was sent one second to go out."""
        self._close(1000)

    def _close(self, linger: int) -> None:
        for socket in self._sockets:
            socket.close(linger)
        self._entrance.close()

    def _packed(self, messages: Iterator[Message]) -> Iterator[list[bytes]]:
        count = 0
        for count, message in enumerate(messages, 1):  # noqa: B007  counted for the end
            yield [self._topic, number_bytes(message.number), message.payload]
        # vLLM's own example stops at the number, Dynamo's router at an empty payload. How many
        # messages there were is for kvcore's consumers.
        yield [b"", END, number_bytes(count) if self._counts else b""]

    def _go_on(self) -> None:
        """Send what clients have room for, until none has read anything for a millisecond."""
        limit = time.monotonic() + _ANSWERING_S
        while sum(map(self._go_on_with, list(self._answers))):
            if time.monotonic() > limit:
                break
            time.sleep(_PAUSE_S)

    def _go_on_with(self, client: bytes) -> bool:
        """Send what the client has room for; return True if that was anything, but not the rest.

        An answer that has ended or failed is dropped.
        """
        answer = self._answers[client]
        before = answer.count
        try:
            while time.monotonic() < answer.until:
                frames = answer.next()
                self._router.send_multipart([client, b"", *frames], zmq.NOBLOCK)
                answer.sent()
        except zmq.Again:
            return answer.count > before  # it has not read more
        except (StopIteration, LostHistory, zmq.ZMQError) as ended:
            _log.debug("an answer ends: %r", ended)
        del self._answers[client]
        return False


class _Answer:
    """Messages on their way to one client."""

    def __init__(self, messages: Iterator[list[bytes]], until: float) -> None:
        self.until = until
        self.count = 0
        """Messages that were sent."""
        self._messages = messages
        self._next: list[bytes] | None = None

    def next(self) -> list[bytes]:
        """Return the message to send now. Raises StopIteration at the end, and LostHistory."""
        if self._next is None:
            self._next = next(self._messages)
        return self._next

    def sent(self) -> None:
        self._next = None
        self.count += 1


class ZmqRequest:
    """A replay request: the client's frame, an empty frame, and ``body``."""

    def __init__(self, outlet: ZmqOutlet, client: bytes, body: bytes) -> None:
        self.body = body
        self._outlet = outlet
        self._client = client

    def answer(self, messages: Iterator[Message]) -> None:
        self._outlet.answer(self._client, messages)


class ZmqSource:
    """One publisher's messages. Not thread-safe.

    ``keys`` is a folder with the publisher's public key and a pair of this consumer's.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str, topic: str = "", *, keys: Path | None = None
    ) -> None:
        """Connect without waiting for the publisher. Raises ConfigError if a key is missing."""
        self._context = Context()
        self._curve = None if keys is None else ClientKeys.read(keys)
        self._sub = self._socket(zmq.SUB)
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
        dealer = self._socket(zmq.DEALER)
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

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if self._curve is not None:
            self._curve.lock(socket)
        return socket


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
        if _passed_over.admit("message") is not None:
            _log.warning("a message is passed over: %s", error)
    return None
