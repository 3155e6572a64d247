"""A made-up trace of agents: conversations of many turns, whose prompts grow and part.

    system prompt ── first question ── answer ── tool ── answer ── ...        a session
                                          ├───── the last turn, edited         8 of 100 turns
                                          ├───── a sub-agent's own task        10 of 100
                                          └───── another

Lengths and shares are assumptions. No engine and no user were measured.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcore.cli.simulate.trace import TraceRequest
from kvcore.errors import ConfigError
from kvcore.model.keys import KEY_BYTES

__all__ = ["Agents"]

_LONGEST = 120_000
"""Tokens after which a session ends."""


@dataclass(eq=False)
class _Session:
    """A conversation: the keys of its blocks, the turns left, and the blocks before each turn."""

    keys: list[bytes]
    left: int
    turns: list[int] = field(default_factory=list)
    is_sub: bool = False


@dataclass(frozen=True)
class Agents:
    """The trace: equal values make equal requests.

    Args:
        sessions: sessions in all, without sub-agents.
        live: sessions at a time, without sub-agents.
        systems: system prompts, of which some are used much more often than others.
        gap_s: mean seconds from one request to the next.
    """

    sessions: int = 220
    live: int = 60
    systems: int = 8
    gap_s: float = 2.0
    seed: int = 7

    def __post_init__(self) -> None:
        if min(self.sessions, self.live, self.systems) < 1 or not self.gap_s > 0:
            raise ConfigError(
                f"given {self.sessions} sessions, {self.live} at a time, of {self.systems} system "
                f"prompts, every {self.gap_s} s; each must be above 0"
            )

    def requests(self, block_tokens: int, limit: int | None = None) -> Iterator[TraceRequest]:
        """Make the requests lazily, at most ``limit``. Texts are of whole blocks."""
        return _Maker(self, block_tokens).requests(limit)


class _Maker:
    """The random choices of one run over an `Agents`."""

    def __init__(self, agents: Agents, block_tokens: int) -> None:
        self._agents = agents
        self._block = block_tokens
        self._random = random.Random(agents.seed)
        self._made = 0  # blocks of text
        self._systems = [
            self._grown([], self._random.uniform(2000, 9000)) for _ in range(agents.systems)
        ]

    def requests(self, limit: int | None) -> Iterator[TraceRequest]:
        picks, agents = self._random, self._agents
        live = [self._session() for _ in range(min(agents.live, agents.sessions))]
        started, at, count = len(live), 0.0, 0
        while live and (limit is None or count < limit):
            session = self._next(live)
            at, count = at + picks.expovariate(1 / agents.gap_s), count + 1
            own = picks.randint(1, max(1, self._block - 1))  # the end, which fills no block
            tokens = len(session.keys) * self._block + own
            yield TraceRequest(at, tokens, 1, list(session.keys))
            self._turn(session, live)
            if session.left <= 0 or len(session.keys) * self._block > _LONGEST:
                live.remove(session)
                if not session.is_sub and started < agents.sessions:
                    live.append(self._session())
                    started += 1

    def _session(self) -> _Session:
        weights = [1 / (place + 1) for place in range(len(self._systems))]
        [system] = self._random.choices(self._systems, weights)
        question = self._random.lognormvariate(6.5, 0.8)
        return _Session(self._grown(system, question), self._random.randint(4, 30))

    def _next(self, live: list[_Session]) -> _Session:
        """Choose who asks next: often one of the oldest, which are busy, else anyone."""
        if self._random.random() < 0.6:
            return live[min(int(self._random.expovariate(1 / 12)), len(live) - 1)]
        return self._random.choice(live)

    def _turn(self, session: _Session, live: list[_Session]) -> None:
        """Extend a session by what follows the prompt it has just sent."""
        picks = self._random
        session.turns.append(len(session.keys))
        session.left -= 1
        chance = picks.random()
        if chance < 0.08 and len(session.turns) > 1:
            before = session.keys[: session.turns[-2]]
            session.keys = self._grown(before, picks.lognormvariate(6.0, 0.8))
        elif chance < 0.18 and not session.is_sub:
            for _ in range(picks.randint(2, 4)):
                task = self._grown(session.keys, picks.lognormvariate(6.3, 0.7))
                live.append(_Session(task, picks.randint(1, 4), is_sub=True))
            session.keys = self._grown(session.keys, picks.lognormvariate(6.8, 0.6))
        else:
            answered = self._grown(session.keys, 250)
            session.keys = self._grown(answered, picks.lognormvariate(6.3, 1.0))

    def _grown(self, keys: list[bytes], tokens: float) -> list[bytes]:
        """Return a chain of keys with new text of about ``tokens`` tokens behind ``keys``."""
        grown, key = list(keys), keys[-1] if keys else b""
        for _ in range(max(1, round(tokens / self._block))):
            self._made += 1
            text = b"%b%d" % (key, self._made)
            key = hashlib.blake2b(text, digest_size=KEY_BYTES).digest()
            grown.append(key)
        return grown
