"""A request as the executor and a connector see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["LlmRequest", "State"]


class State(Enum):
    """The state of a request. LOADING and SAVING wait for a connector."""

    QUEUED = "queued"
    CONTEXT = "context"
    LOADING = "loading"
    GENERATING = "generating"
    SAVING = "saving"
    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(eq=False)
class LlmRequest:
    """Stands in for the engine's request, with the names that a connector may read.

    ``tokens`` are those that the scheduler knows. With overlap the last sampled token is only on
    the device (``ahead``) for one iteration. ``computed`` counts the tokens whose KV is in pages.
    """

    request_id: int
    tokens: list[int]
    max_tokens: int
    cache_salt: str | None = None
    lora_task_id: int | None = None
    py_lora_path: str | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_positions: list[int] | None = None
    multimodal_lengths: list[int] | None = None
    state: State = State.QUEUED
    pages: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    computed: int = 0
    num_connector_matched_tokens: int = 0
    prompt_len: int = 0
    cached_tokens: int = 0
    is_dummy_request: bool = False
    added: bool = False

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def py_request_id(self) -> int:
        return self.request_id

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0, "one beam"
        return list(self.tokens)

    @property
    def salt(self) -> str:
        """The salt of the engine's own prefix cache."""
        lora = self.py_lora_path or self.lora_task_id
        return f"{self.cache_salt}|{lora}|{self.multimodal_hashes}"

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def sampled(self) -> int:
        """The number of tokens sampled so far, with those that the scheduler does not know yet."""
        return len(self.tokens) - self.prompt_len + len(self.ahead)

    @property
    def everything(self) -> Sequence[int]:
        """All tokens as the device has them."""
        return [*self.tokens, *self.ahead]
