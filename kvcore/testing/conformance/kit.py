"""One run of the kit: it starts engines when a case needs one, and knows the expected answers.

Starting an engine may take a minute. An engine is therefore kept while cases ask for the same
setup, and cleared between them. A second engine without kvcore gives the expected answers.
"""

from __future__ import annotations

import json
import random
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.harness.models import tiny_model
from kvcore.testing.conformance.driver import Answer, Ask, Capability, Driver, Engine, Setup

__all__ = ["CASES", "SECTIONS", "Case", "Kit", "Result", "case", "run"]

SECTIONS = ("equality", "accounting", "fusion", "faults", "crossing")
BLOCK = 16
PATIENT = {"lookup_s": 60, "timeout_s": 30, "deadline_s": 60, "splits_s": 0.01}
"""Store options for a busy machine.

A stored block is found, whatever the rank count that wrote it.
"""

_STORES = {"redis": "redis", "rediss": "redis", "unix": "redis"}
"""Tier plugins by URL scheme. Others (``s3``, ``gs``, ``az``, ``file``) are for "objects"."""


def store_plugin(url: str) -> str:
    """Return the tier plugin for a store's URL. Raises ConfigError if it is not a URL."""
    scheme, found, _ = url.partition("://")
    if not found:
        raise ConfigError(
            f"given the store {url!r}; it takes a URL: redis://HOST:PORT/DB, s3://BUCKET/PATH, "
            "file:///FOLDER"
        )
    return _STORES.get(scheme, "objects")


@dataclass(frozen=True)
class Case:
    """A requirement on every engine. ``run(kit)`` raises AssertionError if it is not met.

    A case with ``pairs`` runs only if the kit has ``partners``. A case with ``store`` runs only if
    the kit has a remote store.
    """

    section: str
    name: str
    about: str
    needs: frozenset[Capability]
    run: Callable[[Kit], None]
    pairs: bool = False
    store: bool = False

    def lacks(self, kit: Kit) -> str:
        """Return why the case cannot run on this engine, or an empty string if it can."""
        missing = self.needs - kit.driver.capabilities
        if missing:
            return "no " + ", ".join(sorted(capability.value for capability in missing))
        if self.pairs and not kit.partners:
            return "no other engine at hand"
        return "no remote store at hand" if self.store and kit.store is None else ""


CASES: list[Case] = []
"""All cases, in the order in which they were registered."""


def case(
    section: str, *needs: Capability, pairs: bool = False, store: bool = False
) -> Callable[[Callable[[Kit], None]], Callable[[Kit], None]]:
    """Register a function as a case. Its name and its docstring's first line are shown."""
    assert section in SECTIONS, section

    def register(function: Callable[[Kit], None]) -> Callable[[Kit], None]:
        name = function.__name__.replace("_", "-")
        about = (function.__doc__ or "").strip().splitlines()[0]
        CASES.append(Case(section, name, about, frozenset(needs), function, pairs, store))
        return function

    return register


@dataclass(frozen=True)
class Result:
    """The outcome of a case: "passed", "failed" or "left out", and why."""

    section: str
    case: str
    outcome: str
    why: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Kit(AbstractContextManager["Kit"]):
    """The engines, prompts and expectations of a run. One thread. Close it when done.

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
        self.model = model or self.tiny_model()
        config = json.loads((self.model / "config.json").read_text())
        self.vocabulary = int(config["vocab_size"])
        self._running: tuple[str, Engine] | None = None
        self._plain: tuple[str, Engine] | None = None
        self._known: dict[str, Answer] = {}
        self._scratch = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every engine and close the drivers."""
        self.stop()
        if self._plain is not None:
            self._plain[1].stop()
            self._plain = None
        for driver in (self.driver, *self.partners):
            driver.close()

    def tiny_model(self, *, layers: int = 4, seed: int = 0) -> Path:
        """Return the folder of a random model. The kit's own is the default one."""
        return tiny_model(
            "llama", layers=layers, heads=4, kv_heads=2, head_dim=64, seed=seed,
            vocabulary=self.driver.vocabulary,
        )  # fmt: skip

    # -- prompts ----------------------------------------------------------------------------

    def tokens(self, seed: int, count: int) -> list[int]:
        """Return ``count`` random tokens. Equal arguments give equal tokens."""
        picks = random.Random(seed)
        return [picks.randrange(16, self.vocabulary) for _ in range(count)]

    def new_folder(self) -> Path:
        """Make a new empty folder."""
        self._scratch += 1
        made = self.folder / f"scratch-{self._scratch}"
        made.mkdir(parents=True)
        return made

    # -- engines ----------------------------------------------------------------------------

    def config(self, **tables: Mapping[str, Any]) -> dict[str, Any]:
        """Return kvcore's settings: the kit's defaults, updated with ``tables``."""
        made: dict[str, Any] = {
            "block": {"tokens": BLOCK},
            "host": {"capacity": "64MiB"},
            "log": {"level": "error"},
        }
        for name, values in tables.items():
            made[name] = {**made.get(name, {}), **values}
        return made

    def disk(self) -> dict[str, Any]:
        """Return the settings of a disk tier in a new folder."""
        return {"path": str(self.new_folder()), "capacity": "256MiB"}

    def store_tier(self) -> dict[str, Any]:
        """Return the settings of a tier in the kit's remote store, under a new key prefix.

        Lookups wait for its answer.
        """
        assert self.store is not None
        options = {"url": self.store, "prefix": f"kit-{uuid.uuid4().hex}", **PATIENT}
        return {"plugin": store_plugin(self.store), "capacity": "256MiB", "options": options}

    @contextmanager
    def engine(self, kvcore: Mapping[str, Any] | None = None, **setup: Any) -> Iterator[Engine]:
        """Lend an empty engine with these settings. It may be one that ran before, cleared."""
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
        """Start an engine for this block and stop it afterwards. Its disk may hold blocks."""
        self.stop()
        wanted = Setup(setup.pop("model", self.model), kvcore, **setup)
        self._running = ("", (driver or self.driver).start(wanted))
        yield from self._lent(self._running[1])
        self.stop()

    def _lent(self, engine: Engine) -> Iterator[Engine]:
        """Lend an engine, and stop it if the case fails, so that no other case gets it."""
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

    def expected(self, asks: Sequence[Ask], **setup: Any) -> list[list[int]]:
        """Return the answers of the engine without kvcore. Each request runs alone, and only once.

        ``setup`` has the fields of `Setup`.
        """
        return [answer.tokens for answer in self._all_right(asks, setup)]

    def _all_right(self, asks: Sequence[Ask], setup: Mapping[str, Any]) -> list[Answer]:
        setup = {"model": self.model, "lora": any(ask.lora for ask in asks), **setup}
        wanted = Setup(kvcore=None, **setup)
        return [self._right(replace(ask, salt=None, fusion=None), wanted) for ask in asks]

    def _right(self, ask: Ask, setup: Setup) -> Answer:
        place = f"{setup.key} {list(ask.tokens)} {ask.max_tokens} {ask.lora}"
        if place not in self._known:
            if self._plain is None or self._plain[0] != setup.key:
                if self._plain is not None:
                    self._plain[1].stop()
                self._plain = (setup.key, self.driver.start(setup))
            [answer] = self._plain[1].ask([replace(ask, abort_after=None)])
            self._known[place] = answer
        return self._known[place]

    def assert_same(self, got: Sequence[Answer], asks: Sequence[Ask], **setup: Any) -> None:
        """Assert that every answer equals that of the engine without kvcore."""
        right = self._all_right(asks, setup)
        pairs = list(zip(got, right, strict=True))
        differ = [i for i, (answer, one) in enumerate(pairs) if answer.tokens != one.tokens]
        if any(got[i].tokens != right[i].confirmed() for i in differ):
            wrong = [
                f"request {i}: {got[i].tokens} for {right[i].tokens}, reused {got[i].reused}"
                for i in differ[:3]
            ]
            raise AssertionError(f"{len(differ)} of {len(got)} answers differ: {'; '.join(wrong)}")

    def reusable(
        self,
        ask: Ask,
        block: int = BLOCK,
        *,
        shared: int | None = None,
        writer: Driver | None = None,
        reader: Driver | None = None,
    ) -> int:
        """Return how many tokens must be reused of a prompt that ``writer`` answered before.

        With ``shared``, only its first ``shared`` tokens were part of an answered, longer prompt.
        """
        prompt = len(ask.tokens)
        computed = prompt + ask.max_tokens - 1  # the last token of an answer is not computed
        stored = (writer or self.driver).stores(computed)
        return (reader or self.driver).reuses(
            prompt, min(stored, prompt if shared is None else shared), block
        )

    def stored(self, engine: Engine, asks: Sequence[Ask]) -> None:
        """Answer requests one by one, wait until all is stored, and empty the engine's cache."""
        for ask in asks:
            engine.ask([ask])
        engine.settle()
        engine.forget()


def in_order(cases: Iterable[Case]) -> list[Case]:
    """Sort cases by section. Within a section the registration order shares engines best."""
    return sorted(cases, key=lambda one: SECTIONS.index(one.section))


def run(
    kit: Kit, cases: Iterable[Case] | None = None, on_result: Callable[[Result], None] | None = None
) -> list[Result]:
    """Run cases on the kit's engine. A failed case does not stop the others."""
    results = []
    for one in in_order(CASES if cases is None else cases):
        result = _run(kit, one)
        results.append(result)
        if on_result is not None:
            on_result(result)
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
