"""Numbers batches of events, sends them, and answers consumers that missed some.

    leader ── note ──▶ Feed ── take ──▶ ┌ a thread or a process ───────────────────┐
                                        │ mirror: what the batches so far add up to│──▶ outlets
                                        │ history: the last batches, by number     │◀── requests
                                        └──────────────────────────────────────────┘

Numbers count up by one from a start that the clock gives, so that a restarted publisher does not by
chance go on where a consumer left off. A number is left out where events were dropped. A consumer
sees that gap, and asks for the batches it lacks or for everything held. When nothing happens, an
empty batch is sent now and then, so that a consumer that missed the last batch notices.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from kvcore._util.log_limit import LogLimit
from kvcore._util.threads import GuardedThread
from kvcore.errors import FormatError
from kvcore.events.feed import BlockTokens, Content, CountBlocks, Item, Lost, count_nothing
from kvcore.events.token_cache import TokenCache
from kvcore.events.vllm_format import as_vllm, of_media
from kvcore.events.wire import (
    SNAPSHOT,
    AllBlocksCleared,
    Message,
    WireEvent,
    encode,
    number,
    wire_events,
)
from kvcore.index.values import Event
from kvcore.model.keys import KEY_BYTES, TOKEN_BYTES

__all__ = ["LostHistory", "Outlet", "Pacing", "Publisher", "ReplayRequest"]

_log = logging.getLogger("kvcore.events")

_CLOSE_S = 5.0
SNAPSHOT_S = 1.0
"""Seconds for which consumers get the same snapshot, and beyond that while it is being read."""
_MESSAGE_BYTES = 256
"""What Python holds for a message in the history beside its payload."""


class LostHistory(Exception):
    """Messages of an answer are no longer kept, because their reader is too slow."""


class ReplayRequest(Protocol):
    """A consumer's request for what it missed."""

    @property
    def body(self) -> bytes:
        """`wire.SNAPSHOT`, or the first number wanted."""

    def answer(self, messages: Iterator[Message]) -> None:
        """Send these messages and the end mark. Returns without waiting for the receiver.

        ``messages`` may be read later, on the publisher's thread, and raises LostHistory if that is
        too late. It holds no messages of its own, but a snapshot is kept until it is closed.
        """


class Outlet(Protocol):
    """A bus to which events go.

    Called only on the publisher's thread. No call waits for a consumer, and none raises because of
    one.
    """

    def send(self, message: Message) -> bool:
        """Send a message; return False if there is no room for it: its number stays a gap."""

    def requests(self) -> Sequence[ReplayRequest]:
        """Return the requests received since the last call."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Pacing:
    """How much is sent, how often, and how much is kept to be sent again."""

    interval_s: float = 0.02
    batch_blocks: int = 1024
    queue_blocks: int = 262_144
    history_bytes: int = 64 << 20
    heartbeat_s: float = 5.0


class _Snapshot:
    """Everything held, as messages that carry one number."""

    def __init__(self, made_at: float, number: int, messages: tuple[Message, ...]) -> None:
        self.made_at = made_at
        self.number = number
        self.messages = messages

    def read(self) -> Iterator[Message]:
        """Yield the messages. The snapshot is kept as long as the iterator."""
        yield from self.messages


def _numbered(snapshot: _Snapshot) -> Iterator[Message]:
    """Yield a snapshot's messages with numbers that count up to the one they are all as of.

    vLLM's consumers pass over a message whose number is not above the last one's. The snapshot is
    kept as long as the iterator.
    """
    first = snapshot.number - len(snapshot.messages) + 1
    for at, message in enumerate(snapshot.read(), first):
        yield message._replace(number=at)


class Publisher:
    """Publishes everything that it takes to its outlets.

    `run` does so until it is told to end. `start` has a thread of this process call `run` until
    `close`.
    """

    def __init__(
        self,
        content: Content,
        take: Callable[[], Sequence[Item]],
        outlets: Sequence[Outlet],
        block_tokens: int,
        *,
        pacing: Pacing | None = None,
        rank: int | None = None,
        token_ids: bool = False,
        as_vllm: bool = False,
        count: CountBlocks = count_nothing,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``content`` is what the tiers held before the first item that ``take`` returns.

        ``rank`` is the data-parallel rank that batches carry. With ``token_ids``, events carry the
        tokens of `BlockTokens`. With ``as_vllm``, everything is sent in vLLM's format
        (`kvcore.events.vllm_format`).
        """
        self._pacing = pacing or Pacing()
        self._take = take
        self._outlets = list(outlets)
        self._block_tokens = block_tokens
        self._as_vllm = as_vllm
        self._rank = 0 if as_vllm and rank is None else rank
        self._count = count
        self._clock = clock
        self._number = (int(clock() * 1000) << 12) - 1
        self._mirror = _unpack(content)
        self._tokens = TokenCache(block_tokens * TOKEN_BYTES) if token_ids else None
        self._history: dict[int, Message] = {}  # oldest first, without gaps
        self._history_bytes = 0
        self._snapshot: _Snapshot | None = None  # for SNAPSHOT_S
        self._in_use: Callable[[], _Snapshot | None] = lambda: None  # while it is read
        self._sent_at = clock()
        self._logged = LogLimit()
        self._stop = threading.Event()
        self._thread: GuardedThread | None = None

    def start(self, failed: Callable[[], object] = lambda: None) -> None:
        """Publish from now on, on a thread of its own.

        If it cannot go on, the outlets are closed, and ``failed`` is called: consumers hear no
        heartbeat any more, and nobody takes what is queued.
        """

        def died(error: BaseException) -> None:
            try:
                self._close_outlets()
            finally:
                failed()

        over = partial(self._stop.wait, self._pacing.interval_s)
        self._thread = GuardedThread("kvcore-events", partial(self.run, over), died)
        self._thread.start()

    def close(self) -> None:
        """Send what is queued, then close the outlets. Waits some seconds for the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        else:
            self._close_outlets()

    def run(self, over: Callable[[], bool]) -> None:
        """Publish until ``over`` returns True, then publish the rest and close the outlets.

        ``over`` waits for a while, or for news.
        """
        while not over():
            self.step()
        self.step()
        self._close_outlets()

    def step(self) -> None:
        """Publish what is queued, then answer the requests."""
        batch: list[Event] = []
        blocks = 0
        for item in self._take():
            if isinstance(item, Lost):
                self._publish(batch, blocks)
                batch, blocks = [], 0
                self._resume(item)
                continue
            if isinstance(item, BlockTokens):
                self._learn(item)
                continue
            batch.append(item)
            blocks += len(item.keys)
            if blocks >= self._pacing.batch_blocks:
                self._publish(batch, blocks)
                batch, blocks = [], 0
        self._publish(batch, blocks)
        if self._clock() - self._sent_at >= self._pacing.heartbeat_s:
            self._send([])
        if self._snapshot is not None and self._clock() - self._snapshot.made_at > SNAPSHOT_S:
            self._snapshot = None
        for outlet in self._outlets:
            for request in outlet.requests():
                self._answer(request)

    def _close_outlets(self) -> None:
        outlets, self._outlets = self._outlets, []
        for outlet in outlets:
            outlet.close()

    def _publish(self, events: Sequence[Event], blocks: int) -> None:
        if not events:
            return
        wire = self._wire(events)
        for event in events:
            self._apply(event)
        self._count("published", blocks)
        self._send(wire)

    def _learn(self, block_tokens: BlockTokens) -> None:
        if self._tokens is None:
            return
        try:
            self._tokens.add(block_tokens.keys, block_tokens.tokens)
        except FormatError as error:
            _log.warning("tokens of blocks are left out of events: %s", error)

    def _wire(self, events: Iterable[Event]) -> list[WireEvent]:
        tokens = None if self._tokens is None else self._tokens.get
        if not self._as_vllm:
            return wire_events(events, self._block_tokens, tokens)
        held = {tier: blocks.keys() for tier, blocks in self._mirror.items()}
        return as_vllm(wire_events(of_media(events, held), self._block_tokens, tokens))

    def _holds(self, key: bytes) -> bool:
        return any(key in held for held in self._mirror.values())

    def _apply(self, event: Event) -> None:
        held = self._mirror.setdefault(event.tier, {})
        if event.stored:
            held.update(zip(event.keys, (event.parent, *event.keys), strict=False))
            if self._tokens is not None:
                self._tokens.stored(event.keys)
        else:
            for key in event.keys:
                held.pop(key, None)
            if self._tokens is not None:
                self._tokens.removed(event.keys, self._holds)

    def _resume(self, lost: Lost) -> None:
        """Go on from what is held now. A number is left out, so that consumers see the gap."""
        _log.warning("events of blocks=%d were dropped: raise events.queue_blocks", lost.blocks)
        self._mirror = _unpack(lost.content)
        if self._tokens is not None:
            self._tokens.settle(self._holds)
        self._number += 1
        self._history.clear()
        self._history_bytes = 0
        self._snapshot, self._in_use = None, lambda: None
        self._send([])

    def _send(self, events: Sequence[WireEvent]) -> None:
        now = self._clock()
        self._number += 1
        self._sent_at = now
        message = Message(self._number, encode(events, now, self._rank))
        self._keep(message)
        for outlet in self._outlets:
            if not outlet.send(message):
                self._count("unsent", sum(map(_blocks, events)))

    def _keep(self, message: Message) -> None:
        self._history[message.number] = message
        self._history_bytes += len(message.payload) + _MESSAGE_BYTES
        while self._history_bytes > self._pacing.history_bytes:
            oldest = self._history.pop(next(iter(self._history)))
            self._history_bytes -= len(oldest.payload) + _MESSAGE_BYTES

    def _answer(self, request: ReplayRequest) -> None:
        if request.body == SNAPSHOT:
            request.answer(self._shared_snapshot().read())
            return
        try:
            first = number(request.body)
        except FormatError as error:
            if self._logged.admit("request") is not None:
                _log.warning("a request for events is left alone: %s", error)
            return
        oldest = next(iter(self._history), self._number + 1)
        if self._as_vllm and first < oldest:  # vLLM's consumers do not ask for a snapshot
            request.answer(self._everything())
        else:
            request.answer(self._replay(range(max(first, oldest), self._number + 1)))

    def _replay(self, numbers: range) -> Iterator[Message]:
        for at in numbers:
            if at not in self._history:
                raise LostHistory(f"{at} is no longer kept")
            yield self._history[at]

    def _everything(self) -> Iterator[Message]:
        """Return a snapshot's messages, numbered one after another, and those sent since."""
        held = self._shared_snapshot()
        return chain(_numbered(held), self._replay(range(held.number + 1, self._number + 1)))

    def _shared_snapshot(self) -> _Snapshot:
        """Return a snapshot that its reader can bring up to date from the history.

        One is made a second at most, and none while an earlier one is read, so that consumers that
        ask often, or read slowly, cost one snapshot's memory together.
        """
        held = self._in_use()
        oldest = next(iter(self._history), self._number + 1)
        if held is None or (held.number != self._number and held.number + 1 < oldest):
            held = _Snapshot(self._clock(), self._number, tuple(self._held_messages()))
            self._snapshot, self._in_use = held, weakref.ref(held)
        return held

    def _held_messages(self) -> Iterator[Message]:
        """Yield everything held, in batches that carry the number of the last one sent."""
        batch: list[Event] = []
        blocks = 0
        first: list[WireEvent] = [AllBlocksCleared()]
        for run in self._runs():
            batch.append(run)
            blocks += len(run.keys)
            if blocks >= self._pacing.batch_blocks:
                yield self._held_message(first, batch)
                first, batch, blocks = [], [], 0
        if batch or first:
            yield self._held_message(first, batch)

    def _held_message(self, first: list[WireEvent], runs: Sequence[Event]) -> Message:
        events = first + self._wire(runs)
        return Message(self._number, encode(events, self._clock(), self._rank))

    def _runs(self) -> Iterator[Event]:
        """Yield what is held as runs of chains, each at most one batch long."""
        longest = self._pacing.batch_blocks
        for tier, held in self._mirror.items():
            run: list[bytes] = []
            for key, parent in held.items():
                if run and (run[-1] != parent or len(run) == longest):
                    yield Event(True, tier, tuple(run), held[run[0]])
                    run = []
                run.append(key)
            if run:
                yield Event(True, tier, tuple(run), held[run[0]])


def _blocks(event: WireEvent) -> int:
    return 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)


def _unpack(content: Content) -> dict[str, dict[bytes, bytes]]:
    return {
        tier: dict(zip(_keys(keys), _keys(parents), strict=True))
        for tier, (keys, parents) in content.items()
    }


def _keys(packed: bytes) -> list[bytes]:
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
