"""Block events on NATS JetStream, whose stream keeps them for consumers that were away.

    kvcore.events.TOPIC    the batches, in the stream; the number is in the header Kvcore-Number
    kvcore.ask.TOPIC       requests, as over ZMQ; the answer goes to the request's reply subject,
                           which must be an inbox (_INBOX.)

nats-py uses asyncio, so each side runs an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.js import api
from nats.js.errors import Error as JetStreamError

from kvcore._util.threads import GuardedThread
from kvcore.errors import ConfigError, TierUnavailable
from kvcore.events.wire import NUMBER_BYTES, Message

__all__ = ["NatsOutlet", "NatsSource"]

_log = logging.getLogger("kvcore.events")

NUMBER, COUNT = "Kvcore-Number", "Kvcore-Count"
STREAM_BYTES = 256 << 20
STREAM_S = 3600.0
"""Limits of a stream that kvcore creates; an existing stream is used as it is."""

INBOX = "_INBOX."
"""Where answers may go. Other subjects belong to somebody else, such as another topic's events."""
REQUESTS = 64
"""Requests that may wait. They are answered one after another."""
ANSWER_S = 10.0
"""Seconds in which an answer must have been sent."""

_RETRY_S = 0.5
_ACK_S = 5.0
_START_S = 10.0
_CLOSE_S = 2.0
_NO_ANSWER = (
    *(FutureTimeout, asyncio.TimeoutError, nats.errors.Error),
    *(TierUnavailable, CancelledError),  # the thread of the loop has died
)

T = TypeVar("T")


def subject(topic: str) -> str:
    return f"kvcore.events.{topic}"


def ask_subject(topic: str) -> str:
    return f"kvcore.ask.{topic}"


def check_topic(topic: str) -> None:
    """Raise ConfigError if ``topic`` cannot be a token of a NATS subject."""
    if not topic or set(topic) & set(" \t\r\n.*>"):
        raise ConfigError(
            f"given the topic {topic!r}; supported on NATS is text without blanks, dots, * and >"
        )


class _Loop:
    """An event loop in a thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = GuardedThread(name, self.loop.run_forever, self._die)
        self._running: set[Future[Any]] = set()
        self._thread.start()

    @property
    def dead(self) -> bool:
        """True if the thread has died, or could not be started."""
        return self._thread.error is not None

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work``. It fails if the thread has died."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        if self.dead:
            self._die(self._thread.error)
        return future

    def close(self) -> None:
        """Cancel what runs, and wait some seconds for it."""
        if self._thread.is_alive():
            self.start(self._end())
        self._thread.join(2 * _CLOSE_S)

    def _die(self, error: BaseException | None) -> None:
        for future in list(self._running):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(TierUnavailable(f"nothing goes over NATS any more: {error}"))

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_CLOSE_S)
        self.loop.stop()


async def _connect(url: str, failed: Callable[[Exception], object] = lambda _error: None) -> Client:
    """Connect to the server, however long that takes, and reconnect whenever it goes away.

    ``failed`` is called with the error of each failed attempt until one succeeds.
    """

    async def quiet(error: Exception) -> None:
        _log.debug("nats: %s", error)
        if isinstance(error, OSError):  # the client goes on trying by itself, from the start
            failed(error)

    while True:
        try:
            return await nats.connect(
                url, max_reconnect_attempts=-1, reconnect_time_wait=_RETRY_S, error_cb=quiet
            )
        except (OSError, nats.errors.Error) as error:  # noqa: PERF203  it is tried until it works
            _log.debug("nats: %s", error)
            failed(error)
            await asyncio.sleep(_RETRY_S)


class NatsOutlet:
    """Publishes batches to a stream, one after another, each until the stream has it.

    At most ``queue_batches`` wait for the server; while it is away the newest are dropped. The
    server need not be there when this is made. One log line says when it stops taking batches, and
    one when it takes them again.
    """

    def __init__(self, url: str, stream: str, topic: str, *, queue_batches: int = 1000) -> None:
        check_topic(topic)
        self._url = url
        self._stream = stream
        self._topic = topic
        self._limit = queue_batches
        self._waiting: deque[Message] = deque()
        self._asked: deque[NatsRequest] = deque()
        self._answered: Future[None] | None = None
        self._more = asyncio.Event()
        self._away = False
        self._loop = _Loop("kvcore-nats-out")
        self._work = self._loop.start(self._run())
        self._work.add_done_callback(self._log_end)

    def send(self, message: Message) -> bool:
        if len(self._waiting) >= self._limit or self._work.done():
            return False
        self._waiting.append(message)
        self._loop.loop.call_soon_threadsafe(self._more.set)
        return True

    def requests(self) -> Sequence[NatsRequest]:
        """Return the next request, if the one before is answered."""
        if not self._asked or not (self._answered is None or self._answered.done()):
            return []
        return [self._asked.popleft()]

    def answer(self, request: Any, messages: Sequence[Message]) -> None:
        """Begin to answer a message of NATS."""
        self._answered = self._loop.start(self._answer(request, messages))

    def close(self) -> None:
        """Close the connection; waits a moment until what is queued was sent."""
        limit = time.monotonic() + _CLOSE_S
        while self._waiting and not self._work.done() and time.monotonic() < limit:
            time.sleep(0.01)
        self._loop.close()

    async def _run(self) -> None:
        client = await _connect(self._url, self._note_away)
        try:
            await client.subscribe(ask_subject(self._topic), cb=self._note_request)
            stream = client.jetstream(timeout=_ACK_S)
            await self._make_stream(stream)
            while True:
                await self._more.wait()
                self._more.clear()
                while self._waiting:
                    if await self._publish(stream, self._waiting[0]):
                        self._waiting.popleft()
                        self._note_back()
                    else:
                        await asyncio.sleep(_RETRY_S)
        finally:
            await client.close()

    def _log_end(self, work: Future[None]) -> None:
        """Log why nothing is published any more: what is sent from now on counts as unsent."""
        if not work.cancelled() and (error := work.exception()) is not None:
            _log.error("block events go to NATS no more: %s", type(error).__name__, exc_info=error)

    async def _publish(self, stream: Any, message: Message) -> bool:
        """Publish one batch; return False to try again. NATS drops a second copy by its id."""
        name = subject(self._topic)
        headers = {NUMBER: str(message.number), "Nats-Msg-Id": f"{name}-{message.number}"}
        try:
            await stream.publish(name, message.payload, headers=headers, timeout=_ACK_S)
        except nats.js.errors.NoStreamResponseError:  # the first message creates the stream
            await self._make_stream(stream)
            return False
        except (JetStreamError, nats.errors.Error, asyncio.TimeoutError) as error:
            _log.debug("nats: %s", error)
            self._note_away(error)
            return False
        return True

    def _note_away(self, error: Exception) -> None:
        """Log once that NATS is away. The URL is left out because it may hold a password."""
        if not self._away:
            self._away = True
            why = str(error) or type(error).__name__
            _log.warning("block events do not reach NATS, stream %s: %s", self._stream, why)

    def _note_back(self) -> None:
        if self._away:
            self._away = False
            _log.info("block events reach NATS again, stream %s", self._stream)

    async def _make_stream(self, stream: Any) -> None:
        config = api.StreamConfig(
            name=self._stream, subjects=[subject("*")], max_bytes=STREAM_BYTES, max_age=STREAM_S
        )
        try:
            await stream.add_stream(config)
        except (JetStreamError, nats.errors.Error, asyncio.TimeoutError) as error:
            _log.warning("stream %s is not made or changed: %s", self._stream, error)

    async def _note_request(self, message: Any) -> None:
        inbox = message.reply.startswith(INBOX) and not set(message.reply) & set("*> \t\r\n")
        if not inbox or len(message.data) != NUMBER_BYTES:
            _log.debug("a request of %d bytes is left alone", len(message.data))
        elif len(self._asked) < REQUESTS:
            self._asked.append(NatsRequest(self, message))

    async def _answer(self, request: Any, messages: Sequence[Message]) -> None:
        try:
            await asyncio.wait_for(_send_all(request._client, request.reply, messages), ANSWER_S)
        except (nats.errors.Error, asyncio.TimeoutError) as error:
            _log.debug("nats: an answer ends: %r", error)


class NatsRequest:
    """A NATS message with a reply subject."""

    def __init__(self, outlet: NatsOutlet, message: Any) -> None:
        self.body: bytes = message.data
        self._outlet = outlet
        self._message = message

    def answer(self, messages: Iterator[Message]) -> None:
        self._outlet.answer(self._message, list(messages))


async def _send_all(client: Client, reply: str, messages: Sequence[Message]) -> None:
    for message in messages:
        await client.publish(reply, message.payload, headers={NUMBER: str(message.number)})
    await client.publish(reply, b"", headers={COUNT: str(len(messages))})


class NatsSource:
    """One publisher's messages, with an ordered consumer of the stream for the live ones.

    After a lost connection it goes on, and delivers what the stream took meanwhile.
    """

    def __init__(self, url: str, topic: str, *, queue_batches: int = 65536) -> None:
        """Connect and subscribe. Raises TierUnavailable if there is no server or no stream."""
        check_topic(topic)
        self._topic = topic
        self._queue: queue.Queue[Message] = queue.Queue(queue_batches)
        self._loop = _Loop("kvcore-nats-in")
        try:
            self._client = self._loop.start(self._open(url)).result(_START_S)
        except (*_NO_ANSWER, JetStreamError) as error:
            self._loop.close()
            raise TierUnavailable(
                f"no block events of topic {topic!r} at {url}: {error or 'no server answers'}; a "
                "publisher makes the stream with its first batch"
            ) from error

    def receive(self, timeout: float) -> Message | None:
        try:
            return self._queue.get(timeout=timeout) if timeout else self._queue.get_nowait()
        except queue.Empty:
            return None

    def ask(self, body: bytes, timeout: float) -> Sequence[Message] | None:
        try:
            return self._loop.start(self._ask(body, timeout)).result(timeout + 1)
        except _NO_ANSWER:
            return None

    def close(self) -> None:
        try:
            self._loop.start(self._client.close()).result(_CLOSE_S)
        except _NO_ANSWER as error:
            _log.debug("nats: %s", error)
        self._loop.close()

    async def _open(self, url: str) -> Client:
        client = await _connect(url)
        stream = client.jetstream(timeout=_ACK_S)
        await stream.subscribe(
            subject(self._topic),
            cb=self._note,
            ordered_consumer=True,
            deliver_policy=api.DeliverPolicy.NEW,
        )
        return client

    async def _note(self, message: Any) -> None:
        """Queue a live message. A full queue drops it, and the consumer sees the gap."""
        found = _message(message)
        if found is not None and not self._queue.full():
            self._queue.put_nowait(found)

    async def _ask(self, body: bytes, timeout: float) -> Sequence[Message] | None:
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, pending_bytes_limit=-1)
        messages: list[Message] = []
        limit = time.monotonic() + timeout
        try:
            await self._client.publish(ask_subject(self._topic), body, reply=inbox)
            while True:
                reply = await subscription.next_msg(max(0.01, limit - time.monotonic()))
                count = (reply.headers or {}).get(COUNT)
                if count is not None:
                    return messages if count == str(len(messages)) else None
                found = _message(reply)
                if found is None:
                    return None
                messages.append(found)
        finally:
            await subscription.unsubscribe()


def _message(message: Any) -> Message | None:
    """Return the message, or None if it has no number."""
    text = (message.headers or {}).get(NUMBER, "")
    return Message(int(text), message.data) if text.isdecimal() else None
