"""TensorRT-LLM for the conformance kit: the connector in its harness, without a GPU.

`adapters/trtllm/verify_on_gpu.py` checks the connector in the real engine.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from kvcore.config import FORWARDED_VARIABLE
from kvcore.errors import TransferError
from kvcore.testing.conformance.driver import ASK_S, Answer, Ask, Capability, Driver, Engine, Setup
from kvcore.testing.conformance.metrics import total
from kvcore.testing.conformance.reference import searching, settings
from kvcore_trtllm.salt import fusion_salt, request_salt
from kvcore_trtllm.testing import Harness, HarnessArgs, Limits, LlmRequest, State, installed
from kvcore_trtllm.testing.model import load

PAGE_TOKENS = 32
PAGES = 256
SETTLE_S = 60.0

_cached_load = functools.lru_cache(maxsize=4)(load)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable in this block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class InHarness(Engine):
    """A `Harness`, with the stand-ins and settings that it needs while it runs."""

    def __init__(self, setup: Setup) -> None:
        self._rest = ExitStack()
        self._reused: dict[int, dict[str, int]] = {}
        self._rest.enter_context(installed("1.3"))
        try:
            self._harness = self._start(setup)
            if self._leader:
                self._leader.on_reuse = self._reused.__setitem__
        except BaseException:
            self._rest.close()
            raise

    def _start(self, setup: Setup) -> Harness:
        chunked = setup.step_tokens is not None
        limits = Limits(max_num_tokens=setup.step_tokens or 4096, chunked=chunked)
        pages = PAGES if setup.memory_tokens is None else setup.memory_tokens // PAGE_TOKENS
        args = HarnessArgs(setup.ranks, pages, PAGE_TOKENS, limits=limits, dtype=setup.dtype)
        model = _cached_load(setup.model, setup.dtype)
        if setup.kvcore is None:
            return Harness(setup.model, args, model=model)
        connector = importlib.import_module("kvcore_trtllm.connector")
        given = settings({"trtllm": {"min_load_tokens": 1, "stage_wait_s": 30}, **setup.kvcore})
        with searching(setup.path), _environment(FORWARDED_VARIABLE, json.dumps(given)):
            return Harness(
                setup.model,
                args,
                connector=(connector.KVCoreScheduler, connector.KVCoreWorker),
                model=model,
            )

    @property
    def _leader(self) -> Any:
        return self._harness.scheduler and self._harness.scheduler._leader

    def ask(self, asks: Sequence[Ask], timeout_s: float = ASK_S) -> list[Answer]:
        requests = [
            self._harness.submit(
                ask.tokens,
                ask.max_tokens,
                cache_salt=_salt(ask),
                py_lora_path=None if ask.lora is None else str(ask.lora),
            )
            for ask in asks
        ]
        for request, ask in zip(requests, asks, strict=True):
            if ask.abort_after is not None:
                self._abort(request, ask.abort_after)
        self._harness.run(timeout_s)
        return [self._answer(request) for request in requests]

    def _answer(self, request: LlmRequest) -> Answer:
        return Answer(request.generated, self._reused.pop(request.request_id, {}))

    def _abort(self, request: LlmRequest, after: int) -> None:
        self._harness.executor.step()
        while len(request.generated) < after and request.state is not State.DONE:
            self._harness.executor.step()
        if request.state is not State.DONE:
            self._harness.abort(request)

    def settle(self) -> None:
        limit = time.monotonic() + SETTLE_S
        self._harness.run()
        while self._leader and self._leader.manager.in_flight:
            # A step with work carries graphs to the workers, and its poll brings their reports.
            self._harness.generate([[1, 2, 3]], max_tokens=2)
            if time.monotonic() > limit:
                raise TransferError(f"still saving after {SETTLE_S} s")

    def forget(self) -> None:
        self._harness.forget()

    def clear(self) -> None:
        self.settle()
        self.forget()
        if self._leader:
            self._leader.clear()

    def counted(self, name: str, **labels: str) -> float:
        return total([self._leader.metrics], name, labels) if self._leader else 0.0

    def check(self) -> None:
        self._harness.table.check_integrity()
        assert self._harness.table.available == self._harness.table.num_pages, "pages are in use"
        if self._leader:
            self._leader.check_integrity()
            assert not self._leader.manager.in_flight, "transfers are in flight"

    def stop(self) -> None:
        self._harness.close()
        self._rest.close()


def _salt(ask: Ask) -> str | None:
    """Return the salt of a request, by which it also asks something of kvcore."""
    if ask.asked is not None:
        return request_salt(ask.salt or "", ask.fusion, **ask.asked)
    return ask.salt if ask.fusion is None else fusion_salt(ask.salt or "", **ask.fusion)


class TrtllmDriver(Driver):
    """TensorRT-LLM's connector in its harness."""

    name: ClassVar[str] = "trtllm"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability) - {
        Capability.PREEMPTION,
        Capability.STAGES,
    }
    vocabulary: ClassVar[int | None] = 512

    def start(self, setup: Setup) -> Engine:
        return InHarness(setup)

    def about(self) -> str:
        return "the harness of TensorRT-LLM 1.3's connector, float32 on a CPU"


def driver() -> Driver:
    """Return the driver for the conformance kit."""
    return TrtllmDriver()
