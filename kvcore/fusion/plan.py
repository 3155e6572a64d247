"""A prompt as fusion sees it: exact prefix, chunks cached from elsewhere, and fresh tokens.

    0          12               212              412        440
    ├─ Prefix ─┼──── Cached ─────┼──── Cached ────┼── Fresh ─┤
      exact      computed at 0,    computed at 9,   no KV yet:
      KV         needed at 12      needed at 212    always computed

A row is a token of the prompt; its number is its position.
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
    """K (after RoPE) and V of one layer, each [tokens, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class ChunkKV:
    """KV of consecutive tokens as it was computed. Nothing in this package writes to it.

    Args:
        tokens: the tokens of the chunk.
        layers: one `LayerKV` per layer.
        start: the position of the first token when the KV was computed.
        behind: the tokens that preceded the chunk then; empty if it was computed alone.
    """

    tokens: tuple[int, ...]
    layers: tuple[LayerKV, ...] = field(repr=False)
    start: int = 0
    behind: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for layer, kv in enumerate(self.layers):
            if not len(kv.keys) == len(kv.values) == len(self.tokens):
                raise ConfigError(
                    f"layer {layer} has K of {len(kv.keys)} and V of {len(kv.values)} tokens "
                    f"for a chunk of {len(self.tokens)}: give one row for each token"
                )

    def part(self, start: int, stop: int) -> ChunkKV:
        """Return tokens [start, stop) of this chunk, over the same memory.

        This is what remains of a chunk that was partly evicted. The tokens before ``start`` are
        added to `behind`.
        """
        if not 0 <= start < stop <= len(self.tokens):
            raise ConfigError(
                f"tokens [{start}, {stop}) of a chunk of {len(self.tokens)}: give a range in it"
            )
        return ChunkKV(
            self.tokens[start:stop],
            tuple(LayerKV(kv.keys[start:stop], kv.values[start:stop]) for kv in self.layers),
            self.start + start,
            self.behind + self.tokens[:start],
        )


@dataclass(frozen=True)
class Prefix:
    """The start of the prompt with exact KV: it is never recomputed nor counted in the budget."""

    kv: ChunkKV

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.kv.tokens


@dataclass(frozen=True)
class Cached:
    """A chunk that was computed elsewhere, whose KV is approximate at its position here."""

    kv: ChunkKV

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.kv.tokens


@dataclass(frozen=True)
class Fresh:
    """Tokens without KV. The last `Fresh` of a prompt is the question."""

    tokens: tuple[int, ...]


PromptSegment: TypeAlias = Prefix | Cached | Fresh


class PromptPlan:
    """The segments of one prompt, in order. Immutable.

    Raises `ConfigError` if the last segment is not fresh, because then no row yields the next
    token, or if a prefix is not the first segment or was not computed at position 0.
    """

    def __init__(self, segments: Sequence[PromptSegment]) -> None:
        self.segments = tuple(segment for segment in segments if segment.tokens)
        if not self.segments or not isinstance(self.segments[-1], Fresh):
            raise ConfigError(
                "a plan must end with fresh tokens: give the question as Fresh(tokens)"
            )
        for index, segment in enumerate(self.segments):
            if isinstance(segment, Prefix) and (index or segment.kv.start):
                raise ConfigError(
                    f"segment {index} is a prefix with KV from position {segment.kv.start}: a "
                    "prefix is the first segment and was computed at 0; use Cached instead"
                )

    def __len__(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def tokens(self) -> Tensor:
        """The tokens of all segments: [tokens] int64."""
        return torch.tensor([token for segment in self.segments for token in segment.tokens])

    def placed(self) -> Iterator[tuple[int, PromptSegment]]:
        """Yield each segment with the position of its first token."""
        position = 0
        for segment in self.segments:
            yield position, segment
            position += len(segment.tokens)

    def rows(self, kind: type[Prefix] | type[Cached] | type[Fresh]) -> Tensor:
        """Return the positions of all tokens in segments of this kind, ascending, int64."""
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
        """The index of each row in its segment: [tokens] int64."""
        return torch.cat([torch.arange(len(segment.tokens)) for segment in self.segments])

    @property
    def exact_tokens(self) -> int:
        """How many tokens, from the start to the first chunk, have exact KV after a blend."""
        first = [start for start, segment in self.placed() if isinstance(segment, Cached)]
        return min(first, default=len(self))
