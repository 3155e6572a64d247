"""A prompt as fusion sees it: what is exact, what is cached from elsewhere, what is new.

    0          12               212              412        440
    ├─ Prefix ─┼──── Cached ─────┼──── Cached ────┼── Fresh ─┤
      exact      computed at 0,    computed at 9,   no KV yet:
      KV         wanted at 12      wanted at 212    always computed

A row is a token of the prompt, and its number is its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvcore.errors import ConfigError

__all__ = ["Cached", "ChunkKV", "Fresh", "LayerKV", "Prefix", "PromptPlan", "PromptSegment"]


class LayerKV(NamedTuple):
    """K after RoPE and V of one layer, each [tokens, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class ChunkKV:
    """KV of consecutive tokens as it was computed. Never written to by anything here.

    Args:
        tokens: the chunk's own.
        layers: one `LayerKV` a layer.
        start: the position of its first token when it was computed.
        behind: the tokens it was computed behind; empty if it stood alone.
    """

    tokens: tuple[int, ...]
    layers: tuple[LayerKV, ...] = field(repr=False)
    start: int = 0
    behind: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for layer, kv in enumerate(self.layers):
            if not len(kv.keys) == len(kv.values) == len(self.tokens):
                raise ConfigError(
                    f"layer {layer} holds KV of {len(kv.keys)} and {len(kv.values)} tokens "
                    f"for a chunk of {len(self.tokens)}"
                )

    def part(self, start: int, stop: int) -> ChunkKV:
        """Tokens [start, stop) of this chunk, over the same memory: what is left of an evicted one.

        What stood before them counts as something they were computed behind.
        """
        if not 0 <= start < stop <= len(self.tokens):
            raise ConfigError(f"no tokens [{start}, {stop}) in a chunk of {len(self.tokens)}")
        return ChunkKV(
            self.tokens[start:stop],
            tuple(LayerKV(kv.keys[start:stop], kv.values[start:stop]) for kv in self.layers),
            self.start + start,
            self.behind + self.tokens[:start],
        )


@dataclass(frozen=True)
class Prefix:
    """The start of the prompt with exact KV: read, never recomputed, no part of the budget."""

    kv: ChunkKV

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.kv.tokens


@dataclass(frozen=True)
class Cached:
    """A chunk, wherever it was computed: approximate at its place in this prompt."""

    kv: ChunkKV

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.kv.tokens


@dataclass(frozen=True)
class Fresh:
    """Tokens without KV. The last of them are the question."""

    tokens: tuple[int, ...]


PromptSegment: TypeAlias = Prefix | Cached | Fresh


class PromptPlan:
    """The segments of one prompt, in order. Immutable.

    Raises `ConfigError` where they cannot be a prompt: one without fresh tokens at its end has no
    row to take the next token from, and only a chunk computed at 0 can be an exact prefix.
    """

    def __init__(self, segments: Sequence[PromptSegment]) -> None:
        self.segments = tuple(segment for segment in segments if segment.tokens)
        if not self.segments or not isinstance(self.segments[-1], Fresh):
            raise ConfigError("a plan ends with fresh tokens: give the question as Fresh(tokens)")
        for index, segment in enumerate(self.segments):
            if isinstance(segment, Prefix) and (index or segment.kv.start):
                raise ConfigError(
                    f"segment {index} is a prefix with KV from position {segment.kv.start}: a "
                    "prefix is the first segment and was computed at 0; anything else is Cached"
                )

    def __len__(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def tokens(self) -> Tensor:
        """[tokens] int64."""
        return torch.tensor([token for segment in self.segments for token in segment.tokens])

    def placed(self) -> Iterator[tuple[int, PromptSegment]]:
        """Each segment with the position of its first token."""
        position = 0
        for segment in self.segments:
            yield position, segment
            position += len(segment.tokens)

    def rows(self, kind: type[Prefix] | type[Cached] | type[Fresh]) -> Tensor:
        """Positions of all tokens in segments of this kind, ascending, int64."""
        parts = [
            torch.arange(start, start + len(segment.tokens))
            for start, segment in self.placed()
            if isinstance(segment, kind)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    @property
    def question(self) -> Tensor:
        """Positions of the last segment, ascending, int64."""
        return torch.arange(len(self) - len(self.segments[-1].tokens), len(self))

    @property
    def offsets(self) -> Tensor:
        """[tokens] int64: each row's place in its own segment."""
        return torch.cat([torch.arange(len(segment.tokens)) for segment in self.segments])

    @property
    def exact_tokens(self) -> int:
        """How many tokens from the start have exact KV after a blend: those before any chunk."""
        first = [start for start, segment in self.placed() if isinstance(segment, Cached)]
        return min(first, default=len(self))
