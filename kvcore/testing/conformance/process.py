"""Engines in child processes, for the kit. An adapter adds only its settings and arguments.

class MyDriver(ProcessDriver):
    name, title, engine_args = "mine", "My engine", {"dtype": "float32"}

    def settings(self, kvcore): ...    kvcore's settings, with what this engine needs
    def arguments(self, setup): ...    the engine's own arguments, added to ``engine_args``

This process does not import the engine: the child does, and may run in another environment.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, ClassVar

from kvcore.errors import ConfigError, KVCoreError, TransferError
from kvcore.harness.compare import SETTLE_S
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import SMALL_VOCABULARY
from kvcore.harness.recorded import RecordedEngine, book_of, confirmed
from kvcore.testing.conformance.driver import ASK_S, Answer, Ask, Driver, Engine, Setup
from kvcore.testing.conformance.metrics import total_of_samples
from kvcore.testing.conformance.reference import settings

__all__ = ["ProcessDriver", "ProcessEngine"]


class ProcessDriver(Driver):
    """A driver of engines that run in a child process, started with `EngineProcess`.

    ``title`` is the engine's name as its makers write it. ``engine_args`` has its arguments for a
    small model on a CPU, and ``environment`` the environment variables that it needs there. If
    ``restarts`` is true, the next engine starts in the child of the last one, which has imported
    all modules.
    """

    title: ClassVar[str]
    vocabulary: ClassVar[int | None] = SMALL_VOCABULARY
    restarts: ClassVar[bool] = False
    engine_args: ClassVar[Mapping[str, Any]]
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        self._python: Path | None = None
        self._told: dict[str, Any] = {}
        self._kept: dict[tuple[Path, ...], EngineProcess] = {}

    def use(self, python: Path) -> None:
        if not os.access(python, os.X_OK):
            raise ConfigError(
                f"given {python} for engine {self.name}: it is not executable; give an interpreter"
            )
        self._python = python

    def about(self) -> str:
        """Return the name and version that the last started engine reported."""
        if not self._told:
            return f"{self.title}, never started"
        device = "a CPU" if self._told["device"] == "cpu" else self._told["device"]
        return f"{self.title} {self._told['version']}, float32 on {device}"

    def start(self, setup: Setup) -> Engine:
        kvcore = None if setup.kvcore is None else settings(self.settings(setup.kvcore))
        args = {**self.engine_args, "dtype": setup.dtype, **self.arguments(setup)}
        forked = args.pop("forked", False)
        engine, env = self.name.partition(":")[0], dict(self.environment)
        if kvcore is None and (
            book := book_of(engine, setup.model, args, env=env, python=self._python)
        ):
            plain = RecordedEngine(
                book,
                setup.model,
                engine=engine,
                python=self._python,
                env=env,
                forked=forked,
                **args,
            )
            return ProcessEngine(self, plain, setup, 0)
        process = self._kept.pop(setup.path, None)
        if process is None:
            process = EngineProcess(
                setup.model,
                engine=engine,
                kvcore=kvcore,
                python=self._python,
                env={**env, "PYTHONPATH": os.pathsep.join(map(str, setup.path))},
                forked=forked,
                **args,
            )
        else:
            process.restart(setup.model, kvcore=kvcore, **args)
        return self._ready(process, setup)

    def _ready(self, process: EngineProcess, setup: Setup) -> ProcessEngine:
        began = process.log.stat().st_size
        try:
            self._told = process.wait_ready()
        except KVCoreError:
            process.kill()
            raise
        return ProcessEngine(self, process, setup, began)

    def end(self, process: EngineProcess, setup: Setup) -> None:
        """Stop an engine that `start` returned, or keep its process if ``restarts`` is true."""
        recorded = isinstance(process, RecordedEngine)
        if not self.restarts or recorded or setup.path in self._kept:
            process.close()
            return
        try:
            process.stop()
        except KVCoreError:
            process.kill()
            raise
        self._kept[setup.path] = process

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()

    @abstractmethod
    def settings(self, kvcore: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kit's settings ``kvcore`` with those that make hits certain on this engine."""

    @abstractmethod
    def arguments(self, setup: Setup) -> dict[str, Any]:
        """Return the engine's own arguments for a setup."""

    @abstractmethod
    def preemptions(self, engine: ProcessEngine) -> int:
        """Return how many requests of ``engine`` have lost their pages and started over."""


class ProcessEngine(Engine):
    """The engine of an `EngineProcess`. ``began`` is the size of its log at the start, in bytes."""

    def __init__(
        self, driver: ProcessDriver, process: EngineProcess, setup: Setup, began: int
    ) -> None:
        self._driver = driver
        self._process = process
        self._setup = setup
        self._began = began

    @property
    def log(self) -> str:
        """The log of the engine since its start."""
        return self._process.log.read_bytes()[self._began :].decode(errors="replace")

    def ask(self, asks: Sequence[Ask], timeout_s: float = ASK_S) -> list[Answer]:
        futures = [
            self._process.submit(
                ask.tokens,
                ask.max_tokens,
                cache_salt=ask.salt,
                lora=ask.lora,
                abort_after=ask.abort_after,
                fusion=dict(ask.fusion) if ask.fusion is not None else {"enabled": False},
                asked=None if ask.asked is None else dict(ask.asked),
            )
            for ask in asks
        ]
        limit = time.monotonic() + timeout_s
        try:
            return [_answer(future.result(max(limit - time.monotonic(), 0))) for future in futures]
        except FutureTimeout as error:
            raise TransferError(f"a request did not end within {timeout_s} s") from error

    def settle(self) -> None:
        self._process.settle()

    def forget(self) -> None:
        """Empty the engine's own prefix cache, after its pages are saved."""
        self._process.reset_prefix_cache(timeout_s=SETTLE_S)

    def clear(self) -> None:
        self.settle()
        self._process.reset_prefix_cache(connector=True, timeout_s=SETTLE_S)

    def counted(self, name: str, **labels: str) -> float:
        return total_of_samples(self._process.metrics(), name, labels)

    @property
    def preemptions(self) -> int:
        return self._driver.preemptions(self)

    def check(self) -> None:
        """Assert that every page can be released. Nothing else can be seen from outside."""
        self._process.reset_prefix_cache(timeout_s=SETTLE_S)

    def stop(self) -> None:
        self._driver.end(self._process, self._setup)


def _answer(generation: Generation) -> Answer:
    def ask_engine() -> list[int]:
        return confirmed(generation).token_ids

    return Answer(generation.token_ids, generation.tiers, ask_engine)
