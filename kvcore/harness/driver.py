"""The child process's side of `kvcore.harness.engine_process`, shared by all engines.

A driver subclasses `EngineDriver` and runs as ``python -m kvcore_<engine>.testing.driver FD``:

    start ──▶ generate, abort, reset_prefix_cache, settle, metrics ──▶ shutdown

The methods are coroutines on one event loop. Calls may overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from prometheus_client import CollectorRegistry

from kvcore.harness.engine_process import sample_name, serve

__all__ = ["KV_ON_A_CPU", "Collected", "EngineDriver", "Prompt", "Stopwatch", "run", "samples"]

KV_ON_A_CPU = 2 << 30
"""Bytes of KV that an engine on a CPU keeps itself, unless its arguments say how much.

An engine that is told nothing takes nearly all of the machine's memory. With SmolLM2 in float32
this is 46,000 tokens, and the engine fits a machine of 8 GB.
"""

_CALLS = ("start", "generate", "abort", "reset_prefix_cache", "settle", "metrics")


@dataclass(frozen=True)
class Prompt:
    """One greedy request. See `EngineProcess.submit` for the fields.

    ``prompt`` is text or token ids. ``request_id`` is always set.
    """

    prompt: str | list[int]
    max_tokens: int
    request_id: str
    abort_after: int | None
    ignore_eos: bool
    cache_salt: str | None
    logprobs: bool
    lora: str | None
    image: str | None
    fusion: dict[str, Any] | None
    traceparent: str | None
    promise: dict[str, Any] | None = None
    image_uuid: str | None = None
    likeliest: int = 0
    asked: Any = None


class Stopwatch:
    """Measures a request from its start, which is now, to its first token and to its end."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first_at: float | None = None

    def note(self, tokens: int) -> None:
        """Record the number of tokens that the request has now."""
        if tokens and self._first_at is None:
            self._first_at = time.perf_counter()

    def times(self) -> dict[str, float]:
        """Return the seconds to the first token and to now, under a reply's names for them."""
        now = time.perf_counter()
        return {"ttft_s": (self._first_at or now) - self._began, "total_s": now - self._began}


class Collected(Protocol):
    """The outputs of one request, collected as they arrive."""

    token_ids: list[int]
    """The tokens so far."""

    def add(self, output: Any) -> None:
        """Take in one output of the engine."""


class EngineDriver(ABC):
    """One engine, with the calls that an `EngineProcess` makes."""

    restarts: ClassVar[bool] = False
    """True if `start` may follow `shutdown` in the same process."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    @abstractmethod
    async def start(
        self, model: str, kvcore: dict[str, Any] | None, **engine_args: Any
    ) -> dict[str, Any]:
        """Start the engine; return its name, version and device once it takes requests."""

    async def generate(self, request_id: str | None, **options: Any) -> dict[str, Any]:
        """Answer one greedy request until its end or its abort. Its times are measured here."""
        name = request_id or f"request-{next(self._numbers)}"
        return await self.answer(Prompt(request_id=name, **options))

    @abstractmethod
    async def answer(self, prompt: Prompt) -> dict[str, Any]:
        """Answer a request; return the fields of a `Generation`."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Abort one request. Unknown and finished requests are ignored."""

    @abstractmethod
    async def reset_prefix_cache(self, connector: bool, timeout_s: float) -> None:
        """Empty the engine's own cache, and with ``connector`` kvcore's tiers too.

        Raises UnsupportedError if that did not succeed within ``timeout_s`` seconds.
        """

    @abstractmethod
    async def settle(self, timeout_s: float) -> None:
        """Wait until every save is published, at most ``timeout_s`` seconds."""

    @abstractmethod
    async def metrics(self) -> dict[str, float]:
        """Return kvcore's Prometheus samples, by name with labels."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine, if one runs, after it has finished its saves."""

    async def collect(
        self, prompt: Prompt, outputs: AsyncIterator[Any], got: Collected, *, to_the_end: bool
    ) -> None:
        """Add a request's ``outputs`` to ``got``, and abort it when its prompt says so.

        If ``to_the_end``, outputs that follow the abort are added too.
        """
        after = prompt.abort_after
        early = None
        if after == 0:
            early = asyncio.create_task(self._abort_early(prompt.request_id))
        async for output in outputs:
            got.add(output)
            if after is not None and 0 < after <= len(got.token_ids):
                await self.abort(prompt.request_id)
                if not to_the_end:
                    break
        if early is not None:
            early.cancel()

    async def _abort_early(self, request_id: str) -> None:
        """Abort a request repeatedly until cancelled: the engine may not have it yet."""
        while True:
            await self.abort(request_id)
            await asyncio.sleep(0.001)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Return every sample of a registry, by name with labels."""
    return {
        sample_name(sample.name, sample.labels): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def run(driver: EngineDriver, descriptor: int) -> None:
    """Answer the calls of an `EngineProcess` until it closes the socket, then shut down."""

    async def serving() -> None:
        handlers = {name: getattr(driver, name) for name in _CALLS}
        if driver.restarts:
            handlers["stop"] = driver.shutdown
        try:
            await serve(descriptor, handlers)
        finally:
            await driver.shutdown()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serving())
