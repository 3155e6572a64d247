"""A router on the block events: send a prompt to the engine that holds most of its prefix.

    python examples/router.py tcp://HOST1:5657,tcp://HOST1:5658 tcp://HOST2:5657,tcp://HOST2:5658

Each argument names `events.endpoint` and `events.replay_endpoint` of one engine. A prompt is a line
of token ids on standard input. The router needs neither kvcore's hash function nor its secret: with
`events.token_ids = true` an engine publishes the tokens of each block beside the block's key.
"""

import sys
from collections.abc import Sequence

from kvcore.events import Message, Subscriber
from kvcore.events.wire import BlockStored, decode
from kvcore.events.zmq_bus import ZmqSource

Keys = dict[tuple[bytes | int | None, tuple[int, ...]], bytes | int]
"""The key of a block, by the key of its parent (None: it starts a prompt) and its tokens."""


class Learning(ZmqSource):
    """A source of messages that also notes which key stands for which tokens."""

    def __init__(self, engine: Sequence[str], keys: Keys) -> None:
        super().__init__(*engine)
        self._keys = keys

    def receive(self, timeout: float) -> Message | None:
        message = super().receive(timeout)
        self._learn([message] if message else [])
        return message

    def ask(self, body: bytes, timeout: float) -> Sequence[Message] | None:
        answer = super().ask(body, timeout)
        self._learn(answer or [])
        return answer

    def _learn(self, messages: Sequence[Message]) -> None:
        for event in (event for message in messages for event in decode(message.payload)):
            if isinstance(event, BlockStored) and event.token_ids:
                size, parent = event.block_size, event.parent_block_hash
                for at, key in enumerate(event.block_hashes):
                    tokens = event.token_ids[at * size : (at + 1) * size]
                    self._keys[parent, tuple(tokens)] = parent = key


class Router:
    """Follows engines, each given as (endpoint, replay endpoint), with blocks of one size."""

    def __init__(self, engines: Sequence[Sequence[str]], block_tokens: int = 16) -> None:
        self._size = block_tokens
        self._keys: Keys = {}
        self._engines = [Subscriber(Learning(engine, self._keys)) for engine in engines]

    def poll(self, seconds: float = 0.1) -> None:
        """Take in what the engines publish, until each has been quiet for ``seconds``."""
        for engine in self._engines:
            while engine.poll(seconds):
                pass

    def held(self, prompt: Sequence[int]) -> list[int]:
        """Return how many tokens of the prompt's prefix each engine holds, in any tier."""
        counts = [0] * len(self._engines)
        parent = None
        for start in range(0, len(prompt) - self._size + 1, self._size):
            parent = self._keys.get((parent, tuple(prompt[start : start + self._size])))
            for number, engine in enumerate(self._engines):
                if counts[number] == start and any(parent in t for t in engine.tiers().values()):
                    counts[number] += self._size
        return counts


def main() -> None:
    router = Router([engine.split(",") for engine in sys.argv[1:]])
    for line in sys.stdin:
        router.poll()
        held = router.held([int(token) for token in line.split()])
        print(f"engine {held.index(max(held)) + 1} holds {max(held)} tokens of this prompt")


if __name__ == "__main__":
    main()
