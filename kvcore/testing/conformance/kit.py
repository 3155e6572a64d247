"""A run of the kit on one engine: engines started when a case wants one, and what is expected.

Starting an engine may take a minute, so one is kept while the cases ask for the same setup, and
cleared between them. Beside it runs one without kvcore, which says what the answers are.
"""

from __future__ import annotations

import json
import random
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.harness.models import tiny_model
from kvcore.testing.closing import Closing
from kvcore.testing.conformance.driver import Answer, Ask, Capability, Driver, Engine, Setup

__all__ = ["CASES", "SECTIONS", "Case", "Kit", "Result", "case", "run"]

SECTIONS = ("equality", "accounting", "fusion", "faults", "crossing")
BLOCK = 16
PATIENT = {"lookup_s": 60, "timeout_s": 30, "deadline_s": 60, "splits_s": 0.01}
"""Options of a store on a machine that is busy: what is there is found, at whatever size it was
written."""

_STORES = {"redis": "redis", "rediss": "redis", "unix": "redis"}
"""By the scheme of a URL; what is not here is for "objects" (``s3``, ``gs``, ``az``, ``file``)."""


def store_plugin(url: str) -> str:
    """The tier plugin for a remote store. Raises ConfigError for what is no URL."""
    scheme, found, _ = url.partition("://")
    if not found:
        raise ConfigError(
            f"given the store {url!r}; it takes a URL: redis://HOST:PORT/DB, s3://BUCKET/PATH, "
            "file:///FOLDER"
        )
    return _STORES.get(scheme, "objects")


@dataclass(frozen=True)
class Case:
    """Something every engine must do: ``run(kit)`` raises AssertionError where it does not.

    A case of more than one engine runs where the kit has ``partners``, one that needs a remote
    store where it has a ``store``.
    """

    section: str
    name: str
    about: str
    needs: frozenset[Capability]
    run: Callable[[Kit], None]
    pairs: bool = False
    store: bool = False

    def lacks(self, kit: Kit) -> str:
        """Why the case is not for this engine; empty where it is."""
        missing = self.needs - kit.driver.capabilities
        if missing:
            return "no " + ", ".join(sorted(capability.value for capability in missing))
        if self.pairs and not kit.partners:
            return "no other engine at hand"
        return "no remote store at hand" if self.store and kit.store is None else ""


CASES: list[Case] = []
"""All of them, as they are registered."""


def case(
    section: str, *needs: Capability, pairs: bool = False, store: bool = False
) -> Callable[[Callable[[Kit], None]], Callable[[Kit], None]]:
    """Register a function as a case: its name and the first line of its docstring are shown."""
    assert section in SECTIONS, section

    def register(function: Callable[[Kit], None]) -> Callable[[Kit], None]:
        name = function.__name__.replace("_", "-")
        about = (function.__doc__ or "").strip().splitlines()[0]
        CASES.append(Case(section, name, about, frozenset(needs), function, pairs, store))
        return function

    return register


@dataclass(frozen=True)
class Result:
    """What became of a case: "passed", "failed" or "left out", and why."""

    section: str
    case: str
    outcome: str
    why: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Kit(Closing):
    """What a case may use. One thread; close it when done.

    ``partners`` are drivers of the engines that share a disk with this one. ``store`` is the URL
    of a remote store for all of them, as `store_plugin` knows it. ``folder`` is scratch.
    """

    def __init__(
        self,
        driver: Driver,
        folder: Path,
        *,
        model: Path | None = None,
        partners: Sequence[Driver] = (),
        store: str | None = None,
    ) -> None:
        self.driver = driver
        self.store = store
        self.folder = folder
        self.partners = tuple(partners)
        self.model = model or tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
        config = json.loads((self.model / "config.json").read_text())
        self.vocabulary = int(config["vocab_size"])
        self._running: tuple[str, Engine] | None = None
        self._plain: tuple[str, Engine] | None = None
        self._known: dict[str, list[int]] = {}
        self._scratch = 0

    def close(self) -> None:
        """Stop every engine, and let go of what the drivers keep."""
        self.stop()
        if self._plain is not None:
            self._plain[1].stop()
            self._plain = None
        for driver in (self.driver, *self.partners):
            driver.close()

    # -- prompts ----------------------------------------------------------------------------

    def words(self, seed: int, count: int) -> list[int]:
        """Tokens without sense; equal arguments, equal tokens."""
        picks = random.Random(seed)
        return [picks.randrange(16, self.vocabulary) for _ in range(count)]

    def new_folder(self) -> Path:
        """An empty folder of its own."""
        self._scratch += 1
        made = self.folder / f"scratch-{self._scratch}"
        made.mkdir(parents=True)
        return made

    # -- engines ----------------------------------------------------------------------------

    def config(self, **tables: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of kvcore: the kit's own, and ``tables`` over them."""
        made: dict[str, Any] = {
            "block": {"tokens": BLOCK},
            "host": {"capacity": "64MiB"},
            "log": {"level": "error"},
        }
        for name, values in tables.items():
            made[name] = {**made.get(name, {}), **values}
        return made

    def disk(self) -> dict[str, Any]:
        """A disk tier in a folder of its own."""
        return {"path": str(self.new_folder()), "capacity": "256MiB"}

    def far(self) -> dict[str, Any]:
        """A tier in the kit's remote store, under a name of its own. Lookups wait for its word."""
        assert self.store is not None
        options = {"url": self.store, "prefix": f"kit-{uuid.uuid4().hex}", **PATIENT}
        return {"plugin": store_plugin(self.store), "capacity": "256MiB", "options": options}

    @contextmanager
    def engine(self, kvcore: Mapping[str, Any] | None = None, **setup: Any) -> Iterator[Engine]:
        """An engine with these settings that holds nothing, maybe one that ran before."""
        wanted = Setup(self.model, kvcore if kvcore is not None else self.config(), **setup)
        if self._running is not None and self._running[0] == wanted.key:
            self._running[1].clear()
        else:
            self.stop()
            self._running = (wanted.key, self.driver.start(wanted))
        yield from self._lent(self._running[1])

    @contextmanager
    def fresh(
        self, kvcore: Mapping[str, Any], driver: Driver | None = None, **setup: Any
    ) -> Iterator[Engine]:
        """An engine started for this block and stopped after it; its disk may hold something."""
        self.stop()
        wanted = Setup(setup.pop("model", self.model), kvcore, **setup)
        self._running = ("", (driver or self.driver).start(wanted))
        yield from self._lent(self._running[1])
        self.stop()

    def _lent(self, engine: Engine) -> Iterator[Engine]:
        """Nobody gets an engine in which a case has failed."""
        try:
            yield engine
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the engine with kvcore, if one runs."""
        if self._running is not None:
            running, self._running = self._running, None
            running[1].stop()

    # -- what is expected -------------------------------------------------------------------

    def right(self, asks: Sequence[Ask], **setup: Any) -> list[list[int]]:
        """Answers of the engine without kvcore, each asked alone and once; ``setup`` as `Setup`."""
        setup = {"model": self.model, "lora": any(ask.lora for ask in asks), **setup}
        wanted = Setup(kvcore=None, **setup)
        return [self._right(replace(ask, salt=None, fusion=None), wanted) for ask in asks]

    def _right(self, ask: Ask, setup: Setup) -> list[int]:
        place = f"{setup.key} {list(ask.tokens)} {ask.max_tokens} {ask.lora}"
        if place not in self._known:
            if self._plain is None or self._plain[0] != setup.key:
                if self._plain is not None:
                    self._plain[1].stop()
                self._plain = (setup.key, self.driver.start(setup))
            [answer] = self._plain[1].ask([replace(ask, abort_after=None)])
            self._known[place] = answer.tokens
        return self._known[place]

    def same(self, got: Sequence[Answer], asks: Sequence[Ask], **setup: Any) -> None:
        """AssertionError unless every answer is that of the engine without kvcore."""
        wrong = [
            f"request {i}: {answer.tokens} for {right}, reused {answer.reused}"
            for i, (answer, right) in enumerate(zip(got, self.right(asks, **setup), strict=True))
            if answer.tokens != right
        ]
        assert not wrong, f"{len(wrong)} of {len(got)} answers differ: {'; '.join(wrong[:3])}"

    def reusable(
        self,
        ask: Ask,
        block: int = BLOCK,
        *,
        shared: int | None = None,
        writer: Driver | None = None,
        reader: Driver | None = None,
    ) -> int:
        """Tokens that must be reused of a prompt that was answered before, by ``writer``; or of
        one whose first ``shared`` tokens are those of a longer one that was."""
        prompt = len(ask.tokens)
        computed = prompt + ask.max_tokens - 1  # the last token of an answer is not computed
        stored = (writer or self.driver).stores(computed)
        return (reader or self.driver).reuses(
            prompt, min(stored, prompt if shared is None else shared), block
        )

    def stored(self, engine: Engine, asks: Sequence[Ask]) -> None:
        """Ask one by one until all is stored, and let the engine forget what it holds itself."""
        for ask in asks:
            engine.ask([ask])
        engine.settle()
        engine.forget()


def in_order(cases: Iterable[Case]) -> list[Case]:
    """By section; inside one as they are registered, which is how they share engines best."""
    return sorted(cases, key=lambda one: SECTIONS.index(one.section))


def run(
    kit: Kit, cases: Iterable[Case] | None = None, told: Callable[[Result], None] | None = None
) -> list[Result]:
    """Run cases on the kit's engine; a failing one does not stop the others."""
    results = []
    for one in in_order(CASES if cases is None else cases):
        result = _run(kit, one)
        results.append(result)
        if told is not None:
            told(result)
    return results


def _run(kit: Kit, one: Case) -> Result:
    lacking = one.lacks(kit)
    if lacking:
        return Result(one.section, one.name, "left out", lacking)
    started = time.monotonic()
    outcome, why = "passed", ""
    try:
        one.run(kit)
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is its result
        outcome = "failed"
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        traceback.print_exc()
    return Result(one.section, one.name, outcome, why, round(time.monotonic() - started, 2))
