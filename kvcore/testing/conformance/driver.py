"""The interface between the conformance kit and an engine: a driver, and the engine it starts.

    driver = ...                                     one per kind of engine, cheap to make
    engine = driver.start(Setup(model, kvcore={}))   an engine with kvcore; None leaves it out
    answers = engine.ask([Ask(tokens)])              all requests at once, greedy
    engine.settle(); engine.forget()                 publish saves; empty the engine's own cache
    engine.stop()

The module ``kvcore_<engine>.testing.conformance`` of an adapter has a function ``driver()``.
`kvcore conformance --engine NAME` calls it to get the engine's driver.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from kvcore.errors import ConfigError

ASK_S = 600.0
"""Seconds that requests may take. The limit is long because the machine may be busy."""

__all__ = ["ASK_S", "Answer", "Ask", "Capability", "Driver", "Engine", "Setup", "find_driver"]


class Capability(Enum):
    """An ability that some engines lack. A case that needs it is then left out, by name."""

    CHUNKED_PREFILL = "chunked prefill"
    PREEMPTION = "preemption"
    RANKS = "two tensor-parallel ranks"
    STAGES = "two pipeline stages"
    SALT = "tenant salts"
    LORA = "LoRA"
    FUSION = "fusion"
    CONTROL = "options not to load and not to save"


@dataclass(frozen=True)
class Setup:
    """How to start one engine.

    Args:
        model: folder of a checkpoint in Hugging Face's format.
        kvcore: settings of kvcore, nested like the config file. None leaves kvcore out.
        ranks: number of tensor-parallel ranks of each stage.
        stages: number of pipeline stages.
        step_tokens: most tokens of a step, if the engine can cut prompts. None sets no limit.
        memory_tokens: approximate number of tokens whose KV the engine's own memory holds. None
            means plenty.
        lora: True if requests will name LoRA weights.
        dtype: torch's name of the type in which the model is computed and its KV is kept.
        path: folders to put before the module search path, for plugins of the kit.
    """

    model: Path
    kvcore: Mapping[str, Any] | None = None
    ranks: int = 1
    stages: int = 1
    step_tokens: int | None = None
    memory_tokens: int | None = None
    lora: bool = False
    dtype: str = "float32"
    path: tuple[Path, ...] = ()

    @property
    def key(self) -> str:
        """Return a value that is equal for setups that one engine can serve."""
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(shown, sort_keys=True, default=str)


@dataclass(frozen=True)
class Ask:
    """One greedy request.

    With ``abort_after``, the request is aborted after that many tokens (0: at once). ``fusion``
    takes the options of `kvcore.fusion.options`; None asks for exact KV. ``asked`` takes the
    options of `kvcore.connector.control`.
    """

    tokens: Sequence[int]
    max_tokens: int = 8
    salt: str | None = None
    lora: Path | None = None
    fusion: Mapping[str, Any] | None = None
    asked: Mapping[str, Any] | None = None
    abort_after: int | None = None


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    ``reused`` counts the prompt tokens that kvcore provided, by tier. "blend" stands for a blend.
    ``ask_engine`` returns the engine's own tokens if these may be from a record of its answers.
    """

    tokens: list[int]
    reused: dict[str, int] = field(default_factory=dict)
    ask_engine: Callable[[], list[int]] | None = field(default=None, compare=False, repr=False)

    def confirmed(self) -> list[int]:
        """Return the tokens of the engine itself. Starts an engine if these are from a record."""
        return self.tokens if self.ask_engine is None else self.ask_engine()

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused.values())


class Engine(ABC):
    """A running engine. Use it from one thread."""

    @abstractmethod
    def ask(self, asks: Sequence[Ask], timeout_s: float = ASK_S) -> list[Answer]:
        """Answer all requests at once, and return the answers in the order of the requests.

        Blocks. Raises TransferError if a request does not end within ``timeout_s`` seconds.
        """

    @abstractmethod
    def settle(self) -> None:
        """Block until everything that is being saved is published."""

    @abstractmethod
    def forget(self) -> None:
        """Empty the engine's own prefix cache."""

    @abstractmethod
    def clear(self) -> None:
        """Empty the engine's own prefix cache and kvcore's tiers, as after a fresh start."""

    @abstractmethod
    def counted(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of kvcore's metric ``name`` that have all of ``labels``."""

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far: requests that lost their pages and started over."""
        return 0

    @abstractmethod
    def check(self) -> None:
        """Assert that nothing leaked and that the data structures are consistent.

        Call this when the engine is idle and settled. Raises AssertionError if a check fails. State
        that an engine in another process cannot show is not checked.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the engine. Saved blocks stay in tiers that are persistent."""


class Driver(ABC):
    """The driver of one kind of engine. Subclass it to run the kit on an engine."""

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]
    vocabulary: ClassVar[int | None] = None
    """Number of tokens that the kit's models have. None means as many as their tokenizer has.

    An engine that never uses the tokenizer takes a small number, which saves most of the time that
    it spends on logits.
    """

    page_tokens: ClassVar[int] = 32
    """Tokens of a page of the engine's own cache."""

    @abstractmethod
    def start(self, setup: Setup) -> Engine:
        """Start an engine and block until it accepts requests."""

    def about(self) -> str:
        """Return the name and version of the engine."""
        return self.name

    def use(self, python: Path) -> None:
        """Start engines with the Python interpreter of another environment.

        Raises ConfigError if the engines run in this process.
        """
        raise ConfigError(
            f"engine {self.name} runs in this process and cannot use the interpreter {python}; "
            "leave the interpreter out"
        )

    def close(self) -> None:  # noqa: B027 - most drivers keep nothing
        """Release what is kept between engines. No engine may be running. `start` may follow."""

    # -- how much is reused: the kit requires exactly this many tokens ----------------------

    def stores(self, tokens: int) -> int:
        """Return how many of a request's ``tokens`` computed tokens are stored."""
        return tokens

    def reuses(self, prompt: int, stored: int, block: int) -> int:
        """Return how many tokens of a prompt are reused if its first ``stored`` are in a tier.

        ``block`` is the size of kvcore's token blocks. At least one token is always computed.
        """
        return min(stored // block * block, prompt - 1)

    def looks_up(self, prompt: int, held: int = 0) -> int:
        """Return how many tokens of a prompt of ``prompt`` tokens the engine looks up in kvcore.

        ``held`` of them are in the engine's own cache, which finds whole pages of them.
        """
        return prompt - self.holds(prompt, held)

    def holds(self, prompt: int, held: int) -> int:
        """Return how many of its ``held`` tokens the engine itself reuses for a prompt."""
        return min(held, prompt - 1) // self.page_tokens * self.page_tokens


def find_driver(name: str, python: Path | None = None) -> Driver:
    """Return the driver of an engine: "reference", or that of the adapter ``kvcore_<name>``.

    ``name`` may end with a colon and a variant, such as ``vllm:0.33-v2``. The driver says which
    variants it has. ``python`` is the interpreter of the environment that has the engine; None
    means this one. Raises ConfigError if there is no such driver or variant, or if the driver takes
    no interpreter.
    """
    engine, _, variant = name.partition(":")
    module = f"kvcore_{engine}.testing.conformance"
    if engine == "reference":
        module = "kvcore.testing.conformance.reference"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ConfigError(
            f"engine {engine!r}: there is no {module} to drive it; give reference, or the name of "
            "an adapter that is installed and has one"
        ) from error
    if variant and not hasattr(found, "variant"):
        raise ConfigError(f"engine {engine!r} has no variants: given {name!r}; give {engine!r}")
    driver: Driver = found.variant(variant) if variant else found.driver()
    if python is not None:
        driver.use(python)
    return driver
