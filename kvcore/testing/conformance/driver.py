"""What an engine must offer to be tried by the kit: a driver that starts it, and the engine.

    driver = ...                                     one per kind of engine, cheap to make
    engine = driver.start(Setup(model, kvcore={}))   an engine with kvcore in it; None: without
    answers = engine.ask([Ask(tokens)])              all at once, greedy
    engine.settle(); engine.forget()                 saves published; its own cache emptied
    engine.stop()

An adapter's package has a module ``kvcore_<engine>.conformance`` whose ``driver()`` gives one; that
is how `kvcore conformance --engine NAME` finds it.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from kvcore.errors import ConfigError

ASK_S = 600.0
"""How long requests may take: on a machine that does much else, minutes."""

__all__ = ["ASK_S", "Answer", "Ask", "Capability", "Driver", "Engine", "Setup", "find_driver"]


class Capability(Enum):
    """What not every engine can do. A case that needs one it lacks is left out, by name."""

    CHUNKED_PREFILL = "chunked prefill"
    PREEMPTION = "preemption"
    RANKS = "two tensor-parallel ranks"
    STAGES = "two pipeline stages"
    SALT = "tenant salts"
    LORA = "LoRA"
    FUSION = "fusion"


@dataclass(frozen=True)
class Setup:
    """One engine to start.

    Args:
        model: folder in Hugging Face's format.
        kvcore: its settings, nested like the config file; None leaves kvcore out.
        ranks: tensor-parallel ranks, of each stage.
        stages: pipeline stages.
        step_tokens: most tokens of a step, where prompts can be cut; None for any number.
        memory_tokens: KV that fits the engine's own memory, about; None for plenty.
        lora: whether requests will name LoRA weights.
        dtype: what the model is computed and its KV is kept in, by torch's name.
        path: folders to put before the module search path, for plugins of the kit's own.
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
        """Equal for setups that one engine can serve."""
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(shown, sort_keys=True, default=str)


@dataclass(frozen=True)
class Ask:
    """One greedy request. ``abort_after`` so many tokens it is aborted (0: at once); ``fusion`` is
    as in `kvcore.fusion.options`, None keeps it exact."""

    tokens: Sequence[int]
    max_tokens: int = 8
    salt: str | None = None
    lora: Path | None = None
    fusion: Mapping[str, Any] | None = None
    abort_after: int | None = None


@dataclass(frozen=True)
class Answer:
    """What came back. ``reused`` are prompt tokens that kvcore brought, by tier ("blend" for those
    of a blend)."""

    tokens: list[int]
    reused: dict[str, int] = field(default_factory=dict)

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused.values())


class Engine(ABC):
    """An engine that runs. One thread uses it."""

    @abstractmethod
    def ask(self, asks: Sequence[Ask], timeout_s: float = ASK_S) -> list[Answer]:
        """Answer all at once, in any order inside; results in the order given.

        Raises TransferError where a request does not end within ``timeout_s``.
        """

    @abstractmethod
    def settle(self) -> None:
        """Block until everything that is being saved is published."""

    @abstractmethod
    def forget(self) -> None:
        """Empty the engine's own prefix cache."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, kvcore's tiers too, as if started anew."""

    @abstractmethod
    def counted(self, name: str, **labels: str) -> float:
        """Sum of the samples of one of kvcore's metrics whose labels are these."""

    @property
    def preemptions(self) -> int:
        """Requests that lost their pages and started over, so far."""
        return 0

    @abstractmethod
    def check(self) -> None:
        """AssertionError where something is left over or unsound. The engine is idle and settled.

        What an engine in another process cannot show is not checked.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the engine; what was saved outlives it where its tier does."""


class Driver(ABC):
    """One kind of engine."""

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]

    @abstractmethod
    def start(self, setup: Setup) -> Engine:
        """Start an engine and wait until it takes requests."""

    def about(self) -> str:
        """Which engine this is, and its version."""
        return self.name

    def use(self, python: Path) -> None:
        """Start engines with this interpreter, that of another environment.

        Raises ConfigError where they run in this process.
        """
        raise ConfigError(f"engine {self.name} runs in this process: it cannot be that of {python}")

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Let go of what is kept between engines, none of which runs. `start` may follow."""

    # -- how much is there to be reused: the kit asks for no less and no more ---------------

    def stores(self, tokens: int) -> int:
        """How many tokens are stored of a request whose KV was computed for so many."""
        return tokens

    def reuses(self, prompt: int, stored: int, block: int) -> int:
        """How many of ``prompt`` tokens are reused where the first ``stored`` of them lie in
        kvcore's tiers, in token blocks of ``block``. One at least is always computed."""
        return min(stored // block * block, prompt - 1)

    def looks_up(self, prompt: int) -> int:
        """How many tokens of a prompt kvcore is asked for."""
        return prompt


def find_driver(name: str, python: Path | None = None) -> Driver:
    """The driver of an engine: "reference", or that of the adapter package ``kvcore_<name>``.

    ``python`` is the interpreter of the environment that has the engine; by default this one's.
    Raises ConfigError where there is none, or where it takes no interpreter.
    """
    module = f"kvcore_{name}.testing.conformance"
    if name == "reference":
        module = "kvcore.testing.conformance.reference"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ConfigError(
            f"engine {name!r}: there is no {module} to drive it; give reference, or the name of an "
            "adapter that is installed and has one"
        ) from error
    driver: Driver = found.driver()
    if python is not None:
        driver.use(python)
    return driver
