"""A request of the reference engine, from the queue to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from kvcore.fusion.options import FusionOptions

__all__ = ["Request", "State"]


class State(Enum):
    """The state of a request.

    WAITING ─▶ LOADING ─▶ RUNNING ─▶ DONE        ABORTED from anywhere before DONE
       ▲           └─ failed ─┐  │
       └──────────────────────┴──┘ preempted
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"
    ABORTED = "aborted"

    @property
    def ended(self) -> bool:
        return self in (State.DONE, State.ABORTED)


@dataclass(eq=False)
class Request:
    """One request. ``tokens`` are the prompt and the answer so far.

    ``pages`` hold the KV of [0, ``computed``). ``approximate_from`` is the first position whose KV
    comes from a blend: no KV from there on is stored as exact. ``reused`` counts the tokens that
    kvcore provided, by tier. ``lora`` is the folder of the request's LoRA weights. ``promise`` is
    what a prefill engine offered for the prompt, and ``promised`` what this engine offers once the
    request is done. ``asked`` is what its client has for kvcore, of any type.
    """

    request_id: int
    tokens: list[int]
    max_tokens: int
    salt: str = ""
    fusion: FusionOptions = field(default_factory=lambda: FusionOptions(enabled=False))
    lora: Path | None = None
    prompt_len: int = 0
    state: State = State.WAITING
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int = 0
    approximate_from: int | None = None
    reused: dict[str, int] = field(default_factory=dict)
    blended_tokens: int = 0
    promise: dict[str, Any] | None = None
    promised: dict[str, Any] | None = None
    asked: Any = None

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def family(self) -> str:
        """Key that separates requests in the engine's own prefix cache."""
        return self.salt if self.lora is None else f"{self.salt}|{self.lora}"

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def decoding(self) -> bool:
        """True if only the newest token has no KV yet."""
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > self.prompt_len

    @property
    def exact(self) -> int:
        """Number of leading tokens whose KV equals that of a full prefill."""
        known = self.approximate_from
        return self.computed if known is None else min(self.computed, known)

    def restart(self) -> None:
        """Reset the computed KV. The answer so far is kept."""
        self.state = State.WAITING
        self.pages = []
        self.computed = self.cached_tokens = self.blended_tokens = 0
        self.approximate_from = None
        self.reused = {}
