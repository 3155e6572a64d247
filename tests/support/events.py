"""A lossy bus, and events of blocks that have numbers for keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kvcore.events import Message, Publisher
from kvcore.index import Event
from kvcore.model.keys import ROOT_PARENT


class Ask:
    def __init__(self, body: bytes) -> None:
        self.body = body
        self.messages: list[Message] | None = None

    def answer(self, messages: Iterator[Message]) -> None:
        self.messages = list(messages)


class Bus:
    """An outlet, and its consumer's source. It loses the messages that the test selects."""

    def __init__(self) -> None:
        self.up = True
        self.losing = 0
        self.queue: deque[Message] = deque()
        self.asked: list[Ask] = []
        self.publisher: Publisher | None = None

    def send(self, message: Message) -> bool:
        if self.losing:
            self.losing -= 1
        elif self.up:
            self.queue.append(message)
        return True

    def requests(self) -> Sequence[Ask]:
        asked, self.asked = self.asked, []
        return asked

    def receive(self, timeout: float) -> Message | None:
        return self.queue.popleft() if self.queue else None

    def ask(self, body: bytes, timeout: float) -> Sequence[Message] | None:
        if not self.up:
            return None
        ask = Ask(body)
        self.asked.append(ask)
        self.step()
        return ask.messages

    def close(self) -> None:
        self.queue.clear()

    def step(self) -> None:
        assert self.publisher is not None
        self.publisher.step()


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def stored(*numbers: int, parent: bytes = ROOT_PARENT, tier: str = "host") -> Event:
    return Event(True, tier, tuple(map(key, numbers)), parent)


def removed(*numbers: int, tier: str = "host") -> Event:
    return Event(False, tier, tuple(map(key, numbers)))
