"""The phases of the demo. All of them use the same prompts, one request at a time.

    engine 1, without kvcore   cold              the reference: its tokens count as right
                               own prefix cache  the same prompt again: the best of the engine alone
    engine 2, with kvcore      first time        turn 1 is new; turn 2 finds turn 1 in host memory
                               host              the engine's cache was emptied, kvcore's was not
    engine 3, with kvcore      disk              last turns in a new process: only the disk has KV
    engine 4, with kvcore      fill              last turns, with tiers smaller than the working set
                               pressure          the same again, latest user first

Except in "own prefix cache", the engine's own cache is emptied before every request, so that
only kvcore can save work. Times to first token are wall-clock times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo.conversations import Conversations, Turn
from kvcore.harness.compare import engine_arguments, keep_on_reset
from kvcore.harness.engine_process import EngineProcess, Generation

COLD, OWN, FIRST, HOST, DISK, FILL, PRESSURE = (
    "cold",
    "own prefix cache",
    "first time",
    "host",
    "disk",
    "fill",
    "pressure",
)
HOST_SHARE, DISK_SHARE = 0.4, 0.75
"""Sizes of the tiers under pressure, as shares of the working set."""


@dataclass(frozen=True)
class Answer:
    """One request and its measurements. ``equal``: its tokens are those of the reference."""

    phase: str
    user: int
    turn: int
    prompt_tokens: int
    ttft_s: float
    cached_tokens: int
    reused_tokens: int
    tiers: dict[str, int]
    equal: bool
    text: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """Settings from the command line and the model's config."""

    model: Path | str
    engine: str
    users: int
    turns: int
    answer_tokens: int
    dtype: str
    max_model_len: int
    kv_bytes_per_token: int
    results: Path
    disk: Path

    @property
    def working_set(self) -> int:
        """Bytes of KV of all users' conversations at their full length."""
        return self.users * self.max_model_len * self.kv_bytes_per_token

    @property
    def engine_args(self) -> dict[str, Any]:
        """Arguments of the engine, whose own cache holds two conversations only."""
        return engine_arguments(
            self.engine,
            dtype=self.dtype,
            request_tokens=self.max_model_len,
            cached_tokens=2 * (self.max_model_len + 256),
            token_nbytes=self.kv_bytes_per_token,
        )


class Demo:
    """Runs the phases in order and records every answer.

    Args:
        starting: called with a phase's name and its number of requests, before its engine starts.
        answered: called after every request.
    """

    def __init__(
        self,
        settings: Settings,
        conversations: Conversations,
        starting: Callable[[str, int], None],
        answered: Callable[[Answer], None],
    ) -> None:
        self.settings = settings
        self.answers: list[Answer] = []
        self.engine_info: dict[str, Any] = {}
        self._conversations = conversations
        self._starting = starting
        self._answered = answered
        self._turns: list[Turn] = []
        self._right: dict[tuple[int, int], list[int]] = {}

    def run(self, with_kvcore: bool = True) -> None:
        """Run all phases, or only the reference without kvcore. Blocks for minutes."""
        self._reference()
        if with_kvcore:
            disk, working_set = self.settings.disk, self.settings.working_set
            roomy = _config(2 * working_set, 2 * working_set, disk / "roomy")
            self._remembering(roomy)
            self._restarted(roomy)
            sizes = int(working_set * HOST_SHARE), int(working_set * DISK_SHARE)
            self._pressed(_config(*sizes, disk / "tight"))

    def _reference(self) -> None:
        """Run the engine without kvcore. Its answers become part of the users' next turns."""
        self._starting(f"{COLD}, {OWN}", 2 * self.settings.users * self.settings.turns)
        with self._engine("reference", None) as engine:
            for user in range(self.settings.users):
                turn = self._conversations.first(user)
                self._ask_twice(engine, turn)
                for _ in range(1, self.settings.turns):
                    turn = self._conversations.following(turn, self._right[user, turn.turn])
                    self._ask_twice(engine, turn)

    def _ask_twice(self, engine: EngineProcess, turn: Turn) -> None:
        engine.reset_prefix_cache()
        [got] = engine.generate([turn.token_ids], self.settings.answer_tokens)
        self._turns.append(turn)
        self._right[turn.user, turn.turn] = got.token_ids
        self._keep(COLD, turn, got)
        self._ask(engine, OWN, turn)

    def _remembering(self, config: dict[str, Any]) -> None:
        self._starting(FIRST, len(self._turns))
        with self._engine("kvcore", config) as engine:
            self._round(engine, FIRST, self._turns)
            self._starting(HOST, len(self._turns))
            self._round(engine, HOST, self._turns)

    def _restarted(self, config: dict[str, Any]) -> None:
        last = self._last_turns()  # a first turn would bring its part into host memory
        self._starting(DISK, len(last))
        _drop_page_cache(Path(config["disk"]["path"]))
        with self._engine("restarted", config) as engine:
            self._round(engine, DISK, last)

    def _pressed(self, config: dict[str, Any]) -> None:
        last = self._last_turns()
        self._starting(FILL, len(last))
        with self._engine("pressure", config) as engine:
            self._round(engine, FILL, last)
            self._starting(PRESSURE, len(last))
            self._round(engine, PRESSURE, reversed(last))

    def _last_turns(self) -> list[Turn]:
        return [turn for turn in self._turns if turn.turn == self.settings.turns - 1]

    def _round(self, engine: EngineProcess, phase: str, turns: Iterable[Turn]) -> None:
        for turn in turns:
            engine.reset_prefix_cache()
            self._ask(engine, phase, turn)

    def _ask(self, engine: EngineProcess, phase: str, turn: Turn) -> None:
        [got] = engine.generate([turn.token_ids], self.settings.answer_tokens)
        self._keep(phase, turn, got)

    def _keep(self, phase: str, turn: Turn, got: Generation) -> None:
        answer = Answer(
            phase=phase,
            user=turn.user,
            turn=turn.turn,
            prompt_tokens=len(turn.token_ids),
            ttft_s=got.ttft_s,
            cached_tokens=got.cached_tokens,
            reused_tokens=got.reused_tokens,
            tiers=got.tiers,
            equal=got.token_ids == self._right[turn.user, turn.turn],
            text=got.text,
        )
        self.answers.append(answer)
        self._answered(answer)

    def _engine(self, name: str, kvcore: dict[str, Any] | None) -> EngineProcess:
        """Start an engine and warm it up with text that no prompt contains."""
        engine = EngineProcess(
            self.settings.model,
            engine=self.settings.engine,
            kvcore=None if kvcore is None else keep_on_reset(self.settings.engine, kvcore),
            log=self.settings.results / f"engine-{name}.log",
            **self.settings.engine_args,
        )
        try:
            self.engine_info = engine.wait_ready()
            engine.generate([list(range(100, 400))], max_tokens=2)
        except BaseException:
            engine.kill()
            raise
        return engine


def _config(host: int, disk: int, path: Path) -> dict[str, Any]:
    return {"host": {"capacity": host}, "disk": {"path": str(path), "capacity": disk}}


def _drop_page_cache(folder: Path) -> None:
    """Drop the files under `folder` from the page cache, so that reads come from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
