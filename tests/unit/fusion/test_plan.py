"""Segments, their rows, and what keeps chunks computed behind different things apart."""

from __future__ import annotations

import pytest
import torch

from kvcore.errors import ConfigError
from kvcore.fusion.plan import Cached, ChunkKV, Fresh, LayerKV, Prefix, PromptPlan


def chunk(*tokens: int, start: int = 0) -> ChunkKV:
    kv = LayerKV(torch.randn(len(tokens), 1, 2), torch.randn(len(tokens), 1, 2))
    return ChunkKV(tokens, (kv, kv), start, tuple(range(start)))


PLAN = PromptPlan(
    [Prefix(chunk(1, 2)), Cached(chunk(3, 4, 5)), Fresh((6,)), Cached(chunk(7)), Fresh((8, 9))]
)


def test_rows_are_positions() -> None:
    assert PLAN.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert PLAN.rows(Prefix).tolist() == [0, 1]
    assert PLAN.rows(Cached).tolist() == [2, 3, 4, 6]
    assert PLAN.rows(Fresh).tolist() == [5, 7, 8]
    assert PLAN.question.tolist() == [7, 8]
    assert PLAN.offsets.tolist() == [0, 1, 0, 1, 2, 0, 0, 0, 1]
    assert len(PLAN) == 9


def test_exact_up_to_the_first_chunk() -> None:
    assert PLAN.exact_tokens == 2
    assert (
        PromptPlan([Prefix(chunk(1)), Fresh((2, 3)), Cached(chunk(4)), Fresh((5,))]).exact_tokens
        == 3
    )
    assert PromptPlan([Fresh((1, 2))]).exact_tokens == 2


def test_empty_segments_are_left_out() -> None:
    assert PromptPlan([Fresh(()), Fresh((1,))]).segments == (Fresh((1,)),)


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([], "must end with fresh tokens"),
        ([Cached(chunk(1))], "must end with fresh tokens"),
        ([Fresh((1,)), Prefix(chunk(2)), Fresh((3,))], "first segment"),
        ([Prefix(chunk(2, start=1)), Fresh((3,))], "position 1"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(segments: list[Fresh | Cached], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PromptPlan(segments)


def test_a_part_of_a_chunk_knows_where_it_was_computed() -> None:
    whole = chunk(5, 6, 7, 8, start=3)
    part = whole.part(1, 3)
    assert (part.tokens, part.start, part.behind) == ((6, 7), 4, (0, 1, 2, 5))
    assert torch.equal(part.layers[1].keys, whole.layers[1].keys[1:3])
    for wrong in ((2, 2), (-1, 2), (0, 5)):
        with pytest.raises(ConfigError, match="of a chunk of 4"):
            whole.part(*wrong)


def test_kv_of_another_number_of_tokens_is_refused() -> None:
    kv = LayerKV(torch.zeros(2, 1, 2), torch.zeros(2, 1, 2))
    with pytest.raises(ConfigError, match="K of 2 and V of 2 tokens for a chunk of 3"):
        ChunkKV((1, 2, 3), (kv,))
