"""The driver that runs the reference engine in a child process, for `EngineProcess`.

    with EngineProcess("random", engine="reference", kvcore={...}, ranks=2) as engine: ...

The model "random" is `random_llama`; any other name is a folder. Prompts are token ids. The event
loop's thread steps the engine while there is work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from kvcore.config import load_config
from kvcore.errors import TransferError, UnsupportedError
from kvcore.fusion.options import FusionOptions, fusion_options
from kvcore.harness.driver import EngineDriver, Prompt, Stopwatch, run, samples
from kvcore.telemetry.metrics import Metrics
from kvcore.testing.engine.engine import EngineArgs, ReferenceEngine
from kvcore.testing.engine.model import load, random_llama
from kvcore.testing.engine.requests import Request, State

__all__ = ["Driver"]

RANDOM = "random"


@dataclass(eq=False)
class _Asked:
    """A request, the future of its caller, and the times of its events."""

    name: str
    request: Request
    done: asyncio.Future[None]
    abort_after: int | None
    watch: Stopwatch = field(default_factory=Stopwatch)

    def reply(self) -> dict[str, Any]:
        request = self.request
        reused = dict(request.reused)
        return {
            "request_id": self.name,
            "token_ids": request.answer,
            "text": "",
            "prompt_tokens": request.prompt_len,
            "cached_tokens": request.cached_tokens + sum(reused.values()),
            **self.watch.times(),
            "finish_reason": "length" if request.state is State.DONE else "abort",
            "kvcore": {"reused_tokens": sum(reused.values()), "tiers": reused}
            | ({} if request.promised is None else {"promise": request.promised}),
        }


class Driver(EngineDriver):
    """One `ReferenceEngine`, and the calls that an `EngineProcess` may make."""

    restarts = True

    def __init__(self) -> None:
        super().__init__()
        self._engine: ReferenceEngine | None = None
        self._asked: list[_Asked] = []
        self._work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    async def start(self, model: str, kvcore: dict[str, Any] | None, **args: Any) -> dict[str, Any]:
        """Start an engine for ``model``. ``args`` are the fields of `EngineArgs`."""
        weights = random_llama() if model == RANDOM else load(Path(model))
        config = None if kvcore is None else load_config(None, kvcore)
        self._engine = ReferenceEngine(weights, EngineArgs(**args), config)
        self._stepping = asyncio.create_task(self._step(self._engine))
        return {"engine": "reference", "version": torch.__version__, "device": "cpu"}

    async def answer(self, prompt: Prompt) -> dict[str, Any]:
        tokens = prompt.prompt
        if (
            isinstance(tokens, str)
            or prompt.logprobs
            or prompt.likeliest
            or prompt.image
            or not prompt.ignore_eos
            or prompt.traceparent
        ):
            raise UnsupportedError(
                "the reference engine takes token ids only, always answers max_tokens tokens, and "
                "supports no images, log-probabilities or traces; leave these options out"
            )
        request = self._running.submit(
            tokens,
            prompt.max_tokens,
            salt=prompt.cache_salt or "",
            fusion=_wishes(prompt.fusion, len(tokens)),
            lora=Path(prompt.lora) if prompt.lora else None,
            promise=prompt.promise,
            asked=prompt.asked,
        )
        done = asyncio.get_running_loop().create_future()
        asked = _Asked(prompt.request_id, request, done, prompt.abort_after)
        self._asked.append(asked)
        self._work.set()
        await done
        return asked.reply()

    async def abort(self, request_id: str) -> None:
        """Abort a request. An unknown or finished one is ignored."""
        for asked in self._asked:
            if asked.name == request_id:
                self._running.abort(asked.request)
        self._tell()

    async def reset_prefix_cache(self, connector: bool, timeout_s: float) -> None:
        """Empty the engine's prefix cache; with ``connector``, also kvcore's tiers."""
        self._running.forget()
        if connector and self._running.leader is not None:
            await self.settle(timeout_s)
            self._running.leader.clear()

    async def settle(self, timeout_s: float) -> None:
        """Wait until every save is published. Raises TransferError after ``timeout_s`` seconds."""
        limit = time.monotonic() + timeout_s
        while _busy(self._running):
            if time.monotonic() > limit:
                raise TransferError(f"saves did not end within {timeout_s} s")
            await asyncio.sleep(0.002)

    async def metrics(self) -> dict[str, float]:
        """Return the Prometheus samples of kvcore, summed over the leader and the ranks."""
        engine, registry, all_of_them = self._running, CollectorRegistry(), Metrics()
        for made in engine.workers:
            all_of_them.absorb(made.metrics.snapshot())
        if engine.leader is not None:
            all_of_them.absorb(engine.leader.metrics.snapshot())
        all_of_them.register(registry)
        return samples(registry)

    async def shutdown(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepping
            self._stepping = None
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()

    @property
    def _running(self) -> ReferenceEngine:
        if self._engine is None:
            raise UnsupportedError("no engine runs; call start first")
        return self._engine

    # -- stepping ---------------------------------------------------------------------------

    async def _step(self, engine: ReferenceEngine) -> None:
        """Step the engine while it has requests or transfers. If a step fails, end the process."""
        while True:
            await self._work.wait()
            try:
                engine.step()
            except Exception:  # noqa: BLE001 - process boundary; the traceback is in the log
                traceback.print_exc()
                os._exit(1)
            self._tell()
            if not _busy(engine):
                self._work.clear()
            await asyncio.sleep(0)

    def _tell(self) -> None:
        """Record first tokens, abort requests that are due, and complete those that ended."""
        for asked in list(self._asked):
            request, tokens = asked.request, len(asked.request.answer)
            asked.watch.note(tokens)
            if asked.abort_after is not None and tokens >= asked.abort_after:
                self._running.abort(request)
            if request.state.ended:
                self._asked.remove(asked)
                asked.done.set_result(None)


def _busy(engine: ReferenceEngine) -> bool:
    moving = engine.leader is not None and engine.leader.manager.in_flight
    return not engine.idle or bool(moving)


def _wishes(fusion: dict[str, Any] | None, tokens: int) -> FusionOptions | None:
    return None if fusion is None else fusion_options({"fusion": fusion}, tokens)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Driver(), int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter would wait for threads that store clients leave behind
