"""Chunks of prompts: marked, between separators, found by search; cut, evicted, too many."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.config.schema_fusion import FusionConfig
from kvcore.connector.fusion_chunks import ChunkPlanner
from kvcore.errors import KVCoreError
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.segments import Reusable, Segments
from kvcore.harness.prompts import words as words_of
from kvcore.index import BlockIndex, TierSpec
from kvcore.index.policy import BUILTIN_POLICIES
from kvcore.manager import HOST, Backing, KVManager
from kvcore.model.keys import KeyChain, Namespace
from support.budget import examples

words = functools.partial(words_of, ids=range(100, 50_000))
BLOCK = 16
NAMESPACE = Namespace(b"model")
ANY = FusionOptions()


class Store:
    """Chains that are stored, on host or disk, and the chunks of prompts over them."""

    def __init__(self, block_nbytes: int = 1, **fusion: Any) -> None:
        policy = BUILTIN_POLICIES["lru"]
        self.index = BlockIndex([TierSpec(HOST, 2500, policy), TierSpec("disk", 500, policy)])
        transport: Any = SimpleNamespace()
        manager = KVManager(self.index, transport, backing=[Backing("disk")])
        config = FusionConfig(min_tokens=32, **fusion)
        segments = Segments(BLOCK, min_tokens=32)
        self.chunks = ChunkPlanner(config, BLOCK, block_nbytes, manager, segments)

    def put(self, tokens: Sequence[int], tier: str = HOST, learn: bool = True) -> KeyChain:
        chain = KeyChain(NAMESPACE, BLOCK)
        chain.extend(list(tokens))
        keys = chain.keys
        self.index.lifecycle.commit(
            self.index.lifecycle.reserve(tier, keys, 0, len(keys), NAMESPACE.digest)
        )
        if learn:
            self.chunks.learn(chain, 0, len(keys), tokens)
        return chain

    def find(self, tokens: Sequence[int], options: FusionOptions = ANY, exact: int = 0) -> Any:
        return self.chunks.find(tokens, options, NAMESPACE, exact)

    def plan(self, tokens: Sequence[int], exact: int = 0, options: FusionOptions = ANY) -> Any:
        found = self.find(tokens, options, exact)
        return self.chunks.plan(found, exact, len(tokens) - 1, 0.15)


def check(prompt: Sequence[int], chunk: Reusable, chain: KeyChain, text: Sequence[int]) -> None:
    """The chunk is what it says: the same tokens there and here, and the key of its last block."""
    start, length, source, key = chunk
    assert prompt[start : start + length] == text[source : source + length]
    assert key == chain.keys[(source + length - 1) // BLOCK]


@settings(max_examples=examples(40, 1), deadline=None)
@given(
    before=st.integers(0, 40),
    behind=st.integers(1, 40),
    exact=st.integers(0, 120),
    start=st.integers(0, 60),
    length=st.integers(32, 100),
)
def test_what_lies_between_the_exact_prefix_and_the_last_token_is_planned(
    before: int, behind: int, exact: int, start: int, length: int
) -> None:
    store, text = Store(), words(1, 192)
    chain = store.put(text)
    part = text[start : start + length]
    prompt = [*words(2, before), *part, *words(3, behind)]
    exact = min(exact, len(prompt) - 1)
    plan = store.plan(prompt, exact)
    sink = start > 0  # the first token of a prompt is never one that stood behind others
    first, last = max(before, exact, sink), before + len(part)
    if last - first < 32:
        assert plan is None
        return
    assert plan is not None
    [chunk] = plan.chunks
    check(prompt, chunk, chain, text)
    assert chunk.prompt_start == first
    assert (plan.exact, plan.stop, plan.reused) == (exact, last, last - first)
    hit, a, b = store.chunks.source(chunk)
    assert hit.depth >= b
    assert range(a, b) == store.chunks.blocks(chunk.source_start, chunk.length)


def test_a_prompt_that_ends_in_a_chunk_keeps_its_last_token() -> None:
    store, text = Store(), words(1, 96)
    chain = store.put(text)
    plan = store.plan([*words(2, 8), *text])
    assert plan.stop == 8 + 95
    check([*words(2, 8), *text], plan.chunks[0], chain, text)
    shorter = store.plan([*words(2, 8), *text[:65]])  # the last token was a block's first
    assert shorter.stop == 8 + 64
    assert shorter.chunks[0].last_key == chain.keys[3]


def test_marked_texts_are_looked_up_as_they_were_warmed() -> None:
    store = Store(behind=[7, 8, 9])
    text = words(1, 90)
    chain = store.put([7, 8, 9, *text], learn=False)
    prompt = [*words(2, 20), *text, *words(3, 20)]
    assert store.find(prompt) == []  # nobody has told which tokens the blocks hold
    [found] = store.find(prompt, FusionOptions(chunks=((20, 110),)))
    assert found == Reusable(20, 93 // BLOCK * BLOCK - 3, 3, chain.keys[4])
    assert store.find(prompt, FusionOptions(chunks=((21, 110),))) == []
    assert store.find(prompt, FusionOptions(chunks=())) == []


def test_separators_cut_chunks_out_and_the_rest_is_searched() -> None:
    store, mark = Store(separator=[1, 2]), [1, 2]
    first, second, loose = words(1, 48), words(2, 64), words(3, 64)
    store.put(first, learn=False)
    store.put(second, learn=False)
    store.put(loose)
    prompt = [*first, *mark, *second, *mark, *mark, *words(4, 5), *loose, *words(5, 9)]
    found = store.find(prompt)
    assert [(r.prompt_start, r.length) for r in found] == [(0, 48), (50, 64), (123, 64)]
    named = Store(separator=[1, 2], unmarked=False)
    named.put(loose)
    assert named.find(prompt) == []


def test_a_chunk_that_has_left_every_tier_is_no_more_planned() -> None:
    store, text = Store(), words(1, 96)
    store.put(text)
    prompt = [*words(2, 8), *text, *words(3, 8)]
    found = store.find(prompt)
    store.index.removal.clear()
    assert store.chunks.plan(found, 0, len(prompt) - 1, 0.15) is None
    with pytest.raises(KVCoreError):
        store.chunks.source(found[0])
    store.chunks.forget()
    assert store.find(prompt) == []


def test_a_chunk_that_goes_after_it_was_planned_is_passed_over() -> None:
    """As behind a server, where others store too between two questions, and which may end."""
    store, first, second = Store(block_nbytes=10), words(1, 64), words(2, 64)
    store.put(first)
    store.put(second)
    prompt = [*words(3, 8), *first, *words(4, 8), *second, *words(5, 8)]
    plan = store.plan(prompt)
    assert store.chunks.nbytes(plan) == {HOST: 80}
    store.index.removal.clear()
    store.put(second)
    assert [chunk for chunk, _ in store.chunks.sources(plan)] == [plan.chunks[1]]
    assert store.chunks.nbytes(plan) == {HOST: 40}
    here = store.chunks.in_host(plan)
    assert here is not None
    assert here.chunks == plan.chunks[1:]
    store.index.removal.clear()
    assert store.chunks.nbytes(plan) == {}
    assert store.chunks.in_host(plan) is None


def test_a_chunk_whose_chain_is_not_told_is_not_planned() -> None:
    """A server ends between two questions about a chunk that is to be cut."""
    store, text = Store(), words(1, 96)
    found = [Reusable(8, 70, 0, store.put(text).keys[4])]
    assert store.chunks.plan(found, 0, 60, 0.15) is not None

    def gone(key: bytes) -> list[bytes]:
        raise KVCoreError("the server does not answer")

    store.index.path = gone  # type: ignore[method-assign]
    assert store.chunks.plan(found, 0, 60, 0.15) is None


def test_only_chunks_in_host_memory_are_left_of_a_plan() -> None:
    store = Store()
    near, far = words(1, 64), words(2, 64)
    store.put(near)
    store.put(far, tier="disk")
    prompt = [*words(3, 8), *near, *words(4, 8), *far, *words(5, 8)]
    plan = store.plan(prompt)
    assert [chunk.length for chunk in plan.chunks] == [64, 64]
    here = store.chunks.in_host(plan)
    assert here is not None
    assert (here.stop, here.reused, here.exact, here.ratio) == (72, 64, 0, 0.15)
    only = store.plan([*words(3, 8), *far, *words(5, 8)])
    assert store.chunks.in_host(only) is None


@pytest.mark.parametrize("count", [16, 32])
def test_a_long_prompt_of_a_large_model_reuses_all_of_its_chunks(count: int) -> None:
    """Chunks of 1,024 tokens at 128 KiB each, as Llama 8B has in bfloat16, with the defaults."""
    store = Store(block_nbytes=BLOCK * 128 << 10)
    texts = [words(seed, 1024) for seed in range(count)]
    for text in texts:
        store.put(text)
    prompt = [token for n, text in enumerate(texts) for token in (n, *text)]
    plan = store.plan([*prompt, 1])
    assert (plan.reused, plan.stop) == (1024 * count, len(prompt))
