"""The driver of the reference engine, which is also the shortest example of a driver."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvcore.config import load_config
from kvcore.fusion.options import FusionOptions, fusion_options
from kvcore.telemetry.metrics import Metrics
from kvcore.testing.conformance.driver import ASK_S, Answer, Ask, Capability, Driver, Engine, Setup
from kvcore.testing.conformance.metrics import total
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, State, load

__all__ = ["InProcess", "ReferenceDriver", "driver", "searching"]

PAGE_TOKENS = 32
PAGES = 256


@functools.lru_cache(maxsize=4)
def _model(folder: Path, dtype: str) -> Llama:
    return load(folder, dtype=getattr(torch, dtype))


@contextmanager
def searching(path: Sequence[Path]) -> Iterator[None]:
    """Put ``path`` before the module search path for this block, so that its plugins are found."""
    before = list(sys.path)
    sys.path[:0] = map(str, path)
    try:
        yield
    finally:
        sys.path[:] = before


def settings(kvcore: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kit's settings ``kvcore`` with those that a small machine needs."""
    return {**kvcore, "host": {"huge_pages": False, **kvcore.get("host", {})}}


class InProcess(Engine):
    """A `ReferenceEngine` in this process."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.engine = engine

    def ask(self, asks: Sequence[Ask], timeout_s: float = ASK_S) -> list[Answer]:
        requests = [
            self.engine.submit(
                ask.tokens,
                ask.max_tokens,
                salt=ask.salt or "",
                fusion=_wishes(ask),
                lora=ask.lora,
                asked=None if ask.asked is None else dict(ask.asked),
            )
            for ask in asks
        ]
        for request, ask in zip(requests, asks, strict=True):
            if ask.abort_after is not None:
                self._abort(request, ask.abort_after)
        self.engine.run(timeout_s)
        return [Answer(request.answer, dict(request.reused)) for request in requests]

    def _abort(self, request: Any, after: int) -> None:
        """Abort ``request`` after ``after`` tokens.

        With 0, it is aborted after its first step, while it loads or saves.
        """
        self.engine.step()
        while len(request.answer) < after and not request.state.ended:
            self.engine.step()
        if request.state is not State.DONE:
            self.engine.abort(request)

    def settle(self) -> None:
        self.engine.settle()

    def forget(self) -> None:
        self.engine.forget()

    def clear(self) -> None:
        self.engine.settle()
        self.engine.forget()
        if self.engine.leader is not None:
            self.engine.leader.clear()

    def counted(self, name: str, **labels: str) -> float:
        return total(self._metrics(), name, labels)

    def _metrics(self) -> list[Metrics]:
        leader = self.engine.leader
        ranks = [made.metrics for made in self.engine.workers]
        return ranks if leader is None else [leader.metrics, *ranks]

    @property
    def preemptions(self) -> int:
        return self.engine.preemptions

    def check(self) -> None:
        self.engine.check_integrity()

    def stop(self) -> None:
        self.engine.close()


def _wishes(ask: Ask) -> FusionOptions | None:
    if ask.fusion is None:
        return None
    return fusion_options({"fusion": dict(ask.fusion)}, len(ask.tokens))


class ReferenceDriver(Driver):
    name: ClassVar[str] = "reference"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability)
    vocabulary: ClassVar[int | None] = 512
    engine_type: ClassVar[type[ReferenceEngine]] = ReferenceEngine

    def start(self, setup: Setup) -> Engine:
        pages = PAGES if setup.memory_tokens is None else setup.memory_tokens // PAGE_TOKENS
        args = EngineArgs(
            ranks=setup.ranks,
            stages=setup.stages,
            num_pages=pages,
            page_tokens=PAGE_TOKENS,
            max_num_tokens=setup.step_tokens or 4096,
            prefix_cache=setup.kvcore is not None,
        )
        config = None
        if setup.kvcore is not None:
            config = load_config(None, settings(setup.kvcore))
        with searching(setup.path):
            return InProcess(self.engine_type(_model(setup.model, setup.dtype), args, config))

    def about(self) -> str:
        return "kvcore's own, float32 on a CPU"


def driver() -> Driver:
    return ReferenceDriver()
